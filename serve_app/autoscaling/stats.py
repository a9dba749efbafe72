"""The report of an engine replica to the autoscaling policy: its own state, and the backlog of its
base in the ingresses. Ignorant of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import exp

from engine.admission import EngineLimits
from engine.types import EngineLoad, Request
from serve_app.autoscaling.policy import ReplicaSample, to_stats
from serve_app.messages import Backlog

_MEAN_S = 5.0  # time constant of the mean of arriving tokens
_BACKLOG_MAX_AGE_S = 5.0  # an older backlog is of a manager that is gone


class ScalingStats:
    def __init__(self, limits: EngineLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._num_arrived = 0  # prompt tokens since the start
        self._num_new = 0  # of these at `_at_s`, tokens that the prefix cache does not have
        self._at_s = clock()
        self._tokens_per_s = 0.0
        self._backlog, self._backlog_s = Backlog(), 0.0

    def arrived(self, requests: Sequence[Request]) -> None:
        self._num_arrived += sum(request.num_tokens for request in requests)

    def set_backlog(self, backlog: Backlog) -> None:
        """Sets the base's backlog, the sum over all ingresses."""
        self._backlog, self._backlog_s = backlog, self._clock()

    def sample(self, load: EngineLoad) -> dict[str, float]:
        now_s = self._clock()
        self._update_arrivals(load, now_s)
        is_fresh = now_s - self._backlog_s <= _BACKLOG_MAX_AGE_S
        backlog = self._backlog if is_fresh else Backlog()
        return to_stats(
            ReplicaSample(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                queued_tokens=load.queued_tokens,
                arriving_tokens_per_s=self._tokens_per_s,
                kv_usage=load.kv_usage,
                step_fixed_s=load.step_fixed_s,
                step_token_s=load.step_token_s,
                step_sequence_s=load.step_sequence_s,
                max_num_seqs=self._limits.max_num_seqs,
                max_num_batched_tokens=self._limits.max_num_batched_tokens,
                max_kv_tokens=self._limits.max_kv_tokens,
                backlog_requests=backlog.num_requests,
                backlog_tokens=backlog.num_tokens,
                sent_per_s=backlog.sent_per_s,
                refused_per_s=backlog.refused_per_s,
            )
        )

    def _update_arrivals(self, load: EngineLoad, now_s: float) -> None:
        # Prefix hits are known only when requests run; until then arrivals exceed new tokens.
        num_new = max(self._num_new, self._num_arrived - load.prefix_hits)
        passed_s = now_s - self._at_s
        if passed_s <= 0:
            return
        rate = (num_new - self._num_new) / passed_s
        self._tokens_per_s += (rate - self._tokens_per_s) * (1 - exp(-passed_s / _MEAN_S))
        self._num_new, self._at_s = num_new, now_s
