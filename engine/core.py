"""One engine, step by step: schedule, launch, collect, commit, draw. One thread calls it.

A runner that runs ahead receives step n+1 before step n is collected: the host's work between two
steps is hidden behind the device's, and an ended sequence costs one row of one step. Rows of step
n+1 that need the newest token (a grammar, penalties) are drawn after the commit of step n, which
follows the launch. A step with drafts, which follow the newest tokens, is planned after it.

A bad request fails alone: a request is checked before it is admitted, and if the runner raises, the
requests of that batch end with an error and the engine continues. A step that runs out of memory is
repeated in parts, and only sequences that cannot fit alone end. Only a permanently lost device
(EngineDeadError) ends the engine. Free of threads, files and text.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from engine.activation import activated, by_adapter
from engine.admission import EngineLimits, check_request
from engine.config import EngineConfig
from engine.drafts import Drafter
from engine.errors import (
    AdapterInUseError,
    EngineDeadError,
    InvalidRequestError,
    UnknownAdapterError,
)
from engine.grammars import Grammars
from engine.kv_layout import num_uncommitted
from engine.kv_offload import open_tables
from engine.prefix_digests import chunk_size
from engine.scheduler import Scheduler
from engine.speculation import Speculation
from engine.step_cost import StepCost
from engine.step_parts import run_in_parts
from engine.step_times import Step, StepTimes
from engine.types import (
    NO_MEMORY,
    EngineLoad,
    Request,
    Resident,
    Runner,
    Sample,
    ScheduledBatch,
    StepOutput,
    key_digests,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

_EMPTY = ScheduledBatch(())
_WARN_EVERY_S = 10.0  # between warnings of steps without memory: these come in series


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | str = "the engine was opened without grammars",
        drafter: Drafter | None = None,
    ) -> None:
        """`grammars`: of this base, or the reason why it has none. `drafter`: of an engine that
        speculates; None: drafts come from earlier text."""
        model = runner.model_config
        if config.max_num_batched_tokens < 1 or config.max_num_seqs < 1:
            raise ValueError("max_num_batched_tokens and max_num_seqs must be 1 or more")
        layout = runner.kv_layout
        self._runs_ahead = runner.runs_ahead and config.async_scheduling is not False
        uncommitted = num_uncommitted(config.max_num_batched_tokens, runs_ahead=self._runs_ahead)
        self.limits = EngineLimits(
            runner.max_model_len,
            model.vocab_size,
            layout.num_tokens(runner.num_blocks, uncommitted, runner.max_model_len),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            chunk_size(layout.hit_size),
            runner.adapters.reserved_bytes,
            runner.adapters.page_bytes,
            layout.longest(runner.num_blocks, uncommitted, runner.max_model_len),
        )
        self._runner = runner
        self._adapters = runner.adapters
        self._cost = StepCost()
        self._blocks, tables, self._offload = open_tables(config, runner, uncommitted, self._cost)
        self._speculation = None
        if config.speculation != "off":
            self._speculation = Speculation(config, runner, self._cost, drafter)
        self._times = StepTimes(self._cost, self._speculation, runs_ahead=self._runs_ahead)
        self._grammars = None if isinstance(grammars, str) else grammars
        self.scheduler = Scheduler(
            config,
            tables,
            runner.adapters,
            model.eos_token_ids,
            runner.max_model_len,
            clock,
            self._cost,
            self._grammars,
            self._speculation,
            self._offload,
        )
        self._no_grammars = grammars if isinstance(grammars, str) else None
        self._clock = clock
        self._warned_s = -math.inf
        self._marked_s = 0.0  # when the newest step was launched or collected
        self._leaving: set[str] = set()  # adapters that take no new requests
        self._seeds = random.Random(config.seed)
        self._num_steps = 0
        self.num_missed_wakeups = 0  # counted by the loop: it slept while requests could run
        self.is_stuck = False  # all requests wait for an outside event: a step would not help
        self._in_flight = Step(_EMPTY)

    @property
    def usual_step_s(self) -> float:
        """The longest recent step like the steps in flight."""
        return self._times.usual_step_s

    @property
    def has_work(self) -> bool:
        is_computing = bool(self._in_flight.batch.sequences)
        return self.scheduler.has_work or is_computing or self._has_pending_loads

    def add_request(self, request: Request) -> None:
        check_request(request, self.limits, self._runner.model_config.eos_token_ids)
        if self.scheduler.has_request(request.request_id):
            raise InvalidRequestError(f"request id {request.request_id} is in use", "request_id")
        for digest in key_digests(request.adapter):
            self._check_known(digest)
        if request.adapter is not None and (why := self._adapters.obstacle(request.adapter)):
            raise InvalidRequestError(why, "adapters")
        if request.adapter and (invocation := self._adapters.invocation(request.adapter)):
            request = activated(request, invocation)
        if request.params.grammar is not None and self._no_grammars is not None:
            words = f"this base follows no grammars: {self._no_grammars}"
            raise InvalidRequestError(words, "grammar")
        seed = request.params.seed
        seed = self._seeds.getrandbits(64) if seed is None else seed
        self.scheduler.add(request, _as_int64(seed))

    def close(self) -> None:
        """Ends other threads and processes, once no step follows."""
        self._runner.close()
        if self._grammars is not None:
            self._grammars.close()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.scheduler.abort(request_id, choice)

    def step(self) -> StepOutput:
        """Launches a step and commits the one before it, or the same one if the runner never runs
        ahead. Once a step is launched and drawn, nothing waits for the rest, be it the outputs."""
        # Work between two steps is charged to the next step, unless the engine was idle.
        is_busy = bool(self._in_flight.batch.sequences)
        began_s = self._marked_s if is_busy else self._clock()
        if is_busy and self._drafts_next():
            self._collect_in_flight()
            began_s = self._marked_s
        batch = self.scheduler.schedule()
        if not (batch.sequences or is_busy) and (wait := self._next_wait()) is not None:
            wait()  # nothing else to do
            began_s = self._clock()
            batch = self.scheduler.schedule()
        step = self._launch(by_adapter(batch), began_s)
        step.follows_at_once = bool(self._in_flight.batch.sequences)
        if self._speculation is not None:
            self._speculation.learn()
        self._collect_in_flight()
        self._draw(step)
        if self._runs_ahead and step.launched is not None:
            self._in_flight = step
        else:
            self._collect(step)
        self._times.learn()
        outputs = self.scheduler.take_outputs()
        self.is_stuck = not (outputs or step.batch.sequences or self._next_wait())
        changes = self._blocks.take_prefix_changes()
        preempted = tuple(self.scheduler.preempted)
        self.scheduler.preempted.clear()
        return StepOutput(tuple(outputs), self.load(), *changes, preempted)

    def load(self) -> EngineLoad:
        return replace(
            self.scheduler.load(),
            num_steps=self._num_steps,
            num_missed_wakeups=self.num_missed_wakeups,
            adapters_on_device=self._adapters.on_device(),
            adapters_on_host=self._adapters.on_host(),
            adapter_device_bytes=self._adapters.device_bytes_used,
            adapter_host_bytes=self._adapters.host_bytes_used,
            num_pinned_adapters=self._adapters.num_pinned,
            num_adapter_copies=self._adapters.num_copied_to_device,
            step_fixed_s=self._cost.fixed_s,
            step_token_s=self._cost.token_s,
            step_sequence_s=self._cost.sequence_s,
            adapter_copy_s=self._adapters.copy_s,
            in_flight_s=self._in_flight.expected_s,
            num_late_compilations=self._runner.num_late_compilations,
        )

    def has_adapter(self, digest: str) -> bool:
        return digest not in self._leaving and self._adapters.has(digest)

    def prepare_for_adapter(self) -> None:
        """Protects the adapters of waiting and running requests from eviction before a new one is
        put into the store."""
        self._adapters.protect(self.scheduler.adapters_of_requests())

    def keep_adapter(self, digest: str) -> None:
        """Cancels a pending unload when a load of the same adapter arrives."""
        self._leaving.discard(digest)

    def retire_adapter(self, digest: str) -> bool:
        """Blocks new requests for the adapter. Returns False if requests still use it: call again
        after the next step."""
        self._leaving.add(digest)
        if self.scheduler.num_requests_of(digest) or not self._adapters.remove(digest):
            return False
        self._leaving.discard(digest)
        return True

    def is_retiring(self, digest: str) -> bool:
        return digest in self._leaving

    def adapters(self) -> tuple[Resident, ...]:
        """Returns all adapters in memory, least recently used first; waiting requests count as
        references, too."""
        return tuple(
            replace(
                found,
                num_references=max(
                    found.num_references, self.scheduler.num_requests_of(found.digest)
                ),
                is_leaving=found.is_leaving or found.digest in self._leaving,
            )
            for found in self._adapters.residents()
        )

    def pin_adapter(self, digest: str) -> None:
        """Protects the adapter from eviction in all tiers, and starts its copy to the device if
        there is room."""
        self._check_known(digest)
        self._adapters.pin(digest)
        if self._adapters.acquire(digest):
            self._adapters.release(digest)

    def unpin_adapter(self, digest: str) -> None:
        self._adapters.unpin(digest)

    def evict_adapter(self, digest: str) -> None:
        """Removes the adapter from memory now unless it is in use; the next load brings it back."""
        self._check_known(digest)
        if self._adapters.is_pinned(digest):
            raise AdapterInUseError(f"adapter {digest} is pinned: unpin it first")
        if count := self.scheduler.num_requests_of(digest):
            raise AdapterInUseError(f"adapter {digest} is in use by {count} requests")
        self.retire_adapter(digest)

    def _check_known(self, digest: str) -> None:
        if not self.has_adapter(digest):
            raise UnknownAdapterError(f"adapter {digest} is not loaded")

    def _next_wait(self) -> Callable[[], None] | None:
        """Returns the wait for a copy of an adapter, a load of KV or a grammar, after which more
        sequences may run; None: there is none."""
        if self._adapters.has_pending_copies():
            return self._adapters.wait_pending
        if self._offload is not None and self._offload.has_pending_loads:
            return self._offload.wait
        gate = self.scheduler.grammar_gate
        return gate.wait if gate.is_waiting else None

    @property
    def _has_pending_loads(self) -> bool:
        return self._offload is not None and self._offload.has_pending_loads

    def _launch(self, batch: ScheduledBatch, began_s: float) -> Step:
        if not batch.sequences:
            return Step(batch)
        self._num_steps += 1
        step = self._times.begin(batch, self._in_flight)
        step.loads_kv = self._offload is not None and self._offload.takes_wait()
        step.launched = self._attempt(step, lambda: self._runner.launch(batch))
        if step.lacks_memory:
            self._runner.free_cache()
        self._marked_s = self._clock()
        step.launch_s = self._marked_s - began_s
        return step

    def _draw(self, step: Step) -> None:
        """Draws the tokens that need the tokens committed just now. A draw that fails gives
        no token: a step without memory is repeated in parts, and any other error ends its
        requests."""
        if step.launched is None:
            return
        self._attempt(step, step.launched.draw)
        if step.lacks_memory:
            self._runner.free_cache()

    def _attempt(self, step: Step, part: Callable[[], T]) -> T | None:
        """Returns the result of a part of a step, or None if it fails, which the step notes. The
        caller frees the cache if memory was short: the error's traceback and `part` keep the step's
        allocations alive here."""
        try:
            return part()
        except EngineDeadError:
            raise
        except Exception as error:
            step.launched = None
            if self._runner.is_out_of_memory(error):
                step.lacks_memory = True
            else:
                step.error = error
            return None

    def _drafts_next(self) -> bool:
        """Returns True if the step in flight is to be committed first: drafts follow its tokens."""
        if self._speculation is None:
            return False
        running, num_waiting = self.scheduler.running, len(self.scheduler.waiting)
        is_needed = self._speculation.needs_newest(running, num_waiting)
        return is_needed or self._in_flight.num_drafted > 0

    def _collect_in_flight(self) -> None:
        step, self._in_flight = self._in_flight, Step(_EMPTY)
        self._collect(step)

    def _collect(self, step: Step) -> None:
        samples: tuple[Sample, ...] = ()
        try:
            if step.error is not None:
                raise step.error
            if step.lacks_memory:
                self._run_in_parts(step.batch)
                return
            if step.launched is not None:
                began_s = self._clock()
                samples = step.launched.collect()
                self._marked_s = self._clock()
                self._times.note(step, self._marked_s - began_s)
        except EngineDeadError:
            raise
        except Exception as error:
            if step.launched is None or not self._runner.is_out_of_memory(error):
                logger.exception("a step of %d sequences failed", len(step.batch.sequences))
                self.scheduler.fail(step.batch, "the engine failed in a step of this request")
                return
        else:
            self.scheduler.commit(step.batch, samples)
            return
        self._collect_again(step)

    def _collect_again(self, step: Step) -> None:
        """Collects a step once more after it ran out of memory. Its tokens are drawn and the next
        step may build on them, so running it in parts could draw others. If memory is still short,
        its requests end here and can continue on another engine."""
        self._runner.free_cache()
        assert step.launched is not None
        try:
            self.scheduler.commit(step.batch, step.launched.collect())
        except EngineDeadError:
            raise
        except Exception:
            logger.exception("a step of %d sequences failed", len(step.batch.sequences))
            self.scheduler.fail(step.batch, NO_MEMORY)

    def _run_in_parts(self, batch: ScheduledBatch) -> None:
        """Repeats the step in parts. The step before is committed: sequences that ended in it are
        left out."""
        now_s = self._clock()
        if now_s - self._warned_s > _WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning(
                "a step of %d tokens ran out of memory; repeating it in parts", batch.num_tokens
            )
        items = tuple(s.without_draft() for s in batch.sequences if s.sequence.block_table)
        samples = run_in_parts(self._runner, ScheduledBatch(items))
        self._marked_s = self._clock()
        pairs = list(zip(items, samples, strict=True))
        found = [(item, sample) for item, sample in pairs if sample is not None]
        lost = tuple(item for item, sample in pairs if sample is None)
        if lost:
            logger.error("%d sequences ended: a step of each alone runs out of memory", len(lost))
        self.scheduler.fail(ScheduledBatch(lost), NO_MEMORY)
        done = ScheduledBatch(tuple(item for item, _ in found))
        self.scheduler.commit(done, [sample for _, sample in found])


def _as_int64(seed: int) -> int:
    """Maps any integer to a 64-bit seed; seeds that differ by 2^64 are the same."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
