"""The Triton kernels of `sample_rows`: the device reads from a row's parameters which passes it
needs.

    scan     every row       maximum, its lowest id, soundness     of each chunk of a row
    weigh    drawn rows      mass; top-k, top-p: a first ladder     "
    narrow   top-k, top-p    a finer ladder between two rungs       "
    collect  top-k, top-p    the logits between two finer rungs     "
    resolve  every row       the token: one program per row

A launch without work for a row ends at once. No sort, no reads by the host. A row's token depends
neither on its neighbours nor on their number, nor on how the work is spread over programs: few rows
are split among more programs.

Microseconds on an H200, 128256 ids, of 1 / 64 / 256 rows: greedy 4 / 14 / 37, temperature 13 / 36 /
99, top-k 50 31 / 81 / 281, and top-p 0.9 39 / 91 / 300, top-p alone 39 / 102 / 329, or 62 / 151 /
484 for logits so flat that it keeps most ids. Of the 329, scan accounts for 33, weigh 81, narrow
68, collect 112.
"""

from __future__ import annotations

import torch

from kernels.triton_launch import OVERLAPS, Launcher
from kernels.triton_sampling_passes import (
    RUNGS,
    collect_kernel,
    narrow_kernel,
    scan_kernel,
    weigh_kernel,
)
from kernels.triton_sampling_resolve import resolve_kernel

CHUNK = 8192  # ids per program
ROOM = 8192  # logits a row can collect, spread evenly over its chunks
FEW = 64  # of a chunk: up to this number are searched quickly
PROGRAMS = 256  # of the passes over drawn rows: two of each multiprocessor of an H200, one wave
MAX_VOCAB = 2**19 - 2  # with the weight of each at most 2^44, sums stay below 2^63

_scan = Launcher(scan_kernel, launch_pdl=OVERLAPS)
_weigh = Launcher(weigh_kernel, launch_pdl=OVERLAPS)
_narrow = Launcher(narrow_kernel, launch_pdl=OVERLAPS)
_collect = Launcher(collect_kernel, launch_pdl=OVERLAPS)
_resolve = Launcher(resolve_kernel, launch_pdl=OVERLAPS)


def launch_sample_rows(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
    chunk: int = CHUNK,
    room: int = ROOM,
) -> None:
    rows, vocab = logits.shape
    assert vocab <= MAX_VOCAB
    assert logits.stride(1) == 1
    num_chunks = -(-vocab // chunk)
    chunks = 1 << (num_chunks - 1).bit_length()
    slots = max(room // chunks, 1)
    size = -(-rows * num_chunks // 4) * 4  # each part begins at a multiple of 16 bytes
    sums = torch.empty((4, size), dtype=torch.int64, device=logits.device)
    totals, sure = sums[0], sums[1:]
    words = torch.empty((3, size), dtype=torch.int32, device=logits.device)
    maxima, firsts, counts = words[0].view(torch.float32), words[1], words[2]
    ladder = logits.new_empty((rows, 2, num_chunks, RUNGS.value), dtype=torch.float32)
    values = logits.new_empty((rows, num_chunks, slots), dtype=torch.float32)
    splits = min(max(PROGRAMS // max(rows, 1), 1), num_chunks)
    grid = (splits, rows, 1)
    found = (logits, maxima, firsts)
    parameters = (temperature, top_k, top_p, min_p)
    shape = (logits.stride(0), vocab, chunk, num_chunks)
    _scan((num_chunks, rows, 1), (*found, counts), (), (*shape, OVERLAPS), 8)
    _weigh(grid, (*found, totals, ladder), parameters, (*shape, chunks, OVERLAPS), 8)
    _narrow(grid, (*found, totals, ladder), parameters, (*shape, chunks, slots, OVERLAPS), 8)
    collected = (sure, counts, values)
    _collect(
        grid,
        (*found, totals, ladder, *collected),
        parameters,
        (*shape, chunks, slots, OVERLAPS),
        8,
    )
    _resolve(
        (rows, 1, 1),
        (*found, totals, *collected),
        (*parameters, seeds, choices, positions, out),
        (*shape, chunks, slots, min(slots, FEW), OVERLAPS),
        8,
    )
