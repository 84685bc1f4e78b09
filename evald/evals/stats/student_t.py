"""Student's t distribution, for intervals and p-values of few questions; standard library only."""

from __future__ import annotations

import functools
import math

#: relative accuracy of the continued fraction, and a bound on its terms.
_PRECISION = 3e-16
_MAX_TERMS = 10_000
_TINY = 1e-300
_BISECTIONS = 80


def two_sided_p(t: float, df: float) -> float:
    """Return the chance of ``|T| >= |t|`` with ``df`` (> 0) degrees of freedom.

    ``I_x(df / 2, 1 / 2)`` with ``x = df / (df + t^2)`` (Abramowitz and Stegun, 26.7.1), or 1 minus
    the other tail where x is so near to 1 that it would be rounded away.
    """
    if math.isinf(t):
        return 0.0
    if abs(t) < 1:
        return 1 - regularised_beta(t * t / (df + t * t), 0.5, df / 2)
    return regularised_beta(df / (df + t * t), df / 2, 0.5)


@functools.cache
def critical(confidence: float, df: float) -> float:
    """Return the t that ``|T|`` stays below with probability ``confidence`` (0 to 1).

    Found by bisection of ``two_sided_p``, which falls in t.
    """
    low, high = 0.0, 1.0
    while two_sided_p(high, df) > 1 - confidence:
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if two_sided_p(middle, df) > 1 - confidence:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def regularised_beta(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function ``I_x(a, b)``."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    front = math.exp(log_front)
    # the fraction converges fast on this side of the mean, and the function is symmetric
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction of the incomplete beta function (DLMF 8.17.22).

    Evaluated from the front by Lentz's method, as modified by Thompson and Barnett (1986).
    """
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            result *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return result


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
