"""Chooses which tokens of which sequences the next step computes, and applies its samples.

Continuous batching without phases: a sequence has tokens left to compute, and a step computes some
of them. Running sequences come first, oldest first, then waiting sequences in order of arrival.
Preemption is youngest first, by recompute, or by swap where KV has a host tier; the oldest running
sequence is never preempted and every admitted request fits into all KV blocks alone, so at least
one always finishes. Free of tensors, threads and text.

    waiting --admit: adapter, prefix blocks--> running --ending, abort, failure--> gone
       ^                                          |
       +--------------- preempt ------------------+

Step n+1 may be scheduled before step n is committed: `schedule` counts from the end of the range in
flight. Computed and drawn tokens are recorded in `commit` only, from the batch's own ranges, and
sequences that left meanwhile are skipped. Blocks and adapters of such a sequence are released while
the device may still use them; the runner keeps the order of steps, so they are read before that.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from operator import attrgetter

from engine.activation import StepParts
from engine.adapter_gate import AdapterGate
from engine.block_tables import BlockTables, needs_prompt_logprobs
from engine.config import EngineConfig
from engine.grammar_gate import GrammarGate
from engine.grammars import Grammars
from engine.kv_offload import KVOffload
from engine.outputs import Left, NewTokens, add_tokens, kept_draws
from engine.prompt_budget import prompt_budget, queued_tokens
from engine.speculation import Speculation
from engine.step_cost import StepCost
from engine.stopping import Ending, awaits_last
from engine.types import (
    NOT_FINITE,
    AdapterStore,
    EngineLoad,
    Request,
    Sample,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    TokenOutput,
    key_digests,
)

_age = attrgetter("ordinal")


@dataclass(slots=True, eq=False)
class _Group:
    """The unfinished choices of one request."""

    request: Request
    alive: dict[int, Sequence]  # in order
    is_prompt_computed: bool = False  # by one choice: the others can find its blocks


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        tables: BlockTables,
        adapters: AdapterStore,
        eos_token_ids: Collection[int],
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
        cost: StepCost | None = None,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
        offload: KVOffload | None = None,
    ) -> None:
        """`cost`: the measured cost of steps; None: not measured. `grammars`: None: no request has
        a grammar. `speculation`: None: steps have no drafts. `offload`: None: no host tier."""
        self._config = config
        self._clock = clock
        self._cost = cost or StepCost()
        self._tables = tables
        self._gate = AdapterGate(adapters, config.max_adapter_overtakes)
        self.grammar_gate = GrammarGate(grammars)
        self._speculation = speculation
        self._offload = offload
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_model_len = max_model_len
        self._waiting: list[Sequence] = []  # oldest first
        self._running: list[Sequence] = []  # oldest first
        self._groups: dict[str, _Group] = {}
        self._changes: list[NewTokens | Left] = []  # since `take_outputs`, in order
        self._num_sequences = 0
        self._num_preemptions = 0
        self.preempted: list[str] = []  # request ids; the engine takes them after each step

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._changes)

    def has_request(self, request_id: str) -> bool:
        return request_id in self._groups

    def adapters_of_requests(self) -> set[str]:
        """Returns the digests of the adapters of waiting and running requests."""
        groups = self._groups.values()
        return {digest for group in groups for digest in key_digests(group.request.adapter)}

    def num_requests_of(self, digest: str) -> int:
        """Returns the number of requests, waiting or running, with this adapter."""
        groups = self._groups.values()
        return sum(digest in key_digests(group.request.adapter) for group in groups)

    def add(self, request: Request, seed: int) -> None:
        assert request.request_id not in self._groups
        group = _Group(request, {})
        outputs = {choice.choice: choice.token_ids for choice in request.resumed}
        for choice in request.choices:
            token_ids = [*request.prompt_token_ids, *outputs.get(choice, ())]
            sequence = Sequence(request, choice, seed, token_ids, added_s=self._clock())
            sequence.ordinal = self._num_sequences
            self._num_sequences += 1
            self.grammar_gate.add(sequence)
            group.alive[choice] = sequence
            self._waiting.append(sequence)
        self._groups[request.request_id] = group

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Frees everything at once. Ignores unknown and ended requests: aborts arrive late."""
        group = self._groups.get(request_id)
        if group is None:
            return
        for sequence in [s for c, s in group.alive.items() if choice in (None, c)]:
            self._leave(sequence, Ending("abort"))

    def schedule(self) -> ScheduledBatch:
        """Returns the next batch. It can be empty while sequences wait for an adapter that no
        running sequence blocks."""
        num_preemptions = self._num_preemptions
        parts = StepParts()
        if self._offload is not None:
            self._offload.begin_step()
        scheduled = self._schedule_running(parts)
        # A sequence that was just preempted must not return at once, nor others take its blocks.
        if num_preemptions == self._num_preemptions:
            scheduled += self._admit_waiting(self._rest_of_budget(scheduled), parts)
        if self._speculation is not None:
            self._speculation.extend(scheduled, self._tables, len(self._running))
        return ScheduledBatch(tuple(scheduled))

    def commit(self, batch: ScheduledBatch, samples: ListLike[Sample]) -> None:
        """Records the tokens of a step. The device may wait for it: outputs are made later."""
        for item, sample in zip(batch.sequences, samples, strict=True):
            if _is_running(item.sequence):
                self._commit_one(item, sample)

    def fail(self, batch: ScheduledBatch, error: str) -> None:
        """Ends every request with a sequence in the lost step, with all its choices."""
        for request_id in dict.fromkeys(s.sequence.request.request_id for s in batch.sequences):
            group = self._groups.get(request_id)
            for sequence in tuple(group.alive.values()) if group else ():
                self._leave(sequence, Ending("error"), error)

    def take_outputs(self) -> list[TokenOutput]:
        """Returns the outputs since the last call. Called after each step, once the next one is
        launched."""
        changes, self._changes = self._changes, []
        return [change.output() for change in changes]

    def load(self) -> EngineLoad:
        queued = self._queued_tokens()
        load = EngineLoad(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_for_adapter=self._gate.num_passed_over,
            queued_tokens=queued,
            queued_tokens_for_adapter=self._gate.passed_over_tokens,
            adapter_room_s=self._gate.room_s,
            step_prompt_tokens=self._prompt_budget(len(self._running), queued),
            num_blocks=self._tables.pool.num_blocks,
            num_free_blocks=self._tables.pool.num_free,
            num_preemptions=self._num_preemptions,
            prefix_queries=self._tables.prefix_queries,
            prefix_hits=self._tables.prefix_hits,
        )
        for counted in (self._speculation, self._offload):
            load = load if counted is None else counted.with_counts(load)
        return load

    def _schedule_running(self, parts: StepParts) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        budget = self._config.max_num_batched_tokens
        prompts: int | None = None  # tokens left for prompts; counted at the first of them
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            index += 1
            if awaits_last(sequence, self._max_model_len):
                continue
            start = sequence.num_scheduled_tokens
            num_left = count = sequence.num_tokens - start
            assert count > 0
            if num_left > 1:
                # One token is left for each younger sequence: an old prompt that was admitted late,
                # for lack of room for its adapter, must not stall decoding sequences.
                num_younger = len(self._running) - index
                if prompts is None:
                    prompts = self._prompt_budget(self._num_decoding(), self._queued_tokens())
                count = min(num_left, max(1, budget - num_younger), prompts)
                prompts -= count
                if not count:
                    continue  # older prompts have all of them
            if not self._make_room(sequence, start + count):
                break  # it was the youngest and is preempted itself
            scheduled.append(parts.take(sequence, start, start + count))
            budget -= count
        return scheduled

    def _num_decoding(self) -> int:
        return sum(s.num_tokens - s.num_scheduled_tokens == 1 for s in self._running)

    def _prompt_budget(self, num_decoding: int, queued: int) -> int:
        """Returns the prompt tokens of this step; called only if there are prompts."""
        num_sequences = len(self._running) + len(self._waiting)
        return prompt_budget(self._config, self._cost, num_decoding, num_sequences, queued)

    def _rest_of_budget(self, scheduled: ListLike[ScheduledSequence]) -> int:
        """Returns the tokens that a step with these sequences has left for admitted ones."""
        if not self._waiting:
            return 0
        counts = [item.end - item.start for item in scheduled]
        num_tokens, num_decoding = sum(counts), counts.count(1)
        budget = self._prompt_budget(num_decoding, self._queued_tokens())
        prompts = max(0, budget - num_tokens + num_decoding)
        return min(self._config.max_num_batched_tokens - num_tokens, prompts)

    def _queued_tokens(self) -> int:
        return queued_tokens(self._waiting, self._running)

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates blocks, preempting younger sequences if needed. They come later in the walk, so
        none is in the batch yet. Returns False if the sequence, as the youngest, was preempted."""
        while not self._tables.grow(sequence, num_tokens):
            if self._offload is not None and self._offload.drain():
                continue  # blocks that loads held are free now
            victim = self._running[-1]
            assert victim is not self._running[0], "an admitted sequence fits into all blocks"
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        if self._offload is not None:
            self._offload.swap_out(sequence)
        self._stop_running(sequence)
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0
        sequence.num_tokens_in_flight = 0
        sequence.num_preemptions += 1
        if not sequence.num_output_tokens:
            sequence.prompt_logprobs.clear()
        self._num_preemptions += 1
        self.preempted.append(sequence.request.request_id)
        insort(self._waiting, sequence, key=_age)

    def _admit_waiting(self, budget: int, parts: StepParts) -> list[ScheduledSequence]:
        admitted: list[ScheduledSequence] = []
        self._gate.begin_walk()
        for sequence in tuple(self._waiting):
            if len(self._running) >= self._config.max_num_seqs or budget == 0:
                break
            if error := self._gate.error(sequence) or self.grammar_gate.error(sequence):
                self._leave(sequence, Ending("error"), error)
                continue
            if (
                not self.grammar_gate.is_open(sequence)
                or self._waits_for_prompt(sequence)
                or not self._gate.acquire(sequence)
            ):
                continue
            wait = "none"
            if self._offload is not None:
                wait = self._offload.wait_for(sequence, is_alone=len(self._groups) == 1)
            if wait == "loading":
                self._gate.release(sequence)
                continue
            count = 0 if wait == "full" else self._tables.place(sequence, budget)
            if count == 0:  # no blocks: younger sequences, however small, wait behind it
                self._gate.release(sequence)
                break
            budget -= count
            if sequence.num_preemptions == 0:
                sequence.queued_s = self._clock() - sequence.added_s
            self._gate.note_admitted(sequence)
            self._waiting.remove(sequence)
            insort(self._running, sequence, key=_age)
            start = sequence.num_computed_tokens
            admitted.append(parts.take(sequence, start, start + count))
        self._gate.prefetch(self._waiting)
        return admitted

    def _waits_for_prompt(self, sequence: Sequence) -> bool:
        """Returns True while the first choice computes the prompt whose blocks the others share.
        Choices that cannot share do not wait."""
        group = self._groups[sequence.request.request_id]
        is_first = sequence.choice == next(iter(group.alive))
        return not (is_first or group.is_prompt_computed) and self._tables.can_share(sequence)

    def _commit_one(self, item: ScheduledSequence, sample: Sample) -> None:
        sequence, start, end, samples, draft = item
        if not sample.is_finite:
            if self._speculation is None or not self._speculation.withdraw(item):
                self._leave(sequence, Ending("error"), NOT_FINITE)
            return
        if draft:  # its blocks are committed with the tokens that are kept
            end -= len(draft)
        else:
            self._tables.commit(sequence, start, end)
        sequence.num_computed_tokens = end
        if end >= sequence.num_prompt_tokens:
            self._groups[sequence.request.request_id].is_prompt_computed = True
        if needs_prompt_logprobs(sequence):
            if start == 0:
                sequence.prompt_logprobs.append(None)
            sequence.prompt_logprobs += sample.prompt_logprobs
        # Otherwise the grammar forced the token while this step was in flight: its draw is void.
        if samples and end == len(sequence.token_ids):
            sequence.num_tokens_in_flight -= 1
            if sample.kept:
                self._commit_draws(item, sample.kept, ())
            elif sample.token_id is not None:
                draws = kept_draws(item, sample) if draft else (sample,)
                drawn = [draw.token_id for draw in draws if draw.token_id is not None]
                self._commit_draws(item, drawn, draws)

    def _commit_draws(
        self, item: ScheduledSequence, drawn: ListLike[int], draws: ListLike[Sample]
    ) -> None:
        sequence = item.sequence
        offset = len(sequence.token_ids) - sequence.num_prompt_tokens
        can_force, eos_token_ids = self._config.force_grammar_tokens, self._eos_token_ids
        end = add_tokens(sequence, drawn, eos_token_ids, self._max_model_len, can_force=can_force)
        if isinstance(end, str):
            self._leave(sequence, Ending("error"), end)
            return
        stop = len(sequence.token_ids) - sequence.num_prompt_tokens
        if stop > offset + 1:
            sequence.num_tokens_in_flight = 0
        if self._speculation is not None:
            self._speculation.observe_draws(item, drawn)
        if item.draft:
            self._commit_draft(item, len(drawn) - 1)
        if end is not None:
            self._forget(sequence)
        self._changes.append(NewTokens(sequence, offset, stop, draws, end))

    def _commit_draft(self, item: ScheduledSequence, num_kept: int) -> None:
        """Records the tokens of a draft that were drawn. The slots of the others are written
        again, and so is that of the newest token if its grammar refused the draw after it."""
        sequence = item.sequence
        end = min(item.known_end + num_kept, len(sequence.token_ids) - 1)
        self._tables.commit(sequence, item.start, end)
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = end

    def _leave(self, sequence: Sequence, end: Ending, error: str | None = None) -> None:
        """Ends a sequence without a token; its final output comes with the next step."""
        self._forget(sequence)
        self._changes.append(Left(sequence, end, error))

    def _forget(self, sequence: Sequence) -> None:
        if _is_running(sequence):
            self._stop_running(sequence)
        else:
            self._waiting.remove(sequence)
            self.grammar_gate.forget(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        request_id = sequence.request.request_id
        del self._groups[request_id].alive[sequence.choice]
        if not self._groups[request_id].alive:
            del self._groups[request_id]

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._tables.release(sequence)
        self._gate.release(sequence)


def _is_running(sequence: Sequence) -> bool:
    return bool(sequence.block_table)
