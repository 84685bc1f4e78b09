r"""Thirty responses that have brought graders down, or are made to: try them on your own.

No reference but a joke makes them right: a sane one is ``41``.
"""

from __future__ import annotations

_MEGABYTE = 1 << 20


def hostile_answers() -> dict[str, str]:
    """Give all of them by name; built anew each time, as some are large."""
    return {
        # nesting
        "open_braces": "{" * 20_000 + "\\boxed{1}",
        "nested_boxes": "\\boxed{" * 4000 + "1" + "}" * 4000,
        "boxes_never_closed": "\\boxed{" * 4000,
        "nested_fractions": "\\boxed{" + "\\frac{1}{" * 1500 + "1" + "}" * 1501,
        "nested_roots": "\\boxed{" + "\\sqrt{" * 3000 + "1" + "}" * 3001,
        "nested_brackets": "$" + "(" * 10_000 + "1" + ")" * 10_000 + "$",
        "nested_powers": "\\boxed{" + "2^{" * 400 + "1" + "}" * 401,
        # numbers that no memory holds
        "power_tower": "$9^{9^{9^{9}}}$",
        "power_tower_in_a_box": "\\boxed{9^{9^{9}}}",
        "one_huge_power": "\\boxed{2^{999999999}}",
        "factorial": "\\boxed{(10^9)!}",
        "binomial": "\\boxed{\\binom{10^{9}}{5 \\cdot 10^{8}}}",
        "exponent": "it is 1e999999999999",
        # work that does not end
        "huge_sum": "\\boxed{\\sum_{k=1}^{10^{9}} k^{k}}",
        "integral": "\\boxed{\\int_0^{\\infty} e^{-x^{x^{x}}} \\sin(x^{x}) dx}",
        "polynomial": "\\boxed{(x+y+z+1)^{4000} - (x+y+z+1)^{3999}}",
        "regex_bomb": "a" * 64 + "!",
        "answer_bomb": "answer is ((((((" * 20_000,
        # length
        "megabyte_of_letters": "a" * _MEGABYTE,
        "megabyte_of_digits": "7" * _MEGABYTE,
        "megabyte_of_boxes": "\\boxed{1} " * (_MEGABYTE // 10),
        "megabyte_of_spaces": " " * _MEGABYTE,
        "megabyte_of_lists": "1,111," * (_MEGABYTE // 6),
        "long_decimal": "\\boxed{0." + "3" * 100_000 + "}",
        # what is no text, and no LaTeX
        "nul_bytes": "\x00" * 1000 + "\\boxed{4\x001}",
        "half_a_surrogate_pair": "\ud83d \\boxed{\ud83d}",
        "marks_and_directions": "\u202e" + "e\u0301\u0489" * 5000 + "\\boxed{\u2066\u0664\u0661}",
        "broken_fraction": "\\boxed{\\frac{1}{}}",
        "broken_environment": "\\boxed{\\begin{matrix} 1 & \\\\ \\left( \\sum_{}^{} }",
        "macros": "\\text{" * 10_000 + "$" * 10_001,
    }
