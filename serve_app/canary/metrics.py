"""The metrics of an ingress about split adapters: arms, shadows and rollbacks.

Labels hold registered names and versions only. Rollbacks are counted by the manager: every ingress
returns the same number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import Histogram
from serve_app.tally import ARM_SECONDS, OUTCOMES, ArmCounts, ArmKey

_LABELS = ("ingress", "adapter", "arm", "version")


def arms_text(
    ingress: str,
    arms: Iterable[tuple[ArmKey, ArmCounts]],
    num_rollbacks: Iterable[tuple[str, int]],
    num_shadows: int,
    num_shadows_dropped: int,
) -> bytes:
    """`num_rollbacks`: by adapter."""
    rows = [((ingress, key.adapter, key.arm, str(key.version)), counts) for key, counts in arms]
    return as_text(
        counter(
            "loraplex_arm_requests",
            "Requests of split adapters, by how they ended",
            (*_LABELS, "outcome"),
            [
                ((*values, outcome), count)
                for values, counts in rows
                for outcome, count in zip(OUTCOMES, counts.outcomes, strict=True)
            ],
        ),
        counter(
            "loraplex_arm_output_tokens",
            "Of split adapters",
            _LABELS,
            [(values, counts.output_tokens) for values, counts in rows],
        ),
        histogram(
            "loraplex_arm_time_to_first_token_seconds",
            "Of split adapters, arrival to first token",
            _LABELS,
            [(values, _seconds(arm.first_token, arm.first_token_s)) for values, arm in rows],
        ),
        histogram(
            "loraplex_arm_request_latency_seconds",
            "Of split adapters, arrival to last token, of those that ended well",
            _LABELS,
            [(values, _seconds(arm.latency, arm.latency_s)) for values, arm in rows],
        ),
        counter(
            "loraplex_canary_rollbacks",
            "Canaries rolled back by the rule",
            ("adapter",),
            [((adapter,), count) for adapter, count in num_rollbacks],
        ),
        counter(
            "loraplex_shadows_dropped",
            "Copies not made: others would wait",
            ("ingress",),
            [((ingress,), num_shadows_dropped)],
        ),
        gauge("loraplex_shadows", "Copies under way", ("ingress",), [((ingress,), num_shadows)]),
    )


def _seconds(counts: Sequence[int], total_s: float) -> Histogram:
    return Histogram(ARM_SECONDS, total_s, list(counts))
