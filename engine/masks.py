"""The masks of a step's grammars: filled on the host while the device computes, sent in one copy.

Page-locked memory and its copy on the device have room for every row and exist from the start:
nothing is allocated under traffic. Free of grammars' compilation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.grammar_state import fill_masks
from engine.sampler import masked_rows
from engine.types import ScheduledSequence
from kernels.mask_logits import mask_logits_, num_mask_words

_ALIGNMENT = 4  # words: 16 bytes
_ALL_TOKENS = -1  # a word with every bit set


class Masks:
    def __init__(self, max_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._words = num_mask_words(vocab_size)
        self._vocab_size = vocab_size
        # The numbers of the masked rows, then their masks, packed: one copy sends both.
        self._start = -(-max_seqs // _ALIGNMENT) * _ALIGNMENT
        size = self._start + max_seqs * self._words
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        # Steps are collected before the next masks are filled, so it never waits in fact. A step
        # that failed half-way is not collected; its copy may still be under way.
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def device_bytes(self) -> int:
        return self._device.nbytes

    def apply_(self, logits: torch.Tensor, parts: Sequence[ScheduledSequence]) -> bool:
        """Masks the rows of logits [R, V] whose grammars limit their next tokens; one part per row.
        Returns False if there are none."""
        rows, states = masked_rows(parts)
        if not rows:
            return False
        fill_masks(states, self._begin(rows))
        self._mask(logits, len(rows))
        return True

    def run_once(self) -> None:
        """Runs the copy and the kernel before there is traffic, on a row whose tokens are all
        allowed."""
        self._begin((0,))[:] = _ALL_TOKENS
        device = self._device.device
        self._mask(torch.zeros((1, self._vocab_size), dtype=torch.float32, device=device), 1)

    def _begin(self, rows: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Writes the rows' numbers. Returns [len(rows), words] on the host, to be written whole."""
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host.numpy()
        host[: len(rows)] = rows
        masks = host[self._start : self._start + len(rows) * self._words]
        return masks.reshape(len(rows), self._words)

    def _mask(self, logits: torch.Tensor, count: int) -> None:
        end = self._start + count * self._words
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        masks = self._device[self._start : end].view(count, self._words)
        mask_logits_(logits, masks, self._device[:count])
