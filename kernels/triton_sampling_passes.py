"""The launches of `sample_rows` over chunks of rows, and the arithmetic that all of them share.

A weight is 2^((x - maximum) / (temperature ln 2)) in units of 2^-44, an integer, so that sums are
exact in any order and the passes agree. A ladder counts the tokens (top-k) or the mass (top-p
alone) above each of 16 rungs; its sums are float32 and only narrow the search: the result is
verified exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.backend import IS_INTERPRETED
from kernels.triton_launch import start_overlapped

_TILE = tl.constexpr(1024)
RUNGS = tl.constexpr(16)
_ONE = tl.constexpr(float(2**44))  # the weight of the most likely token
_DEPTH = tl.constexpr(45.0)  # log2 of a weight of zero, plus one
_RATIO_LOG2 = tl.constexpr(0.4854268271702417)  # rungs of the first ladder: each 1.4 times the last
_HUGE = tl.constexpr(float(2**100))
_INTERPRETED = tl.constexpr(IS_INTERPRETED)
# Parameters of rows: slices of a step's buffers, at any address.
METADATA = [
    "temperature_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "min_p_ptr",
    "seeds_ptr",
    "choices_ptr",
    "positions_ptr",
    "out_ptr",
]


@triton.jit
def read_row(row_ptr, ids, VOCAB: tl.constexpr):
    x = tl.load(row_ptr + ids, mask=ids < VOCAB, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit
def best_of_row(maxima_ptr, firsts_ptr, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns maximum, its lowest id, whether the row has no id to draw."""
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < NUM_CHUNKS
    maxima = tl.load(maxima_ptr + row * NUM_CHUNKS + chunks, mask=inside, other=float("-inf"))
    firsts = tl.load(firsts_ptr + row * NUM_CHUNKS + chunks, mask=inside, other=0)
    best = tl.max(maxima, axis=0)
    first = tl.min(tl.where(maxima == best, firsts, 2147483647), axis=0)
    return best, first, (tl.min(firsts, axis=0) < 0) | (best == float("-inf"))


@triton.jit
def scale_of(temperature):
    """Returns the scale. A temperature near 0 sends the other logits to -inf, and 0 times it stays
    0.

    log2(e) is a literal: the interpreter of Triton 3.7 cannot use a tensor that a named constant on
    the left of an operator made.
    """
    return tl.minimum(1.4426950408889634 / temperature, 1e38)


@triton.jit
def weights_of(x, best, scale):
    """Returns log2 of the weights, the weights (1 at the maximum), the same as integers."""
    levels = (x - best) * scale
    weights = tl.exp2(levels)
    return levels, weights, (weights * _ONE).to(tl.int64)


@triton.jit
def _first_rungs():
    rungs = tl.arange(0, RUNGS)
    depths = _DEPTH * tl.exp2((rungs - (RUNGS - 1)).to(tl.float32) * _RATIO_LOG2)
    return tl.where(rungs == RUNGS - 1, _DEPTH, depths)


@triton.jit
def _finer_rungs(upper, lower):
    """Returns the rungs; the last one is `lower` itself."""
    rungs = tl.arange(0, RUNGS)
    top = tl.maximum(upper, 0.0)
    depths = top + (lower - top) * ((rungs + 1).to(tl.float32) / RUNGS)
    return tl.where(rungs == RUNGS - 1, lower, depths)


@triton.jit
def _choose(ladder_ptr, depths, upper, goal, CHUNKS: tl.constexpr):
    """Returns the depths between which the goal is reached, and the amount above the lower one."""
    rungs = tl.arange(0, RUNGS)
    splits = tl.arange(0, CHUNKS)[:, None]
    parts = tl.load(
        ladder_ptr + splits * RUNGS + rungs[None, :], mask=splits < tl.num_programs(0), other=0.0
    )
    above = tl.sum(parts.to(tl.float64), axis=0)
    place = tl.min(tl.where(above >= goal, rungs, RUNGS - 1), axis=0)
    lower = tl.sum(tl.where(rungs == place, depths, 0.0), axis=0)
    higher = tl.sum(tl.where(rungs == place - 1, depths, 0.0), axis=0)
    amount = tl.sum(tl.where(rungs == place, above, 0.0), axis=0)
    return tl.where(place == 0, upper, higher), lower, amount


