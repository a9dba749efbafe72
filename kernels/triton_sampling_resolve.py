"""The last launch of `sample_rows`: one program per row finds its token.

A drawn row has a mass for every chunk; the random number falls into one of them, and only that
chunk is read again. top-k and top-p first find their thresholds among the collected ids, by
bisection of the logits' bits; if the collection does not hold them (more equals than room, or both
filters with a large k) by bisection over the whole row: as exact, and slow (0.7 to 1.4 ms, of 256
such rows 2 to 4).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton_launch import start_overlapped
from kernels.triton_sampling_passes import METADATA, best_of_row, read_row, scale_of, weights_of

_LOWEST = tl.constexpr(-(2**31))  # below every logit's key
_ALL = tl.constexpr(2**31)


@triton.jit
def _philox(seed, choice, position):
    """Returns 64 bits of which the upper 53 are the number, as `uniform` has it."""
    mask = 0xFFFFFFFF
    c0 = position.to(tl.uint64) & mask
    c1 = choice.to(tl.uint64) & mask
    c2 = c0 * 0
    c3 = c0 * 0
    k0 = seed.to(tl.uint64) & mask
    k1 = (seed.to(tl.uint64) >> 32) & mask
    for _ in range(10):
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = (product1 >> 32) ^ c1 ^ k0
        c2 = (product0 >> 32) ^ c3 ^ k1
        c1 = product1 & mask
        c3 = product0 & mask
        k0 = (k0 + 0x9E3779B9) & mask
        k1 = (k1 + 0xBB67AE85) & mask
    return ((c0 >> 5) << 37) | ((c1 >> 6) << 11)


@triton.jit
def _keys_of(x):
    """Returns integers in the order of the logits; -0 is 0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _weight_at(key, best, scale):
    """Returns the weight of a key, also as an integer."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.int32)
    x = bits.to(tl.float32, bitcast=True)
    _, weight, quantum = weights_of(tl.where(key > _LOWEST, x, best), best, scale)
    return weight, quantum


@triton.jit
def _add_three(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def _search(keys, amounts, base, goal):
    """Returns the largest key from which on the amount reaches the goal; _LOWEST if none does.
    Three keys at a time: a step lasts as long as a sum over the program."""
    is_there = amounts > 0
    low = tl.min(tl.where(is_there, keys, 0x7FFFFFFF), axis=0).to(tl.int64)
    high = tl.max(tl.where(is_there, keys, _LOWEST), axis=0).to(tl.int64) + 1
    if base + tl.sum(amounts, axis=0) < goal:
        low = low * 0 + _LOWEST
        high = low + 1
    while high - low > 1:
        step = (high - low + 3) >> 2
        first = tl.minimum(low + step, high)
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        parts = (
            tl.where(keys >= first.to(tl.int32), amounts, 0),
            tl.where(keys >= second.to(tl.int32), amounts, 0),
            tl.where(keys >= third.to(tl.int32), amounts, 0),
        )
        from_first, from_second, from_third = tl.reduce(parts, 0, _add_three)
        low = tl.where(base + from_first >= goal, first, low)
        low = tl.where(base + from_second >= goal, second, low)
        low = tl.where(base + from_third >= goal, third, low)
        high = tl.minimum(low + step, high)
    return low


@triton.jit
def _sum_from(row_ptr, key, best, scale, counts, VOCAB: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the tokens, or the mass, of the whole row from a key on."""
    found = tl.zeros((), tl.int64)
    for start in range(0, VOCAB, CHUNK):
        x = read_row(row_ptr, start + tl.arange(0, CHUNK), VOCAB)
        _, _, quanta = weights_of(x, best, scale)
        amounts = tl.where(counts, 1, quanta)
        found += tl.sum(tl.where(_keys_of(x).to(tl.int64) >= key, amounts, 0), axis=0)
    return found


@triton.jit
def _search_row(
    row_ptr, floor, goal, best, scale, counts, VOCAB: tl.constexpr, CHUNK: tl.constexpr
):
    """Searches the whole row from the floor on, as `_search` does."""
    low, high = floor, _keys_of(best).to(tl.int64) + 1
    while high - low > 1:
        middle = (low + high) >> 1
        if _sum_from(row_ptr, middle, best, scale, counts, VOCAB, CHUNK) >= goal:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _mass_goal(top_p, mass):
    goal = tl.ceil(top_p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)
    return tl.minimum(tl.maximum(goal, 1), mass)


@triton.jit
def _spare(goal, above, quantum):
    """Returns how many of the equals at the threshold are kept."""
    quantum = tl.maximum(quantum, 1)
    return (goal - above + quantum - 1) // quantum


