"""A sequential test of two rates that may be evaluated after every request.

A canary is judged many times a second, for hours. A test made for a single look would be wrong
sooner or later: with equal arms the difference of two measured rates passes any fixed line again
and again (Johari, Pekelis and Walsh, "Always valid inference", 2015; "Peeking at A/B tests", KDD
2017). The evidence here is valid at all looks together: while the canary is not worse than allowed,
the probability that it EVER reaches 1 / a is at most a, whatever the traffic and the times of the
looks.

For an arm with the true rate p and k events in n requests,

    M(p) = B(k + 1/2, n - k + 1/2) / B(1/2, 1/2) / (p^k (1 - p)^(n - k))

is the likelihood of the counts averaged over all rates (Jeffreys' prior), divided by the likelihood
at p. It is a martingale with mean 1, and by Ville's inequality it reaches 1 / a with probability a
at most: Robbins' method of mixtures, as in Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform,
nonparametric, nonasymptotic confidence sequences", Annals of Statistics 49(2), 2021. The product of
both arms' martingales is a martingale, too. The hypothesis "the canary's rate is at most the stable
version's plus the margin" fixes neither rate, so the evidence against it is the smallest product of
any pair of such rates (universal inference: Wasserman, Ramdas and Balakrishnan, PNAS 117(29),
2020).

Assumption: requests are independent given their arm. A change of the load that meets both arms
alike does no harm in the simulation (`tests/benchmarks/canary_judge.py`), as chance decides the arm
of each request; a client with much of the traffic, always in the same arm, can do harm.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, lgamma, log, log1p, pi

_STEPS = 40  # halvings of the interval that contains the least favourable rate


@dataclass(frozen=True, slots=True)
class Proportion:
    num: int  # requests with the event
    total: int  # requests

    @property
    def rate(self) -> float:
        return self.num / self.total if self.total else 0.0


def log_evidence(stable: Proportion, canary: Proportion, margin: float) -> float:
    """Returns the natural logarithm of the evidence that the canary's rate exceeds the stable
    version's by more than `margin` (0 to 1); at most 0 if the measured rates do not. Without a
    request of stable, its rate counts as 0."""
    if canary.rate <= stable.rate + margin:
        return 0.0
    if not stable.total:
        return _log_martingale(canary, margin)
    rate = _least_favourable(stable, canary, margin)
    return _log_martingale(stable, rate) + _log_martingale(canary, rate + margin)


def _least_favourable(stable: Proportion, canary: Proportion, margin: float) -> float:
    """Returns the stable version's rate in the likeliest pair of rates that differ by the margin.
    Their log-likelihood is concave, and falls towards either measured rate."""
    low, high = stable.rate, canary.rate - margin
    for _ in range(_STEPS):
        rate = (low + high) / 2
        if _slope(stable, rate) + _slope(canary, rate + margin) > 0:
            low = rate
        else:
            high = rate
    return (low + high) / 2


def _slope(arm: Proportion, rate: float) -> float:
    """Returns the slope of the log-likelihood. A rate that nears 1 from below may be rounded to
    1."""
    others = arm.total - arm.num
    return arm.num / rate - (others / (1 - rate) if others else 0.0)


def _log_martingale(arm: Proportion, rate: float) -> float:
    num, others = arm.num, arm.total - arm.num
    mixture = lgamma(num + 0.5) + lgamma(others + 0.5) - lgamma(arm.total + 1) - log(pi)
    if (num and rate <= 0) or (others and rate >= 1):
        return inf
    return mixture - (num * log(rate) if num else 0.0) - (others * log1p(-rate) if others else 0.0)
