"""The vocabulary of stored weights: the tensors that a scheme needs, and the error of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]
Parts = Mapping[str, torch.Tensor]  # by the name below the module, such as weight_scale
Reader = Callable[[str], torch.Tensor | None]  # of a part

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Part:
    shapes: tuple[Shape, ...]  # one of them; (): any
    dtypes: tuple[str, ...]  # as safetensors names them
    is_required: bool = True


class StoredError(ValueError):
    """A part of a weight that does not fit its scheme: its name below the module, the reason."""

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(part, reason)
        self.part = part
        self.reason = reason
