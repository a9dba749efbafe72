"""The arms of split adapters, shadows and roll-backs in Prometheus' text format.

Labels hold registered names and versions only. Roll-backs are the manager's: every ingress tells
the same number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from serve_app.metrics.exposition import rendered
from serve_app.tally import ARM_SECONDS, OUTCOMES, ArmCounts, ArmKey

_LABELS = ("ingress", "adapter", "arm", "version")


@dataclass(frozen=True, slots=True)
class ArmNumbers:
    """Of one ingress at one moment."""

    ingress: str
    tallies: Sequence[tuple[ArmKey, ArmCounts]]
    num_rollbacks: Sequence[tuple[str, int]]  # by adapter
    num_shadows: int
    num_shadows_dropped: int


def arms_text(numbers: ArmNumbers) -> bytes:
    return rendered(_ArmMetrics(numbers))


class _ArmMetrics(Collector):
    def __init__(self, numbers: ArmNumbers) -> None:
        self._numbers = numbers

    def collect(self) -> Iterator[Metric]:
        numbers = self._numbers
        requests = CounterMetricFamily(
            "loraplex_arm_requests",
            "Requests of split adapters, by how they ended",
            labels=[*_LABELS, "outcome"],
        )
        tokens = CounterMetricFamily(
            "loraplex_arm_output_tokens", "Of split adapters", labels=_LABELS
        )
        first = HistogramMetricFamily(
            "loraplex_arm_time_to_first_token_seconds",
            "Of split adapters, arrival to first token",
            labels=_LABELS,
        )
        latency = HistogramMetricFamily(
            "loraplex_arm_request_latency_seconds",
            "Of split adapters, arrival to last token, of those that ended well",
            labels=_LABELS,
        )
        for key, tally in numbers.tallies:
            labels = [numbers.ingress, key.adapter, key.arm, str(key.version)]
            for outcome, count in zip(OUTCOMES, tally.outcomes, strict=True):
                requests.add_metric([*labels, outcome], count)
            tokens.add_metric(labels, tally.output_tokens)
            first.add_metric(labels, _buckets(tally.first_token), tally.first_token_s)
            latency.add_metric(labels, _buckets(tally.latency), tally.latency_s)
        yield from (requests, tokens, first, latency)
        rollbacks = CounterMetricFamily(
            "loraplex_canary_rollbacks", "Canaries rolled back by the rule", labels=["adapter"]
        )
        for adapter, count in numbers.num_rollbacks:
            rollbacks.add_metric([adapter], count)
        yield rollbacks
        dropped = CounterMetricFamily(
            "loraplex_shadows_dropped", "Copies not made: others would wait", labels=["ingress"]
        )
        dropped.add_metric([numbers.ingress], numbers.num_shadows_dropped)
        yield dropped
        running = GaugeMetricFamily("loraplex_shadows", "Copies under way", labels=["ingress"])
        running.add_metric([numbers.ingress], numbers.num_shadows)
        yield running


def _buckets(counts: Sequence[int]) -> list[tuple[str, float]]:
    pairs: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, ARM_SECONDS), "+Inf"), counts, strict=True):
        total += count
        pairs.append((bound, total))
    return pairs