@triton.jit
def _filter_row(
    row_ptr, best, scale, top_k, top_p, min_p,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Returns threshold, spare, masses and equals of each chunk, from the whole row."""
    chunks = tl.arange(0, CHUNKS)
    threshold = _keys_of(best).to(tl.int64) * 0 + _LOWEST
    spare = threshold * 0 + _ALL
    if (top_k > 0) & (top_k < VOCAB):
        threshold = _search_row(row_ptr, threshold, top_k, best, scale, True, VOCAB, CHUNK)
    if top_p < 1.0:
        floor = threshold
        mass = _sum_from(row_ptr, floor, best, scale, False, VOCAB, CHUNK)
        goal = _mass_goal(top_p, mass)
        threshold = _search_row(row_ptr, floor, goal, best, scale, False, VOCAB, CHUNK)
        above = _sum_from(row_ptr, threshold + 1, best, scale, False, VOCAB, CHUNK)
        _weight, quantum = _weight_at(threshold, best, scale)
        spare = _spare(goal, above, quantum)
    masses = tl.zeros((CHUNKS,), tl.int64)
    equals = tl.zeros((CHUNKS,), tl.int64)
    for start in range(0, VOCAB, CHUNK):
        x = read_row(row_ptr, start + tl.arange(0, CHUNK), VOCAB)
        _levels, weights, quanta = weights_of(x, best, scale)
        keys = _keys_of(x).to(tl.int64)
        mass = tl.sum(tl.where((keys > threshold) & (weights >= min_p), quanta, 0), axis=0)
        count = tl.sum((keys == threshold).to(tl.int64), axis=0)
        masses += tl.where(chunks * CHUNK == start, mass, 0)
        equals += tl.where(chunks * CHUNK == start, count, 0)
    return threshold, spare, masses, equals


@triton.jit
def _filter_collected(
    values_ptr, counts_ptr, sure_ptr, totals_ptr, best, scale, top_k, top_p, min_p,
    VOCAB: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Returns whether the first WIDTH slots of each chunk hold the thresholds, and then the results
    of `_filter_row`."""
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < NUM_CHUNKS
    counts = tl.load(counts_ptr + chunks, mask=inside, other=0)
    sure_counts = tl.load(sure_ptr + chunks, mask=inside, other=0)
    sure_masses = tl.load(sure_ptr + NUM_CHUNKS + chunks, mask=inside, other=0)
    masses = tl.load(sure_ptr + 2 * NUM_CHUNKS + chunks, mask=inside, other=0)
    totals = tl.load(totals_ptr + chunks, mask=inside, other=0)
    slots = tl.arange(0, WIDTH)[None, :]
    is_there = slots < counts[:, None]
    there = values_ptr + chunks[:, None] * SLOTS + slots
    x = tl.load(there, mask=is_there, other=float("-inf"))
    _levels, weights, quanta = weights_of(x, best, scale)
    keys = tl.reshape(_keys_of(x), [CHUNKS * WIDTH])
    amounts = tl.reshape(quanta, [CHUNKS * WIDTH])
    fits = tl.max(counts, axis=0) <= WIDTH
    threshold = _keys_of(best).to(tl.int64) * 0 + _LOWEST
    spare = threshold * 0 + _ALL
    is_limited = (top_k > 0) & (top_k < VOCAB)
    if is_limited:
        ones = tl.reshape(is_there.to(tl.int32), [CHUNKS * WIDTH])
        threshold = _search(keys, ones, tl.sum(sure_counts, axis=0), top_k)
    if top_p < 1.0:
        amounts = tl.where(keys >= threshold.to(tl.int32), amounts, 0)
        sure_mass = tl.sum(sure_masses, axis=0)
        mass = sure_mass + tl.sum(amounts, axis=0)
        goal = _mass_goal(top_p, tl.where(is_limited, mass, tl.sum(totals, axis=0)))
        fits = fits & (sure_mass < goal) & (mass >= goal)
        threshold = _search(keys, amounts, sure_mass, goal)
        above = sure_mass + tl.sum(tl.where(keys > threshold.to(tl.int32), amounts, 0), axis=0)
        _weight, quantum = _weight_at(threshold, best, scale)
        spare = _spare(goal, above, quantum)
    keys = _keys_of(x)
    is_kept = (keys > threshold.to(tl.int32)) & (weights >= min_p)
    masses += tl.sum(tl.where(is_kept, quanta, 0), axis=1)
    equals = tl.sum((is_there & (keys == threshold.to(tl.int32))).to(tl.int32), axis=1)
    return fits, threshold, spare, masses, equals.to(tl.int64)


@triton.jit
def _pick(masses, equals, share, spare, quantum):
    """Returns the part, in the order of ids with mass and equals, into which the share falls, and
    the remainders of share and spare within it."""
    SIZE: tl.constexpr = masses.shape[0]
    places = tl.arange(0, SIZE)
    earlier = tl.cumsum(equals, axis=0) - equals
    masses += tl.minimum(tl.maximum(spare - earlier, 0), equals) * quantum
    ends = tl.cumsum(masses, axis=0)
    place = tl.min(tl.where(ends > share, places, SIZE - 1), axis=0)
    is_it = places == place
    share -= tl.sum(tl.where(is_it, ends - masses, 0), axis=0)
    spare -= tl.sum(tl.where(is_it, earlier, 0), axis=0)
    return place, share, spare


@triton.jit
def _whole(masses, equals, spare, quantum):
    """Returns the mass that is kept of all parts: of the equals, the spare ones."""
    kept = tl.minimum(tl.sum(equals, axis=0), spare)
    return tl.sum(masses, axis=0) + kept * quantum


@triton.jit
def _invert(
    row_ptr, number, best, scale, min_p, threshold, spare, masses, equals,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Returns the first id, in the order of ids, up to which there is more mass than the number's
    share."""
    PART: tl.constexpr = 1024 if CHUNK > 1024 else CHUNK
    PARTS: tl.constexpr = CHUNK // PART
    weight, quantum = _weight_at(threshold, best, scale)
    quantum = tl.where(weight >= min_p, quantum, 0)
    key = threshold.to(tl.int32)
    whole = _whole(masses, equals, spare, quantum)
    share = tl.umulhi(number, whole.to(tl.uint64)).to(tl.int64)
    chunk, share, spare = _pick(masses, equals, share, spare, quantum)
    ids = chunk * CHUNK + tl.arange(0, PARTS)[:, None] * PART + tl.arange(0, PART)[None, :]
    x = read_row(row_ptr, ids, VOCAB)
    _levels, weights, quanta = weights_of(x, best, scale)
    keys = _keys_of(x)
    is_kept = (keys > key) & (weights >= min_p)
    masses = tl.sum(tl.where(is_kept, quanta, 0), axis=1)
    equals = tl.sum((keys == key).to(tl.int32), axis=1).to(tl.int64)
    part, share, spare = _pick(masses, equals, share, spare, quantum)
    ids = chunk * CHUNK + part * PART + tl.arange(0, PART)
    x = read_row(row_ptr, ids, VOCAB)
    _levels, weights, quanta = weights_of(x, best, scale)
    keys = _keys_of(x)
    is_equal = keys == key
    ranks = tl.cumsum(is_equal.to(tl.int32), axis=0).to(tl.int64)
    is_kept = (keys > key) | (is_equal & (ranks <= spare))
    ends = tl.cumsum(tl.where(is_kept & (weights >= min_p), quanta, 0), axis=0)
    return tl.min(tl.where(ends > share, ids, VOCAB - 1), axis=0)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def resolve_kernel(
    logits_ptr,
    maxima_ptr,
    firsts_ptr,
    totals_ptr,
    sure_ptr,
    counts_ptr,
    values_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    out_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * STRIDE
    start_overlapped(OVERLAPPED)
    temperature = tl.load(temperature_ptr + row)
    best, token, is_broken = best_of_row(maxima_ptr, firsts_ptr, row, NUM_CHUNKS, CHUNKS)
    if (temperature > 0) & (not is_broken):
        scale = scale_of(temperature)
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        top_p, min_p = tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
        chunks = tl.arange(0, CHUNKS)
        inside = chunks < NUM_CHUNKS
        threshold = row * 0 + _LOWEST
        spare = row * 0 + _ALL
        masses = tl.load(totals_ptr + row * NUM_CHUNKS + chunks, mask=inside, other=0)
        equals = tl.zeros((CHUNKS,), tl.int64)
        if ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1.0):
            place = row * NUM_CHUNKS
            counts = tl.load(counts_ptr + place + chunks, mask=inside, other=0)
            if tl.max(counts, axis=0) <= FEW:
                fits, threshold, spare, masses, equals = _filter_collected(
                    values_ptr + place * SLOTS, counts_ptr + place, sure_ptr + 3 * place,
                    totals_ptr + place, best, scale, top_k, top_p, min_p,
                    VOCAB, NUM_CHUNKS, CHUNKS, SLOTS, FEW,
                )  # fmt: skip
            else:
                fits, threshold, spare, masses, equals = _filter_collected(
                    values_ptr + place * SLOTS, counts_ptr + place, sure_ptr + 3 * place,
                    totals_ptr + place, best, scale, top_k, top_p, min_p,
                    VOCAB, NUM_CHUNKS, CHUNKS, SLOTS, SLOTS,
                )  # fmt: skip
            if not fits:
                threshold, spare, masses, equals = _filter_row(
                    row_ptr, best, scale, top_k, top_p, min_p, VOCAB, CHUNK, CHUNKS
                )
        seed = tl.load(seeds_ptr + row)
        choice, position = tl.load(choices_ptr + row), tl.load(positions_ptr + row)
        token = _invert(
            row_ptr, _philox(seed, choice, position), best, scale, min_p, threshold, spare,
            masses, equals, VOCAB, CHUNK,
        )  # fmt: skip
    tl.store(out_ptr + row, tl.where(is_broken, -1, token))
