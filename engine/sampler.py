"""Logits to Samples: per-row parameters as tensors, penalties, bans, masks, the draw,
log-probabilities.

The kernels hold the arithmetic. A row depends on its own sequence only: its parameters, its tokens,
and random numbers keyed by (seed, choice, position of the token drawn). A row that is not finite is
reported and does not affect others. Free of blocks and adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from engine.grammar_state import GrammarState, fill_masks
from engine.stopping import banned_token_ids
from engine.types import Sample, ScheduledBatch, ScheduledSequence, TokenLogprobs
from kernels.mask_logits import mask_logits_, num_mask_words
from kernels.sampling import add_bias_, apply_penalties_, ban_, draw, gather_logprobs

_SEED_MASK = 2**64 - 1
NOT_FINITE, _UNDRAWN = Sample(None, is_finite=False), Sample(None)


def sample(
    logits: torch.Tensor,  # [R, V] float32, changed in place
    parts: Sequence[ScheduledSequence],  # one per row, as `ScheduledSequence.rows`
    eos_token_ids: Collection[int],
) -> list[Sample]:
    if not parts:
        return []
    is_finite = finite_rows(logits)
    if not all(is_finite):
        broken = torch.tensor([not ok for ok in is_finite], device=logits.device)
        logits.masked_fill_(broken[:, None], 0.0)
    limits = [part.sequence.request.params.logprobs for part in parts]
    wanted = [i for i, limit in enumerate(limits) if limit is not None]
    raw = logits[wanted] if wanted else logits  # a copy, taken before the changes
    change_logits_(logits, parts, eos_token_ids)
    if apply_masks_(logits, parts):
        is_possible = (logits > float("-inf")).any(-1).tolist()
        is_finite = [a and b for a, b in zip(is_finite, is_possible, strict=True)]
    drawn = _draw(logits, parts)
    token_ids = drawn.tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    if wanted:
        found = token_logprobs(
            raw, [token_ids[i] for i in wanted], [limits[i] or 0 for i in wanted]
        )
        logprobs = dict(zip(wanted, found, strict=True))
    return [
        Sample(token_ids[i], logprobs.get(i)) if is_finite[i] else Sample(None, is_finite=False)
        for i in range(len(parts))
    ]


def by_sequence(batch: ScheduledBatch, answer: Callable[[int], Sample]) -> list[Sample]:
    """Returns one sample per sequence of the batch. `answer`: returns that of a row; called only
    for rows that follow tokens which were drawn."""
    samples: list[Sample] = []
    row = 0
    for part in batch.sequences:
        if not part.samples:
            samples.append(_UNDRAWN)
            continue
        sample = answer(row)
        if part.draft:
            draws = [sample]
            for index, token_id in enumerate(part.draft, row + 1):
                if draws[-1].token_id != token_id:
                    break
                draws.append(answer(index))
            sample = sample._replace(after_draft=tuple(draws[1:]))
        samples.append(sample)
        row += 1 + len(part.draft)
    return samples


def kept_by_sequence(batch: ScheduledBatch, token_ids: Sequence[int]) -> list[Sample]:
    """Returns one sample per sequence of the batch, where no draw has log-probabilities: the device
    waits for it. `token_ids`: of each row, negative where it is not finite."""
    samples: list[Sample] = []
    row = 0
    for _, _, _, is_drawn, draft in batch.sequences:
        if not is_drawn:
            samples.append(_UNDRAWN)
            continue
        token_id, first = token_ids[row], row
        row += 1 + len(draft)
        if token_id < 0:
            samples.append(NOT_FINITE)
        elif not draft:
            samples.append(Sample(token_id))
        else:
            stop, newest = first + 1, token_id
            for guess in draft:
                if newest != guess or (newest := token_ids[stop]) < 0:
                    break
                stop += 1
            samples.append(Sample(token_id, None, (), True, (), tuple(token_ids[first:stop])))
    return samples


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], limits: Sequence[int]
) -> list[TokenLogprobs]:
    """Returns the log-probability of each row's token and of its `limit` most likely tokens."""
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
    return read_logprobs(gather_logprobs(logits, ids, max(limits)), token_ids, limits)


