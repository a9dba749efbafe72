"""Speculation: adds drafts to the parts of a step, and learns from the draws.

The scheduler calls it after all other parts of a step are chosen: drafts take the rest of its
tokens and blocks, and never a block that a running sequence may need next. Free of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.draft_gate import Acceptances, DraftGate, OwnAcceptance
from engine.drafts import Draft, Drafter
from engine.step_cost import StepCost
from engine.suffix_drafter import SuffixDrafter
from engine.types import EngineLoad, Runner, ScheduledSequence, SpeculationMode
from engine.types import Sequence as Choice

# Steps that run ahead while the gate is closed, for one that does not, which shows the host's work:
# some 2 ms of 64 sequences on an H200, 2 % of 16 steps. At each try in vain twice as many, up to 8
# times.
_TRIED_EVERY = 16
_MOST_DOUBLINGS = 3
# Steps with drafts, for one that has none whatever matches, and a second one that runs ahead: they
# measure the cost of steps, without which one request that always drafts would leave requests of
# `auto` and the prompts without measure. Fewer than the steps after which the gate requests them.
_PLAIN_EVERY = 96


@dataclass(slots=True)
class _Guessed:
    """A running sequence that speculates, and its newest draft, verified or not."""

    acceptance: OwnAcceptance
    is_gated: bool  # its mode is "auto"
    most: int  # tokens that it may have before the last one of all, which needs no draft
    is_free: bool  # no grammar and no stop token refuses a token of a draft
    draft: Draft | None = None


class Speculation:
    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        cost: StepCost,
        drafter: Drafter | None,
    ) -> None:
        """`drafter`: None: drafts come from earlier text."""
        self._drafter = drafter or SuffixDrafter(config.suffix_cache_bytes)
        self._mode: SpeculationMode = config.speculation
        self._cost = cost
        self._most = config.num_speculative_tokens
        # Tokens of drafts whose mode is "auto": twice as many as the gate let pass of the longest
        # in the newest step, and one more. Those that it stops cost time while the device waits.
        self._gated_most = self._most
        self._max_draws = runner.max_draws
        self._max_num_seqs = config.max_num_seqs
        self._max_step_tokens = config.max_num_batched_tokens
        self._eos_token_ids = frozenset(runner.model_config.eos_token_ids)
        self._max_model_len = runner.max_model_len
        self._gate = DraftGate(runner.graph_sizes)
        self._acceptances = Acceptances()
        self._running: dict[Choice, _Guessed] = {}
        self._to_learn: list[tuple[OwnAcceptance, Draft, Sequence[int]]] = []
        self._is_measuring = False  # the newest step has no drafts although there were some
        self._num_plans = 0
        # Tries since the gate let a draft through, by sequences in powers of two; 0: it is open. A
        # size that was not tried begins with the result of the newest try.
        self._num_in_vain: dict[int, int] = {}
        self._newest_in_vain = 1
        self._num_waiting = 0  # requests, as of the newest plan
        self._had_prompts = False  # the newest step
        self._num_in_row = [0, 0]  # steps with drafts, of decodes alone and with prompts
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_kept = [0] * (1 + self._most)  # parts, by the tokens of drafts that were drawn

    def needs_newest(self, running: Sequence[Choice], num_waiting: int) -> bool:
        """Returns True if the next step should have drafts, so that the step in flight has to be
        committed first. Called once for each step that is planned beside one in flight."""
        self._num_plans += 1
        has_arrivals, self._num_waiting = num_waiting > self._num_waiting, num_waiting
        if self._is_measuring:
            self._is_measuring = False
            return False
        if len(running) >= self._max_draws:
            return False  # no room for drafts
        modes = {self._mode_of(sequence) for sequence in running}
        if "suffix" in modes:
            return True
        num_in_vain = self._tries_in_vain(len(running))
        every = _TRIED_EVERY << min(num_in_vain, _MOST_DOUBLINGS)
        is_due = not num_in_vain or self._num_plans % every == 0
        if "auto" not in modes or not is_due or self._gate.is_stale(len(running)):
            return False
        # Beside prompts the gate lets no draft pass. Requests that wait while no prompt begins wait
        # for memory.
        if (
            num_waiting
            and len(running) < self._max_num_seqs
            and (has_arrivals or self._had_prompts)
        ):
            return False
        if any(s.num_scheduled_tokens < s.num_prompt_tokens for s in running):
            return False
        self._gate.prepare(len(running), self._cost.sequence_s)
        return True

    def _tries_in_vain(self, num_running: int) -> int:
        return self._num_in_vain.get(num_running.bit_length(), self._newest_in_vain)

    def extend(self, parts: list[ScheduledSequence], tables: BlockTables, num_running: int) -> None:
        """Adds drafts to the parts of a step. The device waits for it."""
        drafts: dict[int, Draft] = {}
        num_tokens = num_draws = 0
        has_prompts = False
        for index, (sequence, start, end, samples, _) in enumerate(parts):
            num_tokens += end - start
            if samples:
                num_draws += 1
                draft = self._guess(sequence, end)
                if draft is not None:
                    drafts[index] = draft
            # The tokens that a grammar forces do not count, though they are computed like a prompt.
            has_prompts |= end - start > 1 and start < sequence.num_prompt_tokens
        self._had_prompts = has_prompts
        if has_prompts:
            # The gate measures drafts in steps that decode. Beside prompts, where no graph
            # replays their rows and no step runs ahead, they took 256 sequences a third more time.
            drafts = {
                index: draft
                for index, draft in drafts.items()
                if not self._running[parts[index].sequence].is_gated
            }
        # Prompts have no token until a step without them and without drafts was measured.
        must_measure = self._cost.lacks_decode_steps
        if not drafts or must_measure or self._num_in_row[has_prompts] >= _PLAIN_EVERY:
            self._num_in_row[has_prompts] = 0
            self._is_measuring = bool(drafts)
            return
        budget = min(self._max_step_tokens - num_tokens, self._max_draws - num_draws)
        counts = self._counts(parts, drafts, num_draws, num_running)
        num_left = budget
        for index, count in counts.items():
            sequence, start, end, samples, _ = parts[index]
            token_ids = drafts[index].token_ids[: min(count, num_left)]
            end += len(token_ids)
            if token_ids and _has_room(sequence, end, tables, num_running):
                num_left -= len(token_ids)
                self._num_drafts += 1
                parts[index] = ScheduledSequence(sequence, start, end, samples, token_ids)
        self._num_draft_tokens += budget - num_left
        is_plain = num_left == budget
        self._num_in_row[has_prompts] = 0 if is_plain else self._num_in_row[has_prompts] + 1

    def _counts(
        self,
        parts: Sequence[ScheduledSequence],
        drafts: Mapping[int, Draft],
        num_sequences: int,
        num_running: int,
    ) -> dict[int, int]:
        """Returns the number of tokens to verify of each draft. `num_sequences`: of the step, that
        sample."""
        counts = {index: len(draft.token_ids) for index, draft in drafts.items()}
        gated: list[int] = []
        survivals: list[list[float]] = []
        num_others = 0  # draft tokens without a gate
        for index, draft in drafts.items():
            guessed = self._running[parts[index].sequence]
            if guessed.is_gated:
                gated.append(index)
                survivals.append(guessed.acceptance.survivals(draft))
            else:
                num_others += len(draft.token_ids)
        if gated:
            row_s = self._cost.sequence_s
            chosen = self._gate.choose(num_sequences, survivals, row_s, num_others)
            longest = max(chosen)
            self._gated_most = min(self._most, 2 * longest + 1) if longest else self._most
            # A gate that has to measure a step without drafts gives no verdict on drafts.
            if not self._gate.is_stale(num_sequences):
                num_in_vain = 0 if any(chosen) else self._tries_in_vain(num_running) + 1
                self._num_in_vain[num_running.bit_length()] = self._newest_in_vain = num_in_vain
            counts |= zip(gated, chosen, strict=True)
        return counts

    def observe_draws(self, item: ScheduledSequence, token_ids: Sequence[int]) -> None:
        """Records the draws of a part that are kept."""
        self._num_kept[len(token_ids) - 1] += 1
        guessed = self._running.get(item.sequence)
        if guessed is not None and guessed.draft is not None:
            self._to_learn.append((guessed.acceptance, guessed.draft, token_ids))
            guessed.draft = None

    def withdraw(self, item: ScheduledSequence) -> bool:
        """Has a part whose first draw is not finite computed again, without drafts from now on: a
        guessed token may have spoiled the rows before it, which attend together with its own.
        Returns False, with nothing changed, if the part has no draft."""
        if not item.draft:
            return False
        sequence = item.sequence
        sequence.num_scheduled_tokens = item.start
        sequence.num_tokens_in_flight = 0
        self._running[sequence].most = 0
        return True

    def learn(self) -> None:
        """Learns from the recorded draws: once the next step is launched, so that no device waits
        for it."""
        for acceptance, draft, token_ids in self._to_learn:
            acceptance.observe(draft, token_ids)
        self._to_learn.clear()
        self._drafter.learn()

    def observe_step(self, num_sequences: int, num_drafted: int, seconds: float) -> None:
        """Records the duration of a step without prompt tokens."""
        self._gate.observe(num_sequences, num_drafted, seconds)

    def forget(self, sequence: Choice) -> None:
        """Notes that a sequence has ended."""
        if self._running.pop(sequence, None) is not None:
            self._drafter.end(sequence)

    def with_counts(self, load: EngineLoad) -> EngineLoad:
        accepted = tuple([sum(self._num_kept[count:]) for count in range(1, 1 + self._most)])
        return replace(
            load,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=sum(accepted),
            accepted_per_position=accepted,
        )

    def _mode_of(self, sequence: Choice) -> SpeculationMode:
        return sequence.request.params.speculation or self._mode

    def _guess(self, sequence: Choice, end: int) -> Draft | None:
        """Returns the draft of a part that samples, as far as its tokens may come next. `end`: of
        the part."""
        guessed, num_tokens = self._running.get(sequence), len(sequence.token_ids)
        if end != num_tokens:
            return None
        if guessed is None:
            guessed = self._begin(sequence)
            if guessed is None:
                return None
        draft, limit = None, guessed.most - num_tokens
        if limit > 0:
            most = self._gated_most if guessed.is_gated else self._most
            draft = self._drafter.propose(sequence, min(limit, most))
        if draft is not None:
            token_ids = draft.token_ids
            if not (guessed.is_free and self._eos_token_ids.isdisjoint(token_ids)):
                count = self._num_possible(sequence, token_ids)
                draft = Draft(token_ids[:count], draft.match_length) if count else None
        guessed.draft = draft
        return draft

    def _begin(self, sequence: Choice) -> _Guessed | None:
        """Returns the state of a sequence that has none; None: it has no output yet, or no
        drafts."""
        mode = self._mode_of(sequence)
        if not sequence.num_output_tokens or mode == "off":
            return None
        request, params = sequence.request, sequence.request.params
        source = request.adapter, request.cache_salt
        most = min(sequence.num_prompt_tokens + params.max_tokens, self._max_model_len) - 1
        is_free = params.grammar is None and not params.stop_token_ids
        acceptance = self._acceptances.of_sequence(source)
        guessed = self._running[sequence] = _Guessed(acceptance, mode == "auto", most, is_free)
        return guessed

    def _num_possible(self, sequence: Choice, token_ids: Sequence[int]) -> int:
        """Returns how many of the tokens can be drawn and leave the sequence open."""
        params = sequence.request.params
        count = len(token_ids)
        if params.stop_token_ids or not self._eos_token_ids.isdisjoint(token_ids):
            for index, token_id in enumerate(token_ids):
                is_eos = token_id in self._eos_token_ids and not params.ignore_eos
                if is_eos or token_id in params.stop_token_ids:
                    count = index
                    break
        if sequence.grammar_state is None or not count:
            return count
        return sequence.grammar_state.num_allowed(token_ids[:count])


def _has_room(sequence: Choice, end: int, tables: BlockTables, num_running: int) -> bool:
    """Allocates the blocks up to the end of a draft, if every running sequence could have one more
    of each group of layers afterwards."""
    missing = tables.num_missing(sequence, end)
    if not missing:
        return True
    if tables.pool.num_free - missing < num_running * tables.num_groups:
        return False
    return tables.grow(sequence, end)
