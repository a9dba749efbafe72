"""The counts of an ingress for each version of a split adapter.

Cumulative, by adapter, arm and version. The manager judges canaries by them; /metrics shows them,
with registered names and versions as labels only. How a request got to its arm is decided elsewhere
(`split`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from serve_app.errors import AdapterUnsupportedError, ClientGoneError, NonFiniteError, to_api_error
from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.histograms import Histogram
from serve_app.tally import ARM_SECONDS, OUTCOME_INDEX, OUTCOMES, ArmCounts, ArmKey, ArmOutcome


class ArmStats:
    """The arms of an ingress replica. All methods belong to its event loop."""

    def __init__(self) -> None:
        self._counts: dict[ArmKey, _Counts] = {}

    def begin(self, key: ArmKey) -> ArmRequest:
        """Called when a request arrives: its times count from now."""
        return ArmRequest(self._counts.setdefault(key, _Counts()))

    def counts(self) -> tuple[tuple[ArmKey, ArmCounts], ...]:
        return tuple((key, counts.frozen()) for key, counts in self._counts.items())

    def text(
        self,
        ingress: str,
        num_rollbacks: Iterable[tuple[str, int]],
        num_shadows: int,
        num_shadows_dropped: int,
    ) -> bytes:
        """`num_rollbacks`: by adapter, as the manager counts them: every ingress returns the same
        number."""
        own, labels = {"ingress": ingress}, ("adapter", "arm", "version")
        rows = {(key.adapter, key.arm, str(key.version)): one for key, one in self._counts.items()}
        ends = {
            (*arm, outcome): count
            for arm, one in rows.items()
            for outcome, count in zip(OUTCOMES, one.outcomes, strict=True)
        }
        tokens = {arm: one.output_tokens for arm, one in rows.items()}
        first = {arm: one.first_token for arm, one in rows.items()}
        latency = {arm: one.latency for arm, one in rows.items()}
        return as_text(
            counter("loraplex_arm_requests", ends, own, *labels, "outcome"),
            counter("loraplex_arm_output_tokens", tokens, own, *labels),
            histogram("loraplex_arm_time_to_first_token_seconds", first, own, *labels),
            histogram("loraplex_arm_request_latency_seconds", latency, own, *labels),
            counter("loraplex_canary_rollbacks", dict(num_rollbacks), {}, "adapter"),
            counter("loraplex_shadows_dropped", num_shadows_dropped, own),
            gauge("loraplex_shadows", num_shadows, own),
        )

    def retain(self, versions: Collection[tuple[str, str]]) -> None:
        """Drops the counts of all versions but these, given as (name, digest)."""
        for key in [key for key in self._counts if (key.adapter, key.digest) not in versions]:
            del self._counts[key]


class ArmRequest:
    """A request of an arm. Only its first end counts."""

    __slots__ = ("_counts", "_first_token_s", "_is_ended", "_is_warm", "_start_s", "_time")

    def __init__(self, counts: _Counts) -> None:
        self._counts = counts
        self._time = asyncio.get_running_loop().time
        self._start_s = self._time()
        self._first_token_s: float | None = None
        self._is_ended = False
        self._is_warm = False

    def warm(self) -> None:
        """Called when an engine that has the adapter on its device accepts the request."""
        self._is_warm = True

    def first_token(self) -> None:
        self._first_token_s = self._time() - self._start_s

    def done(self, has_text: bool, num_tokens: int) -> None:
        self._end("ok" if has_text else "empty", num_tokens)

    def failed(self, error: BaseException, num_tokens: int) -> None:
        self._end(outcome_of(error), num_tokens)

    def left(self, num_tokens: int) -> None:
        self._end("left", num_tokens)

    def _end(self, outcome: ArmOutcome, num_tokens: int) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        counts = self._counts
        counts.outcomes[OUTCOME_INDEX[outcome]] += 1
        counts.output_tokens += num_tokens
        if self._first_token_s is not None:
            counts.first_token.observe(self._first_token_s)
            if self._is_warm:
                counts.warm_first_token.observe(self._first_token_s)
        if outcome == "left" and self._is_warm:
            counts.num_warm_left += 1
        if outcome in ("ok", "empty"):
            counts.latency.observe(self._time() - self._start_s)


def outcome_of(error: BaseException) -> ArmOutcome:
    if isinstance(error, ClientGoneError | asyncio.CancelledError):
        return "left"
    if isinstance(error, NonFiniteError):
        return "non_finite"
    is_ours = isinstance(error, AdapterUnsupportedError)  # the version's fault, not the client's
    return "error" if is_ours or to_api_error(error).status >= 500 else "refused"


@dataclass(slots=True)
class _Counts:
    outcomes: list[int] = field(default_factory=lambda: [0] * len(OUTCOMES))
    output_tokens: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(ARM_SECONDS))
    latency: Histogram = field(default_factory=lambda: Histogram(ARM_SECONDS))
    warm_first_token: Histogram = field(default_factory=lambda: Histogram(ARM_SECONDS))
    num_warm_left: int = 0

    def frozen(self) -> ArmCounts:
        return ArmCounts(
            tuple(self.outcomes),
            self.output_tokens,
            tuple(self.first_token.counts),
            self.first_token.total,
            tuple(self.latency.counts),
            self.latency.total,
            tuple(self.warm_first_token.counts),
            self.num_warm_left,
        )
