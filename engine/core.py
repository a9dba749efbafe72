"""One engine, step by step: schedule, launch, collect, commit, draw. One thread calls it.

A runner that runs ahead receives step n+1 before step n is collected: the host's work between two
steps is hidden behind the device's, and an ended sequence costs one row of one step. Rows of step
n+1 that need the newest token (a grammar, penalties) are drawn after the commit of step n, which
follows the launch.

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
from dataclasses import dataclass, replace

from engine.activation import activated, by_adapter
from engine.admission import EngineLimits, check_request
from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.errors import (
    AdapterInUseError,
    EngineDeadError,
    InvalidRequestError,
    UnknownAdapterError,
)
from engine.grammars import Grammars
from engine.kv_layout import num_uncommitted
from engine.prefix_digests import chunk_size
from engine.scheduler import Scheduler
from engine.step_cost import LongestSteps, StepCost
from engine.step_parts import run_in_parts
from engine.step_shares import charge_step
from engine.types import (
    NO_MEMORY,
    EngineLoad,
    LaunchedStep,
    Request,
    Resident,
    Runner,
    Sample,
    ScheduledBatch,
    StepOutput,
    TokenOutput,
    key_digests,
)
from engine.window_tables import make_tables

logger = logging.getLogger(__name__)

_EMPTY = ScheduledBatch(())
_WARN_EVERY_S = 10.0  # between warnings of steps without memory: these come in series


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | str = "the engine was opened without grammars",
    ) -> None:
        """`grammars`: of this base, or the reason why it has none."""
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
        self._blocks = BlockPool(
            runner.num_blocks,
            config.block_size,
            config.base_digest,
            can_share=config.enable_prefix_caching,
        )
        self._cost = StepCost()
        self._grammars = None if isinstance(grammars, str) else grammars
        self.scheduler = Scheduler(
            config,
            make_tables(self._blocks, layout, uncommitted),
            runner.adapters,
            model.eos_token_ids,
            runner.max_model_len,
            clock,
            self._cost,
            self._grammars,
        )
        self._no_grammars = grammars if isinstance(grammars, str) else None
        self._clock = clock
        self._longest = LongestSteps()
        self.usual_step_s = math.inf  # longest recent step like those in flight
        self._warned_s = -math.inf
        self._marked_s = 0.0  # when the newest step was launched or collected
        self._leaving: set[str] = set()  # adapters that take no new requests
        self._seeds = random.Random(config.seed)
        self._num_steps = 0
        self.num_missed_wakeups = 0  # counted by the loop: it slept while requests could run
        self.is_stuck = False  # all requests wait for an outside event: a step would not help
        self._in_flight = _Step(_EMPTY)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight.batch.sequences)

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
        self.scheduler.add(
            request, _as_int64(self._seeds.getrandbits(64) if seed is None else seed)
        )

    def close(self) -> None:
        """Ends other threads and processes, once no step follows."""
        self._runner.close()
        if self._grammars is not None:
            self._grammars.close()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self.scheduler.abort(request_id, choice)

    def step(self) -> StepOutput:
        """Launches a step and commits the one before it, or the same one if the runner never runs
        ahead."""
        # Work between two steps is charged to the next step, unless the engine was idle.
        is_busy = bool(self._in_flight.batch.sequences)
        began_s = self._marked_s if is_busy else self._clock()
        batch = self.scheduler.schedule()
        if self._adapters.has_pending_copies() and not (batch.sequences or is_busy):
            self._adapters.wait_pending()  # nothing else to do
            began_s = self._clock()
            batch = self.scheduler.schedule()
        elif self.scheduler.grammar_gate.is_waiting and not (batch.sequences or is_busy):
            self.scheduler.grammar_gate.wait()
            began_s = self._clock()
            batch = self.scheduler.schedule()
        step = self._launch(by_adapter(batch), began_s)
        outputs = self._collect(self._in_flight)
        self._in_flight = _Step(_EMPTY)
        self._draw(step)
        if self._runs_ahead and step.launched is not None:
            self._in_flight = step
        else:
            outputs += self._collect(step)
        self.is_stuck = not (
            outputs
            or step.batch.sequences
            or self._adapters.has_pending_copies()
            or self.scheduler.grammar_gate.is_waiting
        )
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
        if self.scheduler.uses_adapter(digest) or not self._adapters.remove(digest):
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
            raise AdapterInUseError(f"adapter {digest} is pinned")
        if count := self.scheduler.num_requests_of(digest):
            raise AdapterInUseError(f"adapter {digest} is in use by {count} requests")
        self.retire_adapter(digest)

    def _check_known(self, digest: str) -> None:
        if not self.has_adapter(digest):
            raise UnknownAdapterError(f"adapter {digest} is not loaded")

    def _launch(self, batch: ScheduledBatch, began_s: float) -> _Step:
        if not batch.sequences:
            return _Step(batch)
        self._num_steps += 1
        step = _Step(batch, num_decoding=batch.num_decoding)
        step.num_prompt = batch.num_tokens - step.num_decoding
        step.usual_s = self._longest.expect(step.num_prompt)
        step.expected_s = self._cost.seconds(step.num_prompt, step.num_decoding)
        self.usual_step_s = max(step.usual_s, self._in_flight.usual_s)
        try:
            step.launched = self._runner.launch(batch)
        except EngineDeadError:
            raise
        except Exception as error:
            if not self._runner.is_out_of_memory(error):
                step.error = error
                return step
        self._marked_s = self._clock()
        step.launch_s = self._marked_s - began_s
        if step.launched is None:
            # Not in the handler: the error's traceback keeps the step's allocations alive.
            self._runner.free_cache()
            step.lacks_memory = True
        return step

    def _draw(self, step: _Step) -> None:
        """Draws the tokens that need those which were committed just now. A draw that fails gives
        no token: a step without memory is repeated in parts, and any other error ends its
        requests."""
        if step.launched is None:
            return
        try:
            step.launched.draw()
            return
        except EngineDeadError:
            raise
        except Exception as error:
            step.launched = None
            if not self._runner.is_out_of_memory(error):
                step.error = error
                return
        self._runner.free_cache()
        step.lacks_memory = True

    def _collect(self, step: _Step) -> list[TokenOutput]:
        samples: tuple[Sample, ...] = ()
        try:
            if step.error is not None:
                raise step.error
            if step.lacks_memory:
                return self._run_in_parts(step.batch)
            if step.launched is not None:
                began_s = self._clock()
                samples = step.launched.collect()
                self._marked_s = self._clock()
                self._observe_cost(step, self._marked_s - began_s)
        except EngineDeadError:
            raise
        except Exception as error:
            if step.launched is None or not self._runner.is_out_of_memory(error):
                logger.exception("a step of %d sequences failed", len(step.batch.sequences))
                return self.scheduler.fail(
                    step.batch, "the engine failed in a step of this request"
                )
        else:
            return self.scheduler.commit(step.batch, samples)
        return self._collect_again(step)

    def _collect_again(self, step: _Step) -> list[TokenOutput]:
        """Collects a step once more after it ran out of memory. Its tokens are drawn and the next
        step may build on them, so running it in parts could draw others. If memory is still short,
        its requests end here and can continue on another engine."""
        self._runner.free_cache()
        assert step.launched is not None
        try:
            return self.scheduler.commit(step.batch, step.launched.collect())
        except EngineDeadError:
            raise
        except Exception:
            logger.exception("a step of %d sequences failed", len(step.batch.sequences))
            return self.scheduler.fail(step.batch, NO_MEMORY)

    def _run_in_parts(self, batch: ScheduledBatch) -> list[TokenOutput]:
        """Repeats the step in parts. The step before is committed: sequences that ended in it are
        left out."""
        now_s = self._clock()
        if now_s - self._warned_s > _WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning(
                "a step of %d tokens ran out of memory; repeating it in parts", batch.num_tokens
            )
        items = tuple(item for item in batch.sequences if item.sequence.block_table)
        samples = run_in_parts(self._runner, ScheduledBatch(items))
        self._marked_s = self._clock()
        pairs = list(zip(items, samples, strict=True))
        found = [(item, sample) for item, sample in pairs if sample is not None]
        lost = tuple(item for item, sample in pairs if sample is None)
        if lost:
            logger.error("%d sequences ended: a step of each alone runs out of memory", len(lost))
        outputs = self.scheduler.fail(ScheduledBatch(lost), NO_MEMORY)
        done = ScheduledBatch(tuple(item for item, _ in found))
        return outputs + self.scheduler.commit(done, [sample for _, sample in found])

    def _observe_cost(self, step: _Step, waited_s: float) -> None:
        """Records and charges the step's duration: its launch, and the wait for it after the next
        step's launch. Do not time from the previous collect: it happens after this launch, which
        may keep the host busy longer than the device, so that prompts would look free."""
        seconds = step.launch_s + waited_s
        charge_step(step.batch, seconds)
        self._cost.observe(step.num_prompt, step.num_decoding, seconds)
        self._longest.observe(step.num_prompt, seconds)


@dataclass(slots=True)
class _Step:
    batch: ScheduledBatch
    launched: LaunchedStep | None = None
    error: Exception | None = None  # of its launch
    lacks_memory: bool = False  # its launch ran out of memory
    launch_s: float = 0.0  # host time of its launch
    num_prompt: int = 0  # tokens
    num_decoding: int = 0  # sequences
    usual_s: float = 0.0  # as `Engine.usual_step_s`
    expected_s: float = 0.0  # by its cost


def _as_int64(seed: int) -> int:
    """Maps any integer to a 64-bit seed; seeds that differ by 2^64 are the same."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
