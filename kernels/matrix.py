"""The forms of a layer's matrix: in the type of the activations, in FP8, or in 4 bits."""

from __future__ import annotations

import torch

from kernels.e4m3 import E4m3Rows
from kernels.int4 import Int4Rows

Matrix = torch.Tensor | E4m3Rows | Int4Rows  # [N, K]