@triton.jit
def _goal(totals_ptr, top_k, top_p, row, VOCAB, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns the target of the ladder's counts: tokens where top-k is on, otherwise mass (1: the
    maximum's)."""
    chunks = tl.arange(0, CHUNKS)
    totals = tl.load(totals_ptr + row * NUM_CHUNKS + chunks, mask=chunks < NUM_CHUNKS, other=0)
    mass = top_p.to(tl.float64) * (tl.sum(totals, axis=0).to(tl.float64) / _ONE)
    return tl.where((top_k > 0) & (top_k < VOCAB), top_k.to(tl.float64), mass)


@triton.jit
def _is_above(levels, depths):
    """Returns 1 where levels > -depths, otherwise 0, without a predicate: the 64 of a tile would be
    packed into bits and unpacked, half of the loop. A difference of levels times 2^100 is 0 or more
    than 1."""
    if _INTERPRETED:
        above = (levels > -depths).to(tl.float32)
    else:
        above = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f71800000, $2;",
            "=f,f,f",
            [levels, depths * _HUGE],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return above


@triton.jit
def _ladder(
    row_ptr, totals_ptr, ladder_ptr, best, scale, depths, counts,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WEIGHS: tl.constexpr,
):  # fmt: skip
    """Writes the count of this program's chunks above each depth; `WEIGHS`: also their masses."""
    TILE: tl.constexpr = _TILE if CHUNK > _TILE else CHUNK
    above = tl.zeros((RUNGS, TILE), tl.float32)
    for chunk in range(tl.program_id(0), NUM_CHUNKS, tl.num_programs(0)):
        mass = tl.zeros((1, TILE), tl.int64)
        for offset in tl.range(0, CHUNK, TILE, num_stages=5):
            ids = (chunk * CHUNK + offset + tl.arange(0, TILE))[None, :]
            levels, weights, quanta = weights_of(read_row(row_ptr, ids, VOCAB), best, scale)
            above += _is_above(levels, depths[:, None]) * tl.where(counts, 1.0, weights)
            if WEIGHS:
                mass += quanta
        if WEIGHS:
            tl.store(totals_ptr + chunk, tl.sum(mass))
    there = ladder_ptr + tl.program_id(0) * RUNGS + tl.arange(0, RUNGS)
    tl.store(there, tl.sum(above, axis=1))


@triton.jit
def _masses(
    row_ptr, totals_ptr, best, scale, min_p,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Writes the mass of each of this program's chunks that min-p keeps."""
    TILE: tl.constexpr = 2 * _TILE if CHUNK > 2 * _TILE else CHUNK
    for chunk in range(tl.program_id(0), NUM_CHUNKS, tl.num_programs(0)):
        mass = tl.zeros((TILE,), tl.int64)
        for offset in tl.range(0, CHUNK, TILE, num_stages=4):
            ids = chunk * CHUNK + offset + tl.arange(0, TILE)
            _levels, weights, quanta = weights_of(read_row(row_ptr, ids, VOCAB), best, scale)
            mass += tl.where(weights < min_p, 0, quanta)
        tl.store(totals_ptr + chunk, tl.sum(mass, axis=0))


@triton.jit
def scan_kernel(
    logits_ptr,
    maxima_ptr,
    firsts_ptr,  # -1: a NaN or an infinity is in the chunk
    counts_ptr,  # where `collect` will count
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    start_overlapped(OVERLAPPED)
    x = read_row(logits_ptr + row * STRIDE, ids, VOCAB)
    is_sound = x < float("inf")
    x = tl.where(is_sound, x, float("-inf"))
    best = tl.max(x, axis=0)
    first = tl.min(tl.where(x == best, ids, VOCAB), axis=0)
    num_broken = tl.sum(tl.where(is_sound, 0, 1), axis=0)
    tl.store(counts_ptr + row * NUM_CHUNKS + chunk, 0)
    tl.store(maxima_ptr + row * NUM_CHUNKS + chunk, best)
    tl.store(firsts_ptr + row * NUM_CHUNKS + chunk, tl.where(num_broken > 0, -1, first))


@triton.jit(do_not_specialize_on_alignment=METADATA)
def weigh_kernel(
    logits_ptr,
    maxima_ptr,
    firsts_ptr,
    totals_ptr,
    ladder_ptr,  # [R, 2, chunks, RUNGS]
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    start_overlapped(OVERLAPPED)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        best, _first, is_broken = best_of_row(maxima_ptr, firsts_ptr, row, NUM_CHUNKS, CHUNKS)
        if not is_broken:
            scale = scale_of(temperature)
            top_k = tl.load(top_k_ptr + row)
            is_limited = (top_k > 0) & (top_k < VOCAB)
            row_ptr, totals_ptr = logits_ptr + row * STRIDE, totals_ptr + row * NUM_CHUNKS
            if is_limited | (tl.load(top_p_ptr + row) < 1.0):
                _ladder(
                    row_ptr, totals_ptr, ladder_ptr + 2 * row * NUM_CHUNKS * RUNGS, best, scale,
                    _first_rungs(), is_limited, VOCAB, CHUNK, NUM_CHUNKS, True,
                )  # fmt: skip
            else:
                min_p = tl.load(min_p_ptr + row)
                _masses(row_ptr, totals_ptr, best, scale, min_p, VOCAB, CHUNK, NUM_CHUNKS)


@triton.jit(do_not_specialize_on_alignment=METADATA)
def narrow_kernel(
    logits_ptr,
    maxima_ptr,
    firsts_ptr,
    totals_ptr,
    ladder_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    start_overlapped(OVERLAPPED)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    is_limited = (top_k > 0) & (top_k < VOCAB)
    if (temperature > 0) & (is_limited | (top_p < 1.0)):
        best, _first, is_broken = best_of_row(maxima_ptr, firsts_ptr, row, NUM_CHUNKS, CHUNKS)
        if not is_broken:
            goal = _goal(totals_ptr, top_k, top_p, row, VOCAB, NUM_CHUNKS, CHUNKS)
            first_ptr = ladder_ptr + 2 * row * NUM_CHUNKS * RUNGS
            upper, lower, amount = _choose(first_ptr, _first_rungs(), -1.0, goal, CHUNKS)
            if (amount > FEW) | (not is_limited):
                _ladder(
                    logits_ptr + row * STRIDE, totals_ptr + row * NUM_CHUNKS,
                    first_ptr + NUM_CHUNKS * RUNGS, best, scale_of(temperature),
                    _finer_rungs(upper, lower), is_limited, VOCAB, CHUNK, NUM_CHUNKS, False,
                )  # fmt: skip


@triton.jit
def _collect(
    row_ptr, best, scale, upper, lower, min_p, sure_ptr, counts_ptr, values_ptr,
    VOCAB: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Counts and adds the ids above the upper depth, lists the ids between the depths, chunk by
    chunk.

    In no order: the list is searched and added up in integers, where order has no effect.
    """
    TILE: tl.constexpr = 2 * _TILE if CHUNK > 2 * _TILE else CHUNK
    for chunk in range(tl.program_id(0), NUM_CHUNKS, tl.num_programs(0)):
        counters = counts_ptr + chunk + tl.zeros((TILE,), tl.int32)
        sure_count = tl.zeros((TILE,), tl.int32)
        sure_mass = tl.zeros((TILE,), tl.int64)
        kept_mass = tl.zeros((TILE,), tl.int64)
        for offset in tl.range(0, CHUNK, TILE, num_stages=4):
            x = read_row(row_ptr, chunk * CHUNK + offset + tl.arange(0, TILE), VOCAB)
            levels, weights, quanta = weights_of(x, best, scale)
            is_sure = levels > -upper
            quanta = tl.where(is_sure, quanta, 0)
            sure_count += is_sure.to(tl.int32)
            sure_mass += quanta
            kept_mass += tl.where(weights < min_p, 0, quanta)
            is_between = (levels > -lower) & (levels <= -upper)
            slots = tl.atomic_add(counters, 1, mask=is_between, sem="relaxed")
            there = values_ptr + chunk * SLOTS + slots
            tl.store(there, x, mask=is_between & (slots < SLOTS))
        tl.store(sure_ptr + chunk, tl.sum(sure_count, axis=0).to(tl.int64))
        tl.store(sure_ptr + NUM_CHUNKS + chunk, tl.sum(sure_mass, axis=0))
        tl.store(sure_ptr + 2 * NUM_CHUNKS + chunk, tl.sum(kept_mass, axis=0))


@triton.jit(do_not_specialize_on_alignment=METADATA)
def collect_kernel(
    logits_ptr,
    maxima_ptr,
    firsts_ptr,
    totals_ptr,
    ladder_ptr,
    sure_ptr,  # [R, 3, chunks] above the upper rung: tokens, mass, mass that min-p leaves
    counts_ptr,  # [R, chunks] ids between the rungs, of which SLOTS are kept
    values_ptr,  # [R, chunks, SLOTS] their logits
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    start_overlapped(OVERLAPPED)
    temperature, top_k = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    is_limited = (top_k > 0) & (top_k < VOCAB)
    if (temperature > 0) & (is_limited | (top_p < 1.0)):
        best, _first, is_broken = best_of_row(maxima_ptr, firsts_ptr, row, NUM_CHUNKS, CHUNKS)
        if not is_broken:
            goal = _goal(totals_ptr, top_k, top_p, row, VOCAB, NUM_CHUNKS, CHUNKS)
            first_ptr = ladder_ptr + 2 * row * NUM_CHUNKS * RUNGS
            upper, lower, amount = _choose(first_ptr, _first_rungs(), -1.0, goal, CHUNKS)
            if (amount > SLOTS) | (not is_limited):
                depths = _finer_rungs(upper, lower)
                finer_ptr = first_ptr + NUM_CHUNKS * RUNGS
                upper, lower, amount = _choose(finer_ptr, depths, upper, goal, CHUNKS)
            # The mass that top-k keeps is the whole of top-p: all of it must be collected.
            upper = tl.where(is_limited & (top_p < 1.0), -1.0, upper)
            _collect(
                logits_ptr + row * STRIDE, best, scale_of(temperature), upper, lower,
                tl.load(min_p_ptr + row), sure_ptr + 3 * row * NUM_CHUNKS,
                counts_ptr + row * NUM_CHUNKS, values_ptr + row * NUM_CHUNKS * SLOTS,
                VOCAB, CHUNK, NUM_CHUNKS, SLOTS,
            )  # fmt: skip
