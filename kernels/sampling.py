"""Draws tokens from logits, row by row: penalties, temperature, top-k, top-p, min-p, Philox.

Random numbers: Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC
2011), key = seed, counter = (position, choice, 0, 0): a replayed request draws the same tokens
whatever else is in the batch. The draw inverts the cumulative distribution in vocabulary order.
Filters in Hugging Face's order: temperature, top-k, top-p (arXiv 1904.09751), min-p (2407.01082).
Uses tensors and numbers only. A row's result depends on that row only.
"""

from __future__ import annotations

import torch

from kernels.backend import uses_triton

_LOW32 = 0xFFFFFFFF
_MAX_GATHERED = 1 << 22  # logits at a time: 172 MB at the peak
_TOP_P_SIZES = (512, 8192)  # of 49152 and 64 rows: 8 and 20 ms, against 105 for a full sort


def draw(
    logits: torch.Tensor,  # [R, V]
    temperature: torch.Tensor,  # [R], 0: the most likely, the lowest id among equals
    top_k: torch.Tensor,  # [R], 0: off
    top_p: torch.Tensor,  # [R], 1: off
    min_p: torch.Tensor,  # [R], 0: off
    seeds: torch.Tensor,  # [R] int64, all 64 bits used
    choices: torch.Tensor,  # [R]
    positions: torch.Tensor,  # [R]
) -> torch.Tensor:
    """Returns token ids [R] int64"""
    if uses_triton(logits):
        out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
        sample_rows(
            logits,
            temperature.float().contiguous(),
            top_k.int().contiguous(),
            top_p.float().contiguous(),
            min_p.float().contiguous(),
            seeds.long().contiguous(),
            choices.int().contiguous(),
            positions.int().contiguous(),
            out,
        )
        return out.long()
    return draw_reference(logits, temperature, top_k, top_p, min_p, seeds, choices, positions)


def sample_rows(
    logits: torch.Tensor,  # [R, V]; -inf: banned
    temperature: torch.Tensor,  # [R] float32
    top_k: torch.Tensor,  # [R] int32
    top_p: torch.Tensor,  # [R] float32
    min_p: torch.Tensor,  # [R] float32
    seeds: torch.Tensor,  # [R] int64
    choices: torch.Tensor,  # [R] int32
    positions: torch.Tensor,  # [R] int32
    out: torch.Tensor,  # [>= R] int32
) -> None:
    """Computes `draw`, written to out[:R]; -1: the row holds a NaN or infinity, or has all ids
    banned.

    On a GPU the host reads nothing, so that a CUDA graph may hold it. Weights are float32 there and
    sums exact: if the number falls within about 1e-7 of a token's end it may draw its neighbour.
    """
    if uses_triton(logits):
        from kernels.triton_sampling import launch_sample_rows

        launch_sample_rows(logits, temperature, top_k, top_p, min_p, seeds, choices, positions, out)
        return
    sample_rows_reference(logits, temperature, top_k, top_p, min_p, seeds, choices, positions, out)


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns, for logits [R, V], the tokens' log-probabilities [R] and ranks [R] (1: most likely),
    and the k most likely ids [R, k] with theirs [R, k]. Equal logits rank by id."""
    # A row's logits become 64-bit keys and some copies: 41 bytes each at the peak.
    num_rows = max(1, _MAX_GATHERED // logits.shape[-1])
    if logits.shape[0] <= num_rows:
        return gather_logprobs_reference(logits, token_ids, k)
    parts = [
        gather_logprobs_reference(logits[row : row + num_rows], token_ids[row : row + num_rows], k)
        for row in range(0, logits.shape[0], num_rows)
    ]
    own, ranks, top_ids, top = (torch.cat(column) for column in zip(*parts, strict=True))
    return own, ranks, top_ids, top


def apply_penalties_(
    logits: torch.Tensor,  # [R, V] changed in place
    rows: torch.Tensor,  # [N] row of each seen (row, token) pair; pairs are unique
    token_ids: torch.Tensor,  # [N]
    output_counts: torch.Tensor,  # [N] times in the output; 0: in the prompt only
    repetition: torch.Tensor,  # [R] > 1 discourages, over prompt and output, as Hugging Face
    presence: torch.Tensor,  # [R] over output, as OpenAI
    frequency: torch.Tensor,  # [R] over output, as OpenAI
) -> None:
    apply_penalties_reference_(
        logits, rows, token_ids, output_counts, repetition, presence, frequency
    )


def add_bias_(
    logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor
) -> None:
    """Adds `values` at the given (row, token) pairs; a pair given twice adds twice."""
    logits.index_put_((rows, token_ids), values.to(logits.dtype), accumulate=True)


def ban_(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Excludes the given (row, token) pairs from the draw."""
    logits.index_put_((rows, token_ids), logits.new_full((), float("-inf")))


