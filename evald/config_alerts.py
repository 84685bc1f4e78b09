"""The tables of what a person is told: ``[[alert]]`` and ``[webhook]``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from evald.config_types import Name, NotNegative, Positive, Seconds, Share, Table, Text

#: what is compared with an earlier point of the run.
COMPARING = frozenset({"drop", "truncated", "no_answer"})


class AlertRule(Table, frozen=True, kw_only=True):
    """One rule: what it finds becomes an ``alert`` record and a line in the log, once.

    Where the condition can last (all kinds but ``builtin``, and those against ``previous``), a
    second record says that it is over, and only then the rule can speak of the same thing again.
    """

    #: name of its records; those of evald itself are ``builtin``.
    name: Name
    #: "drop": a metric got worse; "truncated", "no_answer": more of a set's samples hit the length
    #: limit, or hold no answer; "silent": no point has ended for long; "quarantined": an engine
    #: stays down; "disk": room runs out; "builtin": what evald records by itself, to the webhook.
    kind: Literal["drop", "truncated", "no_answer", "silent", "quarantined", "disk", "builtin"]
    #: kind "drop": names such as "eval/aime"; empty: the headline of every eval set and aggregate.
    metrics: list[Text] = []
    #: kinds "truncated" and "no_answer": names of eval sets; empty: all.
    sets: list[Name] = []
    #: kinds that compare: with the measured point before, the best one before, or the baseline. A
    #: slow decline is seen against "best" and "baseline" only. Default: "previous".
    against: Literal["previous", "best", "baseline"] | None = None
    #: kinds that compare: how many half widths of the 95 % interval of the difference it must
    #: exceed; noise alone exceeds 1 in 40 comparisons, 2 in 23,000. Default: 2.
    k: Annotated[float, Meta(gt=0, le=4)] | None = None
    #: kinds that compare: and this much in the metric's own unit. Default: 0 for "drop", 0.05 of
    #: the samples for the others. A metric without an error is compared by this alone.
    at_least: NotNegative | None = None
    #: kind "drop": which value is the best; None: "min" for perplexities, else "max".
    rule: Literal["max", "min"] | None = None
    #: kind "silent": no terminal record for so long, while the newest run has not ended; longer
    #: than the time between two points, and than a point takes.
    after_s: Seconds | None = None
    #: kind "disk": less than this share or these bytes of a file system are free. One, or both.
    below_share: Share | None = None
    below_bytes: Positive | None = None
    #: kind "disk": the file system of the results, of the staging root, or either.
    where: Literal["results", "staging"] | None = None
    #: kind "builtin": names, such as "snapshot_not_deleted"; empty: all.
    names: list[Name] = []
    #: tell the webhook, too, if there is one.
    webhook: bool = True


class Webhook(Table, frozen=True, kw_only=True):
    """Where alerts are posted as JSON, with a ``text`` as Slack and the like expect it.

    URL and token are secrets: the config says where they are, and no log or record shows them.
    """

    #: exactly one of the two: an environment variable, or a file that others may not read.
    url_env: str | None = None
    url_file: str | None = None
    #: sent as ``Authorization: Bearer TOKEN``, if the receiver wants one; one of the two at most.
    token_env: str | None = None
    token_file: str | None = None
    #: tries for one alert; only after a lost connection, and statuses 429 and 500 to 599.
    attempts: Annotated[int, Meta(ge=1, le=10)] = 4
    #: for all tries of one alert.
    deadline_s: Seconds = 60.0