def read_logprobs(
    found: Sequence[torch.Tensor], token_ids: Sequence[int], limits: Sequence[int]
) -> list[TokenLogprobs]:
    """Reads the tensors of `gather_logprobs`, on the host if no copy is to be waited for."""
    rows = zip(token_ids, *(tensor.tolist() for tensor in found), limits, strict=True)
    return [
        TokenLogprobs(
            token_id, logprob, rank, tuple(zip(best[:limit], values[:limit], strict=True))
        )
        for token_id, logprob, rank, best, values, limit in rows
    ]


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Checks all rows in one pass: a NaN appears in both extremes, an infinity in one."""
    low, high = torch.aminmax(logits, dim=-1)
    finite: list[bool] = (low.isfinite() & high.isfinite()).tolist()
    return finite


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies to the device through page-locked memory: from other memory the copy would wait for
    the step in flight."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _draw(logits: torch.Tensor, parts: Sequence[ScheduledSequence]) -> torch.Tensor:
    params = [part.sequence.request.params for part in parts]

    def floats(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)

    def integers(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=logits.device)

    temperature = floats([p.temperature for p in params])
    if not any(p.temperature for p in params):  # all greedy: the other parameters are not read
        zeros = integers([0]).expand(len(params))
        return draw(logits, temperature, zeros, temperature, temperature, zeros, zeros, zeros)
    seeds = np.array([part.sequence.seed & _SEED_MASK for part in parts], dtype=np.uint64)
    return draw(
        logits,
        temperature,
        integers([p.top_k for p in params]),
        floats([p.top_p for p in params]),
        floats([p.min_p for p in params]),
        torch.from_numpy(seeds.view(np.int64)).to(logits.device),
        integers([part.sequence.choice for part in parts]),
        integers([part.end for part in parts]),
    )


def draws_late(part: ScheduledSequence) -> bool:
    """Returns True if the draw depends on a token that may be in flight: of a grammar, which may
    begin with it, or of penalties. Masks are filled while the device computes in any case."""
    sequence = part.sequence
    return sequence.grammar_state is not None or (
        part.end > len(sequence.token_ids) and sequence.request.params.has_penalties
    )


def changes_logits(part: ScheduledSequence) -> bool:
    params = part.sequence.request.params
    return bool(params.logit_bias) or params.has_penalties or params.min_tokens > 0


def change_logits_(
    logits: torch.Tensor, parts: Sequence[ScheduledSequence], eos_token_ids: Collection[int]
) -> None:
    """Applies penalties, then bias, then bans."""
    _penalize_(logits, parts)
    biases = [
        (row, token_id, value)
        for row, part in enumerate(parts)
        for token_id, value in part.sequence.request.params.logit_bias
    ]
    if biases:
        rows, ids, values = zip(*biases, strict=True)
        device = logits.device
        add_bias_(
            logits,
            upload(torch.tensor(rows), device),
            upload(torch.tensor(ids), device),
            upload(torch.tensor(values, dtype=torch.float32), device),
        )
    bans = [
        (row, token_id)
        for row, part in enumerate(parts)
        if part.sequence.request.params.min_tokens
        for token_id in banned_token_ids(part.sequence, part.end, eos_token_ids)
    ]
    if bans:
        pairs = upload(torch.tensor(bans), logits.device)
        ban_(logits, pairs[:, 0], pairs[:, 1])


def masked_rows(parts: Sequence[ScheduledSequence]) -> tuple[list[int], list[GrammarState]]:
    """Returns the rows whose grammar limits their next token, and the grammars' states there. Draws
    that are discarded are left out: the sequence has ended since the step was launched (and has no
    blocks), or its next token is decided."""
    rows: list[int] = []
    states: list[GrammarState] = []
    for row, part in enumerate(parts):
        sequence, state = part.sequence, part.sequence.grammar_state
        if state is None or not state.is_constraining:
            continue
        if sequence.block_table and part.known_end == len(sequence.token_ids):
            rows.append(row)
            states.append(state.after(part.draft) if part.draft else state)
    return rows, states


def apply_masks_(logits: torch.Tensor, parts: Sequence[ScheduledSequence]) -> bool:
    """Excludes the tokens that the rows' grammars forbid, after all other changes. Returns False if
    no row has such a grammar."""
    rows, states = masked_rows(parts)
    if not rows:
        return False
    masks = np.empty((len(rows), num_mask_words(logits.shape[1])), dtype=np.int32)
    fill_masks(states, masks)
    device = logits.device
    mask_logits_(
        logits,
        upload(torch.from_numpy(masks), device),
        upload(torch.tensor(rows, dtype=torch.int32), device),
    )
    return True


def _penalize_(logits: torch.Tensor, parts: Sequence[ScheduledSequence]) -> None:
    rows: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    ids: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    counts: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] = []
    for row, part in enumerate(parts):
        choice = part.sequence
        if not choice.request.params.has_penalties:
            continue
        tokens = np.array([*choice.token_ids[: part.known_end], *part.draft], dtype=np.int64)
        unique, places = np.unique(tokens, return_inverse=True)
        output_places = places[choice.num_prompt_tokens :]
        ids.append(unique)
        counts.append(np.bincount(output_places, minlength=len(unique)))
        rows.append(np.full(len(unique), row, dtype=np.int64))
    if not rows:
        return
    params = [part.sequence.request.params for part in parts]
    device = logits.device

    def floats(values: list[float]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.float32), device)

    apply_penalties_(
        logits,
        upload(torch.from_numpy(np.concatenate(rows)), device),
        upload(torch.from_numpy(np.concatenate(ids)), device),
        upload(torch.from_numpy(np.concatenate(counts)), device),
        floats([p.repetition_penalty for p in params]),
        floats([p.presence_penalty for p in params]),
        floats([p.frequency_penalty for p in params]),
    )
