"""An engine replica as numbers: `engine.scheduler`'s rules, steps that take what a `Pace` says.

A boundary is the moment between two steps. With `runs_ahead` the step that begins there was planned
at the boundary before, and the one after it is planned now, as by an engine whose device computes
while its host schedules. Decode steps in which nothing changes are one event, up to the next end;
an arrival cuts them at the boundary that it meets. `max_jump=1` takes each alone: the same times,
slowly.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from engine.admission import EngineLimits
from engine.config import EngineConfig
from engine.types import EngineLoad
from serve_app.stream.wire import Accepted, LoadSeconds, Step
from tests.benchmarks.simulator.calls import Call
from tests.benchmarks.simulator.events import Loop
from tests.benchmarks.simulator.line import Line
from tests.benchmarks.simulator.pace import Pace, steps_s, steps_until
from tests.benchmarks.simulator.prefixes import PrefixCache
from tests.benchmarks.simulator.tiers import Tiers

BLOCK_TOKENS = 16
UNBOUNDED = 1 << 40


@dataclass(frozen=True, slots=True)
class EngineArgs:
    pace: Pace
    limits: EngineLimits
    runs_ahead: bool
    load_s: tuple[float, float, float] = (0.0, 0.0, 0.0)  # as told: host, disk, registry
    max_jump: int = UNBOUNDED
    max_decode_slowdown: float = EngineConfig("", "").max_decode_slowdown


@dataclass(frozen=True, slots=True)
class Frame:
    """The content of a `Step` of the side stream, with the sets that a thousand views then share;
    each is the same object as long as nothing in it changes."""

    replica_id: str
    step: Step
    on_device: frozenset[str]
    on_host: frozenset[str]
    on_disk: frozenset[str]


@dataclass(slots=True)
class _Jump:
    """Planned decode steps of the same sequences, which a cut may still take back."""

    start_s: float = 0.0
    first_s: float = 0.0
    growth_s: float = 0.0
    num_sequences: int = 0
    size: int = 0

    def after_s(self, count: int) -> float:
        return self.start_s + steps_s(self.first_s, self.growth_s, count)


def _nobody(call: Call) -> None:
    raise AssertionError(f"call {call.index} came to an engine that is gone")


class Engine:
    """`tell`: at the end of a step, what ingresses are told. `end`: a call got its last token."""

    def __init__(
        self,
        number: int,
        replica_id: str,
        loop: Loop,
        args: EngineArgs,
        tiers: Tiers,
        tell: Callable[[Frame], None],
        end: Callable[[Call], None],
    ) -> None:
        self.number = number
        self.replica_id = replica_id
        self.num_calls = 0  # Serve's ongoing requests: on their way, loading, waiting, running
        self.num_preemptions = 0
        self.num_prompt_tokens = 0  # of requests that came, since start
        self.is_gone = False
        self.late: Callable[[Call], None] = _nobody
        self.tiers = tiers
        self._loop = loop
        self._args = args
        self._pace = args.pace
        self._max_jump = max(1, args.max_jump)
        self._lag = int(args.runs_ahead)
        self._tell = tell
        self._end = end
        self._cache = PrefixCache(args.limits.prefix_chunk)
        self._line = Line(args.limits, tiers, self._cache, args.pace, args.max_decode_slowdown)
        self._inbox: list[Call] = []
        self._drained: list[Call] = []  # since the newest frame
        self._ends: list[tuple[int, int, Call]] = []  # decoding: a heap by their last step
        self._completing: list[Call] = []  # whose prompt the newest planned step ends
        # With runs_ahead, of the step under way: prompts and calls that it ends.
        self._flight: tuple[list[Call], list[Call]] = ([], [])
        self._step = 0  # planned, since start
        self._end_s = 0.0  # of the newest planned step
        self._next_s = 0.0  # the next boundary
        self._version = 0  # of boundaries that a cut has moved, the events remain
        self._is_busy = False
        self._jump = _Jump()
        self._context = 0  # tokens that the decoding sequences attend to
        self._sequence_s = self._pace.sequence_s

    @property
    def is_idle(self) -> bool:
        return not (self._is_busy or self._inbox or self._line.num_waiting)

    @property
    def num_steps(self) -> int:
        return self._step

    @property
    def num_found_tokens(self) -> int:
        """The tokens found in the prefix cache since the start."""
        return self._line.num_found_tokens

    def submit(self, call: Call) -> None:
        """Takes a call at the replica. Its adapter is brought to the host first."""
        if self.is_gone:
            self.late(call)
            return
        if call.adapter is None:
            self._enter(call)
            return
        call.found_in = self.tiers.tier_of(call.adapter)
        self.tiers.bring(call.adapter, call.rank, lambda: self._enter(call))

    def say_hello(self) -> None:
        """The first frame, before there is any work."""
        self._send_frame()

    def warm_up(self, adapter: str, rank: int = 16) -> None:
        """A load without a request."""
        tiers = self.tiers
        if tiers.tier_of(adapter) in ("disk", "registry") and not tiers.is_loading(adapter):
            tiers.bring(adapter, rank, lambda: tiers.leave(adapter))

    def abandon(self) -> list[Call]:
        """It goes. Those that have not ended, each with the tokens that it got; `late` gets those
        that still come."""
        self._cut()
        self.is_gone = True
        self._version += 1  # no boundary means anything now
        num_ended = self._step
        if self._end_s > self._loop.now_s:
            num_ended -= 1 + self._lag
        decoding = [call for _, _, call in self._ends] + self._flight[1]
        for call in decoding:
            call.num_done += max(0, num_ended - call.first_step + 1)
            call.num_preemptions += 1
            if call.first_s > self._loop.now_s:
                call.first_s = 0.0
        return [*self._inbox, *self._line.calls(), *decoding]

    def wake(self, _: object = None) -> None:
        """Something from outside came: the next boundary has to look at it."""
        if self.is_gone:
            return
        if self._is_busy:
            self._cut()
        elif self._inbox or self._line.num_waiting:
            self._is_busy = True
            self._boundary_at(self._loop.now_s)

    def _cut(self) -> None:
        """Takes planned steps back, up to the boundary that comes next."""
        now_s, jump = self._loop.now_s, self._jump
        if self._next_s <= now_s or jump.size <= 1:
            return
        passed = steps_until(jump.first_s, jump.growth_s, now_s - jump.start_s)
        size = max(1, passed + self._lag)
        if size < jump.size:
            over = jump.size - size
            self._step -= over
            self._grow(-over * jump.num_sequences)
            jump.size = size
            self._end_s = jump.after_s(size)
            self._boundary_at(jump.after_s(size - self._lag))

    def load(self) -> EngineLoad:
        line, limits, pace = self._line, self._args.limits, self._pace
        num_decoding = len(self._ends)
        if num_decoding:  # a fit over steps sees the context as a part of each sequence
            self._sequence_s = pace.sequence_s + pace.kv_token_s * self._context / num_decoding
        return EngineLoad(
            num_running=line.num_running,
            num_waiting=line.num_waiting,
            num_waiting_for_adapter=line.num_passed_over,
            queued_tokens=line.queued_tokens,
            num_blocks=limits.max_kv_tokens // BLOCK_TOKENS,
            num_free_blocks=max(0, limits.max_kv_tokens - line.held_tokens) // BLOCK_TOKENS,
            num_preemptions=self.num_preemptions,
            prefix_queries=self.num_prompt_tokens,
            prefix_hits=line.num_found_tokens,
            num_steps=self._step,
            adapters_on_device=self.tiers.on_device,
            adapters_on_host=self.tiers.on_host,
            num_adapter_copies=self.tiers.num_copies,
            step_fixed_s=pace.fixed_s,
            step_token_s=pace.token_s,
            step_sequence_s=self._sequence_s,
            queued_tokens_for_adapter=line.passed_over_tokens,
            step_prompt_tokens=line.prompt_budget(num_decoding),
            in_flight_s=max(0.0, min(self._end_s - self._loop.now_s, self._jump.first_s))
            if self._lag
            else 0.0,
        )

    def _enter(self, call: Call) -> None:
        if self.is_gone:
            self.late(call)
            return
        call.entered_s = self._loop.now_s
        self.num_prompt_tokens += call.num_prompt + call.num_done
        self._inbox.append(call)
        if call.adapter is not None:
            self.tiers.prefetch(call.adapter)
        self.wake()

    def _boundary_at(self, time_s: float) -> None:
        self._version += 1
        self._next_s = time_s
        self._loop.at(time_s, self._boundary, self._version)

    def _boundary(self, version: int) -> None:
        if version != self._version:
            return
        effects = self._completing, self._pop_ended()  # of the newest planned step
        self._completing = []
        if self._lag:  # it begins now; the one before it has ended
            effects, self._flight = self._flight, effects
        published, ended = effects
        for call in published:
            self._line.publish(call)
        for call in ended:
            self._line.leave(call)
            call.ended_s = self._loop.now_s
            self.num_calls -= 1
            self._end(call)
        self._line.settle()
        if published or ended or self._drained or self._line.prefilling:
            self._send_frame()
        for call in self._inbox:
            self._line.add(call)
        self._drained += self._inbox
        self._inbox.clear()
        self._plan()

    def _pop_ended(self) -> list[Call]:
        ends, leaving = self._ends, []
        while ends and ends[0][0] <= self._step:
            call = heapq.heappop(ends)[2]
            self._context -= call.num_prompt + call.num_output
            leaving.append(call)
        return leaving

    def _plan(self) -> None:
        start_s = max(self._loop.now_s, self._end_s)
        self._make_room()
        num_decoding = len(self._ends)
        num_tokens, whole = self._line.schedule(num_decoding)
        step_s = self._pace.step_s(num_tokens, num_decoding, self._context)
        size = 1
        if num_tokens == 0:
            if num_decoding == 0:
                self._rest()
                return
            size = self._jump_size(num_decoding)
        growth_s = self._pace.kv_token_s * num_decoding
        self._jump = _Jump(start_s, step_s, growth_s, num_decoding, size)
        self._step += size
        self._grow(size * num_decoding)
        self._end_s = self._jump.after_s(size)
        for call in whole:
            self._begin_decoding(call)
        self._boundary_at(self._jump.after_s(size - self._lag))

    def _jump_size(self, num_decoding: int) -> int:
        """Up to the next end. One, if the step under way changes something at its own end."""
        if self._flight[0] or self._flight[1]:
            return 1
        room = max(1, self._line.free_tokens // num_decoding)
        return max(1, min(self._ends[0][0] - self._step, room, self._max_jump))

    def _begin_decoding(self, call: Call) -> None:
        call.first_step = self._step
        call.last_step = self._step + call.num_output - call.num_done - 1
        if not call.first_s:
            call.first_s = self._end_s
        heapq.heappush(self._ends, (call.last_step, call.ordinal, call))
        self._context += call.num_prompt + call.num_done + 1
        self._completing.append(call)

    def _rest(self) -> None:
        """Nothing to compute. What the step under way ends is still to be told."""
        self._jump = _Jump()
        if self._flight[0] or self._flight[1]:
            self._boundary_at(self._end_s)
            return
        self._is_busy = False
        if self._drained:  # they wait for their adapters
            self._send_frame()

    def _grow(self, num_tokens: int) -> None:
        self._context += num_tokens
        self._line.grow(num_tokens)

    def _make_room(self) -> None:
        """For one token of each decoding sequence, at the expense of the youngest."""
        while self._ends and self._line.free_tokens < len(self._ends):
            entry = max(self._ends, key=lambda item: item[1])
            call = entry[2]
            youngest = self._line.prefilling[-1] if self._line.prefilling else None
            if youngest is not None and youngest.ordinal > call.ordinal:
                self._line.preempt(youngest, 0)
            else:
                self._ends.remove(entry)
                heapq.heapify(self._ends)
                num_drawn = self._step - call.first_step + 1
                self._context -= call.num_prompt + call.num_done + num_drawn
                for waiting in (self._completing, self._flight[0]):
                    if call in waiting:
                        waiting.remove(call)
                self._line.preempt(call, num_drawn)
            self.num_preemptions += 1

    def _send_frame(self) -> None:
        cached, evicted = self._cache.changes()
        tiers = self.tiers
        accepted = tuple(
            Accepted(call.call_id, call.entered_s - call.placed_s, call.found_in)
            for call in self._drained
        )
        self._drained.clear()
        step = Step(
            (),
            self.load(),
            False,
            accepted,
            cached,
            evicted,
            load_s=LoadSeconds(*self._args.load_s),
        )
        names = tiers.names_on_device, tiers.names_on_host, tiers.disk.names
        self._tell(Frame(self.replica_id, step, *names))