def uniform(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns [R] float64 in [0, 1), multiples of 2^-53."""
    seeds = seeds.long()
    zero = torch.zeros_like(seeds)
    word0, word1, _, _ = philox_4x32_10(
        (positions.long() & _LOW32, choices.long() & _LOW32, zero, zero),
        (seeds & _LOW32, (seeds >> 32) & _LOW32),
    )
    return ((word0 >> 5) * 67108864 + (word1 >> 6)).double() / 9007199254740992.0


def philox_4x32_10(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes ten rounds over 32-bit words held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply_32(0xD2511F53, c0)
        high1, low1 = _multiply_32(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _LOW32, (k1 + 0xBB67AE85) & _LOW32
    return c0, c1, c2, c3


def draw_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    tokens = _first_argmax(logits)
    drawn = (temperature > 0).nonzero()[:, 0]
    if drawn.numel() == 0:
        return tokens
    weights = _filtered_weights(
        logits[drawn], temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn]
    )
    cumulative = weights.cumsum(-1)
    u = uniform(seeds[drawn], choices[drawn], positions[drawn])
    # u < 1, so the target is below the total and the first sum above it has weight itself; the
    # rounding of u * total up to the total is the reason for the bound.
    total = cumulative[:, -1:]
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True)[:, 0]
    tokens[drawn] = found.clamp_(max=logits.shape[-1] - 1)
    return tokens


def sample_rows_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    best = logits.max(-1, keepdim=True).values  # NaN where there is one
    sound = best.isfinite()
    tokens = draw_reference(
        logits.masked_fill(~sound, 0.0), temperature, top_k, top_p, min_p, seeds, choices, positions
    )
    out[: logits.shape[0]] = torch.where(sound[:, 0], tokens, -1)


def gather_logprobs_reference(
    logits: torch.Tensor, token_ids: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    index = token_ids.long()[:, None]
    own = logits.gather(1, index)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ranks = 1 + ((logits > own) | ((logits == own) & (ids < index))).sum(-1)
    top_ids = _top_ids(logits, k)
    return logprobs.gather(1, index)[:, 0], ranks, top_ids, logprobs.gather(1, top_ids)


def apply_penalties_reference_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    seen = logits[rows, token_ids]
    factor = repetition[rows]
    seen = torch.where(seen > 0, seen / factor, seen * factor)
    seen = seen - frequency[rows] * output_counts - presence[rows] * (output_counts > 0)
    logits.index_put_((rows, token_ids), seen.to(logits.dtype))


def _multiply_32(constant: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the (high, low) words of a 32 x 32 bit product, by halves so that int64 never
    overflows."""
    upper, lower = constant * (word >> 16), constant * (word & 0xFFFF)  # each below 2^48
    middle = upper + (lower >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)


def _first_argmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns the lowest id among equals. `argmax` itself promises no order on a device."""
    if not logits.is_cuda:
        return logits.argmax(-1)
    best = logits.max(-1, keepdim=True).values
    return (logits == best).to(torch.uint8).argmax(-1)


def _filtered_weights(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Returns [R, V] float64, proportional to the probabilities; 0 where filtered out."""
    # The maximum goes first: a temperature near 0 then sends the others to -inf, not all to inf.
    scaled = logits.double() - logits.max(-1, keepdim=True).values
    scaled.div_(temperature.double()[:, None])
    vocab = logits.shape[-1]
    limited = ((top_k > 0) & (top_k < vocab)).nonzero()[:, 0]
    if limited.numel():
        limits = top_k[limited].long()
        values = scaled[limited]
        best = values.topk(int(limits.max())).values
        cutoff = best.gather(1, limits[:, None] - 1)
        # Equals of the k-th stay, as in Hugging Face and vLLM.
        scaled[limited] = values.masked_fill_(values < cutoff, float("-inf"))
    weights = scaled.exp_()  # 1 at the maximum
    nucleus = (top_p < 1).nonzero()[:, 0]
    if nucleus.numel():
        weights[nucleus] = _keep_top_p(weights[nucleus], top_p[nucleus].double())
    return weights.masked_fill_(weights < min_p.double()[:, None], 0.0)


def _keep_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the fewest most likely tokens whose share reaches top_p; of equals, the lowest ids."""
    vocab = weights.shape[-1]
    mass = top_p[:, None] * weights.cumsum(-1)[:, -1:]  # a cumsum runs in order, whatever R is
    # Few tokens usually hold the mass: rows continue to the next size only if they need it.
    waiting = torch.arange(weights.shape[0], device=weights.device)
    for size in (*(size for size in _TOP_P_SIZES if size < vocab), vocab):
        rows = weights[waiting]
        best = rows.topk(size).values if size < vocab else rows.sort(descending=True).values
        reached = (best.cumsum(-1)[:, -1:] >= mass[waiting])[:, 0]
        if size == vocab:
            reached = torch.ones_like(reached)
        done = waiting[reached]
        weights[done] = _keep_mass(rows[reached], best[reached], mass[done])
        waiting = waiting[~reached]
        if waiting.numel() == 0:
            break
    return weights


def _keep_mass(weights: torch.Tensor, best: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """`best`: the largest weights [R, n], descending, at least as many as are kept."""
    reached = best.cumsum(-1) - best < mass
    count = reached.sum(-1, keepdim=True).clamp_(min=1)
    cutoff = best.gather(1, count - 1)
    equal = weights == cutoff
    spare = count - (weights > cutoff).sum(-1, keepdim=True)  # the number of equals that are kept
    if bool((equal.sum(-1, keepdim=True) > spare).any()):
        equal &= equal.cumsum(-1) <= spare
    return weights.masked_fill_(~((weights > cutoff) | equal), 0.0)


def _top_ids(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Returns [R, k], most likely first, lower ids first among equals (`topk` promises no order
    there)."""
    if k == 0:
        return torch.empty((logits.shape[0], 0), dtype=torch.int64, device=logits.device)
    # Integers in the order of (logit, -id), of which no two are equal; -0 is 0.
    bits = (logits.float() + 0.0).view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits) << 32
    keys -= torch.arange(logits.shape[-1], device=logits.device)
    return keys.topk(min(k, logits.shape[-1])).indices
