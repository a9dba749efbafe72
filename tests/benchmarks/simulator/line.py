"""The waiting calls, the prompts under way and the KV tokens of each: the scheduler's rules.

Running calls come first, the oldest first; then waiting calls in the order of arrival, without
those whose adapter is not on the device, with a bound on overtaking. Prompts go in chunks within a
budget of tokens; a request is admitted when all of its tokens find room. Counts tokens, not
blocks. Ignorant of time.
"""

from __future__ import annotations

from bisect import insort

from engine.admission import EngineLimits
from engine.config import EngineConfig
from engine.prompt_budget import prompt_budget
from engine.step_cost import StepCost
from tests.benchmarks.simulator.calls import Call
from tests.benchmarks.simulator.pace import Pace
from tests.benchmarks.simulator.prefixes import PrefixCache
from tests.benchmarks.simulator.tiers import Tiers

MAX_OVERTAKES = 256  # EngineConfig.max_adapter_overtakes


def _age(call: Call) -> int:
    return call.ordinal


class Line:
    def __init__(
        self,
        limits: EngineLimits,
        tiers: Tiers,
        cache: PrefixCache,
        pace: Pace,
        max_decode_slowdown: float,
    ) -> None:
        # Then every running sequence takes part in every step.
        assert limits.max_num_batched_tokens >= limits.max_num_seqs
        self._limits = limits
        self._config = EngineConfig(
            "",
            "",
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_decode_slowdown=max_decode_slowdown,
        )
        self._cost = measured_cost(pace, limits)
        self._tiers = tiers
        self._cache = cache
        self._waiting: list[Call] = []  # oldest first
        self.prefilling: list[Call] = []  # oldest first
        self.num_running = 0
        self.num_passed_over = 0
        self.passed_over_tokens = 0
        self.num_found_tokens = 0  # in the cache, since start
        self.held_tokens = 0  # of running sequences, but for what they found in the cache
        self._private = 0  # of these, not in the cache
        self._waiting_tokens = 0
        self._num_added = 0
        self._num_with_adapter = 0  # running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """The count of the scheduler: the tokens of the planned step are queued no more."""
        return self._waiting_tokens + sum(call.remaining for call in self.prefilling)

    @property
    def free_tokens(self) -> int:
        return self._limits.max_kv_tokens - self.held_tokens

    def add(self, call: Call) -> None:
        call.ordinal = self._num_added
        self._num_added += 1
        self._waiting.append(call)
        self._waiting_tokens += call.num_prompt + call.num_done

    def calls(self) -> list[Call]:
        """The calls that do not decode yet."""
        return self._waiting + self.prefilling

    def schedule(self, num_decoding: int) -> tuple[int, list[Call]]:
        """(prompt tokens of the next step, calls whose prompt it completes)."""
        budget = prompts = self._limits.max_num_batched_tokens - num_decoding
        if num_decoding and (self.prefilling or self._waiting):
            prompts = self.prompt_budget(num_decoding)
        whole: list[Call] = []
        total = 0
        num_younger = len(self.prefilling)
        for call in self.prefilling:
            num_younger -= 1
            count = min(call.remaining, max(1, budget - num_younger), prompts - total)
            if not count:
                break  # older prompts have all of them
            budget -= count
            total += count
            self._take(call, count)
            if not call.remaining:
                whole.append(call)
        budget = min(budget, prompts - total)
        if whole:
            self.prefilling = [call for call in self.prefilling if call.remaining]
        if self._waiting:
            total += self._admit(budget, whole)
        return total, whole

    def prompt_budget(self, num_decoding: int) -> int:
        """The prompt tokens of a step beside so many decoding sequences."""
        num_sequences = self.num_running + len(self._waiting)
        return prompt_budget(
            self._config, self._cost, num_decoding, num_sequences, self.queued_tokens
        )

    def grow(self, num_tokens: int) -> None:
        self.held_tokens += num_tokens
        self._private += num_tokens

    def publish(self, call: Call) -> None:
        """Its whole prompt is computed: others can find it."""
        chunk = self._limits.prefix_chunk
        self._cache.publish(call.prefixes)
        self._private -= (len(call.prefixes) - call.num_hits // chunk) * chunk
        call.is_published = True

    def leave(self, call: Call) -> None:
        self._free(call, call.num_prompt + call.num_output - 1)
        self._cache.publish(call.prefixes_after)
        if call.adapter is not None:
            self._tiers.leave(call.adapter)

    def preempt(self, call: Call, num_drawn: int) -> None:
        """`num_drawn`: tokens since its admission, but for the one whose KV is not computed."""
        if num_drawn:
            num_tokens = call.num_prompt + call.num_done + num_drawn - 1
        else:
            num_tokens = call.num_prompt + call.num_done - call.remaining
            self.prefilling.remove(call)
        self._free(call, num_tokens)
        call.num_done += num_drawn
        call.num_preemptions += 1
        insort(self._waiting, call, key=_age)
        self._waiting_tokens += call.num_prompt + call.num_done

    def settle(self) -> None:
        """Lets running calls displace prefixes that are only remembered."""
        room = self._limits.max_kv_tokens - self._private
        if self._cache.num_tokens > room:
            self._cache.shrink(room)

    def _admit(self, budget: int, whole: list[Call]) -> int:
        total = 0
        passed: list[Call] = []
        refused: set[str] = set()
        is_barrier_up = False
        for call in tuple(self._waiting):
            if self.num_running >= self._limits.max_num_seqs or budget <= 0:
                break
            if call.adapter is not None:
                if call.adapter not in refused and is_barrier_up and self._num_with_adapter:
                    continue
                if call.adapter in refused or not self._tiers.acquire(call.adapter):
                    refused.add(call.adapter)
                    passed.append(call)
                    is_barrier_up |= call.num_overtaken >= MAX_OVERTAKES
                    continue
            count = self._place(call, budget)
            if not count:  # younger ones, however small, wait behind it
                if call.adapter is not None:
                    self._tiers.release(call.adapter)
                break
            budget -= count
            total += count
            if call.remaining:
                insort(self.prefilling, call, key=_age)
            else:
                whole.append(call)
            if call.adapter is not None:
                self._num_with_adapter += 1
                call.num_overtaken = 0
                for older in passed:
                    older.num_overtaken += 1
                    is_barrier_up |= older.num_overtaken >= MAX_OVERTAKES
        self.num_passed_over = len(passed)
        self.passed_over_tokens = sum(call.num_prompt + call.num_done for call in passed)
        return total

    def _place(self, call: Call, budget: int) -> int:
        """Tokens of its first chunk; 0: no room for all of it."""
        num_tokens = call.num_prompt + call.num_done
        if num_tokens > self.free_tokens and self.num_running:
            return 0
        found = self._cache.find(call.prefixes, num_tokens)
        if not call.num_preemptions:
            call.num_cached = found
        call.num_hits = found
        self.num_found_tokens += found
        call.remaining = num_tokens - found
        call.is_published = False
        call.is_running = True
        self._waiting.remove(call)
        self._waiting_tokens -= num_tokens
        self.num_running += 1
        count = min(call.remaining, budget)
        self._take(call, count)
        return count

    def _take(self, call: Call, count: int) -> None:
        call.remaining -= count
        self.grow(count)

    def _free(self, call: Call, num_tokens: int) -> None:
        self.num_running -= 1
        call.is_running = False
        self.held_tokens -= num_tokens - call.num_hits
        self._private -= num_tokens - call.num_hits
        if call.is_published:  # the cache has it since
            chunk = self._limits.prefix_chunk
            self._private += (len(call.prefixes) - call.num_hits // chunk) * chunk
        if call.adapter is not None:
            self._num_with_adapter -= 1
            self._tiers.release(call.adapter)


def measured_cost(pace: Pace, limits: EngineLimits) -> StepCost:
    """Returns the cost that an engine of this pace has measured after some time, without the
    context."""
    cost = StepCost()
    for i in range(64):
        num_decoding = max(1, limits.max_num_seqs * (i // 4 % 8 + 1) // 8)
        num_prompt = (0, limits.max_num_batched_tokens // 8, 0, limits.max_num_batched_tokens)[
            i % 4
        ]
        cost.observe(num_prompt, num_decoding, pace.step_s(num_prompt, num_decoding, 0))
    return cost
