"""Grader ``number``: the last number of a response, as exact decimals or within a tolerance."""

from __future__ import annotations

import re
from decimal import Context, Decimal
from typing import Annotated, Any

from msgspec import Meta

from evald.config import Table
from evald.evals.graders.contract import Grade, Rules, Sample, answered, no_answer
from evald.evals.graders.references import TextGrader, reference_texts

#: what GSM8K's solutions put in front of their answer.
_MARK = "####"
_CURRENCY = "[$\u20ac\u00a3]?"
#: a sign counts only where it cannot be a dash between two things: "3-5" is 3 and 5.
_SIGN = r"(?:(?<![\w.)\]}%])[-+\u2212])?"
#: a run of digits and commas is taken whole, and looked at later: no text makes this slow.
_DIGITS = r"(?:(?P<run>\d+(?:,\d+)*+)(?P<point>\.\d+)?|(?<!\.)(?P<bare>\.\d+))"
_NUMBER = re.compile(
    rf"(?P<free>(?<!/))?(?<!\w)(?<!\d\.)(?P<sign>{_CURRENCY}{_SIGN}{_CURRENCY}){_DIGITS}"
    r"(?P<exponent>[eE][-+]?\d{1,6}(?!\w)|\s?(?:\\times|\u00d7)\s?10\^\{?[-+]?\d{1,6}\}?)?"
    r"(?(free)(?P<below>/\d+(?![\d/]))?)(?P<percent>\s?\\?%)?",
    re.ASCII,
)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+", re.ASCII)
#: enough digits for any answer; what is longer is compared rounded. Nothing raises: what cannot be
#: computed is "not a number" and equals nothing.
_PRECISE = Context(prec=400, Emax=10**15, Emin=-(10**15), traps=[])


class NumberSettings(Table, frozen=True, kw_only=True):
    """How far an answer may be from a reference; either tolerance is enough."""

    abs_tol: Annotated[float, Meta(ge=0)] = 0.0
    #: relative to the reference: 0.01 is one per cent of it.
    rel_tol: Annotated[float, Meta(ge=0)] = 0.0


class Value:
    """A number that stands in a text, and whether a percent sign follows it."""

    def __init__(self, amount: Decimal, *, percent: bool) -> None:
        self.amount = amount
        self.percent = percent

    def matches(self, reference: Value, settings: NumberSettings) -> bool:
        """Whether this is the reference; see ``Number`` for what a percent sign does."""
        if self.percent == reference.percent:
            return _close(self.amount, reference.amount, settings)
        mine = [self.amount, _PRECISE.divide(self.amount, Decimal(100))][: 1 + self.percent]
        theirs = [reference.amount, _PRECISE.divide(reference.amount, Decimal(100))]
        return any(_close(a, b, settings) for a in mine for b in theirs[: 1 + reference.percent])


class Number(TextGrader[NumberSettings]):
    r"""The last number of the response, or that of its last line ``#### 42``, if it has one.

    Compared as decimals without rounding: 0.50 is 0.5, and 0.1 is not 0.1000000001. With
    ``abs_tol`` or ``rel_tol`` it may be off by that much.

    - Commas between groups of exactly three digits (also ``{,}`` and ``\,``) are separators of
      thousands: 1,234 is 1234; "1,2" is 1 and 2. The decimal point is a point.
    - A sign (also the true minus) counts unless a letter, digit or bracket stands before it.
    - ``1.5e-3``, ``1.5 \times 10^{-3}`` and a fraction ``3/4`` are one number each.
    - $, euro and pound signs are passed over. A percent sign may stand on one side only: "50%" is
      50 as well as 0.5; where both have one, the numbers before it are compared.
    - Digits inside words (``x2``, ``H2O``) are no numbers.

    The rule of the last number is that of the zero-shot GSM8K evaluations (in lm-evaluation-harness
    the filter "flexible-extract"), the mark that of GSM8K's own solutions (Cobbe et al., Training
    Verifiers to Solve Math Word Problems, arXiv 2110.14168).
    """

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules, NumberSettings)

    def label_fault(self, label: Any) -> str | None:
        """Say whether a reference has no number."""
        if fault := super().label_fault(label):
            return fault
        wrong = [text for text in reference_texts(label) if last_number(text) is None]
        return f"the reference {wrong[0][:80]!r} has no number in it" if wrong else None

    def grade(self, sample: Sample) -> Grade:
        """Find the number and compare it."""
        found = last_number(sample.response)
        if found is None:
            return no_answer("no number in the response")
        references = [last_number(text) for text in reference_texts(sample.label)]
        hit = any(one is not None and found.matches(one, self.settings) for one in references)
        return answered(_written(found), hit)


def last_number(text: str) -> Value | None:
    """Find the number that counts. Linear in the text."""
    _, mark, behind = _plain(text).rpartition(_MARK)
    if mark:
        line = behind.split("\n", 1)[0].strip(" \t\r.*_")
        # a heading of that level goes on behind its number
        if (found := _NUMBER.fullmatch(line)) is not None:
            return _value(found)
    last = None
    for last in _NUMBER.finditer(_plain(text)):  # noqa: B007 - only the last one counts
        pass
    return None if last is None else _value(last)


def _plain(text: str) -> str:
    """Without LaTeX's ways to write a separator of thousands, and an escaped dollar sign."""
    return text.replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")


def _value(match: re.Match[str]) -> Value:
    sign, run = match["sign"], match["run"] or ""
    if _THOUSANDS.fullmatch(run):
        run = run.replace(",", "")
    elif "," in run:
        # a list: its last member, to which no sign in front of it belongs
        sign, run = "", run.rpartition(",")[2]
    minus = "-" if "-" in sign or "\u2212" in sign else ""
    exponent = re.search(r"([-+]?\d+)\}?$", match["exponent"] or "0")
    digits = f"{run}{match['point'] or match['bare'] or ''}"
    amount = _PRECISE.create_decimal(f"{minus}{digits}e{exponent[1] if exponent else 0}")
    below = Decimal((match["below"] or "/1")[1:])
    if below:
        amount = _PRECISE.divide(amount, below)
    return Value(amount, percent=match["percent"] is not None)


def _close(found: Decimal, wanted: Decimal, settings: NumberSettings) -> bool:
    if _PRECISE.compare(found, wanted) == 0:
        return True
    if not (settings.abs_tol or settings.rel_tol):
        return False
    off = _PRECISE.abs(_PRECISE.subtract(found, wanted))
    allowed = _PRECISE.max(
        Decimal(repr(settings.abs_tol)),
        _PRECISE.multiply(Decimal(repr(settings.rel_tol)), _PRECISE.abs(wanted)),
    )
    return _PRECISE.compare(off, allowed) <= 0


def _written(value: Value) -> str:
    """One text for equal numbers: 18, 18.0 and 1.8e1 vote together."""
    normal = _PRECISE.normalize(value.amount)
    exact = 0 <= normal.adjusted() < 20 or -8 < normal.adjusted() < 0  # noqa: PLR2004 - readable
    return f"{normal:{'f' if exact else ''}}{'%' if value.percent else ''}"
