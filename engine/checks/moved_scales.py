"""Folds an adapter that was trained on an unquantized base into one for the AWQ base made of it.

AWQ divides the channels that enter a linear layer by scales, in the norm or in the rows of the
layer before, and multiplies the layer's columns by them. The base computes the same, but x has
become x / s where A reads it, and where B writes to v and up the rows are divided, too:

    A' = A diag(s_in)    B' = diag(1 / s_out) B

s of a layer behind a norm is the quotient of the two norms, exact whatever AWQ rounded. s of o and
down is that of the rows of v and up: the stored scale of an unclipped group is its range over 15,
so that two groups of a row that agree give its scale to the rounding of float16; the least squares
of the row's numbers must agree. Rows without such groups are refused. Source: AutoAWQ 0.2,
quantize.scale and quantize.quantizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint import Checkpoint
from engine.errors import UnsupportedModelError
from engine.model_config import lora_sites, read_model_config
from engine.quantization import Awq
from engine.weight_shapes import expected_shapes
from lora.adapter import open_weights, write_adapter
from lora.adapter_keys import is_unread, parse_key
from lora.errors import AdapterError
from lora.peft_config import read_fields, read_peft_config
from lora.sites import targets_by_module

FOLDED_FOR = "loraplex_folded_for"  # in adapter_config.json: the digest of the AWQ base
_LEVELS = 15  # steps of a group of 4 bits
_AGREEMENT = 2**-8  # of estimates from numbers of float16
_MAX_DIFFERENCE = 0.3  # of quantized weights, relative; 4 bits differ by some 0.1
_EXACTLY_ONE = 2**-7


@dataclass(frozen=True, slots=True)
class FoldReport:
    largest_scale: float
    smallest_scale: float

    @property
    def words(self) -> str:
        low, high = self.smallest_scale, self.largest_scale
        return f"LoRA folded for AWQ, scales of {low:.3g} to {high:.3g}"


class MovedScales:
    """The scales that AWQ moved between the layers of two checkpoints of one model."""

    def __init__(self, base_folder: Path, unquantized: Path) -> None:
        """Raises UnsupportedModelError if they are not an AWQ base and its unquantized base."""
        self._config = read_model_config(base_folder)
        plain_config = read_model_config(unquantized)
        if plain_config.quantization is not None:
            raise UnsupportedModelError(
                f"{unquantized} is quantized: {plain_config.quantization.words}"
            )
        family = self._config.family
        if expected_shapes(self._config) != expected_shapes(plain_config):
            raise UnsupportedModelError(f"{unquantized} has other shapes than the base")
        if family.norm_offset or family.has_fused_projections or "input_norm" not in family.norms:
            raise UnsupportedModelError(
                f"AWQ of {self._config.architecture} cannot be folded: its norms or projections "
                "differ from Llama's"
            )
        self._awq = Checkpoint(base_folder, self._config)
        self._plain = Checkpoint(unquantized, plain_config)
        self._found: dict[str, torch.Tensor] = {}

    def of_inputs(self, module: str) -> torch.Tensor:
        """Returns the divisors of the stored input of a module, float32 [in]."""
        layer, _, name = module.rpartition(".")
        layer = layer.rpartition(".")[0]  # without self_attn or mlp
        norms = self._config.family.norms
        match name:
            case "q_proj" | "k_proj" | "v_proj":
                return self._of_norm(f"{layer}.{norms['input_norm']}.weight")
            case "gate_proj" | "up_proj":
                return self._of_norm(f"{layer}.{norms['mlp_norm']}.weight")
            case "o_proj":
                return self._of_heads(self.of_outputs(f"{layer}.self_attn.v_proj"))
            case "down_proj":
                return self.of_outputs(f"{layer}.mlp.up_proj")
            case "lm_head":
                scales = self._of_norm("model.norm.weight")
                if float((scales - 1).abs().max()) > _EXACTLY_ONE:
                    raise UnsupportedModelError("model.norm.weight differs between the bases")
                return torch.ones_like(scales)
        raise UnsupportedModelError(f"an adapter on {module} cannot be folded")

    def of_outputs(self, module: str) -> torch.Tensor:
        """Returns the divisors of a module's rows, float32 [out]."""
        if module not in self._found:
            is_scaled = module.endswith((".v_proj", ".up_proj"))
            scales = self._of_rows(module) if is_scaled else torch.ones(1)
            self._check(module, scales)
            self._found[module] = scales
        return self._found[module]

    def _of_norm(self, name: str) -> torch.Tensor:
        plain, awq = self._read(self._plain, name), self._read(self._awq, name)
        scales = plain / awq
        # A channel that is zero in both passes nothing on.
        scales = torch.where((plain == 0) & (awq == 0), torch.ones_like(scales), scales)
        if not bool((scales.isfinite() & (scales > 0)).all()):
            raise UnsupportedModelError(f"{name} differs in sign between the bases")
        return scales

    def _of_rows(self, module: str) -> torch.Tensor:
        scheme = self._config.scheme_of(module)
        steps = self._awq.part(module, "scales")
        if steps is None or not isinstance(scheme, Awq):
            raise UnsupportedModelError(f"{module} of the base is not quantized by AWQ")
        plain = self._read(self._plain, f"{module}.weight") * self.of_inputs(module)
        groups = plain.view(len(plain), -1, scheme.group_size)
        ranges = groups.amax(2) - groups.amin(2)
        # [out, groups], the least first
        estimates = torch.sort(ranges / (_LEVELS * steps.T.float()), dim=1)[0]
        if estimates.shape[1] < 2:
            raise UnsupportedModelError(f"{module} has one group a row, which nothing confirms")
        scales = estimates[:, :2].mean(1)
        stored = self._read(self._awq, f"{module}.weight").view_as(groups)
        slope, error = _least_squares(groups, stored)
        is_known = estimates[:, 1] / estimates[:, 0] - 1 < _AGREEMENT
        is_known &= (scales * slope - 1).abs() < 4 * error * scales + _AGREEMENT
        if not bool(is_known.all()):
            count = int((~is_known).sum())
            raise UnsupportedModelError(
                f"the scales of {count} of {len(scales)} rows of {module} cannot be recovered: "
                "their groups are clipped; adapters on q, k and gate alone need none of these"
            )
        if float((scales - 1).abs().max()) < _EXACTLY_ONE:
            return torch.ones_like(scales)  # not scaled, as v before heads that share keys
        return scales

    def _of_heads(self, scales: torch.Tensor) -> torch.Tensor:
        """Returns the scales of v's rows for the columns of o, whose heads share those of v."""
        shared = self._config.num_heads // self._config.num_kv_heads
        by_head = scales.view(self._config.num_kv_heads, self._config.head_dim)
        return by_head.repeat_interleave(shared, dim=0).flatten()

    def _check(self, module: str, row_scales: torch.Tensor) -> None:
        """Refuses weights that are not those of the unquantized base, scaled."""
        name = f"{module}.weight"
        plain = self._read(self._plain, name) * self.of_inputs(module) / row_scales[:, None]
        difference = float((self._read(self._awq, name) - plain).norm() / plain.norm())
        if not difference <= _MAX_DIFFERENCE:
            raise UnsupportedModelError(
                f"{name} differs by {difference:.2f} from that of the unquantized base, scaled: "
                "the base was made of another one"
            )

    def _read(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        tensor = checkpoint.read(name)
        assert tensor is not None
        return tensor.float()


def fold_adapter(
    folder: Path, base_folder: Path, base_digest: str, unquantized: Path, out: Path
) -> FoldReport:
    """Writes the adapter of `folder`, trained on the base in `unquantized`, to the empty folder
    `out`, for the AWQ base in `base_folder` alone. Raises UnsupportedModelError or AdapterError
    with the reason if the scales are not recovered exactly."""
    config = read_peft_config(folder)
    for name in ("use_dora", "lora_bias", "trains_biases", "token_indices"):
        if getattr(config, name):
            raise AdapterError(f"an adapter with {name} cannot be folded: plain LoRA only")
    moved = MovedScales(base_folder, unquantized)
    targets = targets_by_module(lora_sites(read_model_config(base_folder)))
    tensors: dict[str, torch.Tensor] = {}
    seen: dict[str, tuple[float, float]] = {}
    with open_weights(folder) as file:
        for key in file.entries:
            tensor = file.read(key)
            if is_unread(key):
                tensors[key] = tensor
                continue
            module, half = parse_key(key, targets)
            if targets[module].site.kind == "embedding":
                tensors[key] = tensor  # AWQ leaves it alone
            elif half == "A":
                scales = moved.of_inputs(module)
                tensors[key] = _times(tensor, scales, key)
                seen[module] = (float(scales.min()), float(scales.max()))
            else:
                scales = moved.of_outputs(module) if module != "lm_head" else torch.ones(1)
                tensors[key] = _times(tensor, 1 / scales[:, None], key)
    write_adapter(folder, out, read_fields(folder) | {FOLDED_FOR: base_digest}, tensors)
    lows, highs = zip(*seen.values(), strict=True) if seen else ((1.0,), (1.0,))
    return FoldReport(max(highs), min(lows))


def _times(tensor: torch.Tensor, scales: torch.Tensor, key: str) -> torch.Tensor:
    """Returns the product in float32: A and B are rounded once, when they are served."""
    try:
        return (tensor.float() * scales).contiguous()
    except RuntimeError:
        shape, wanted = list(tensor.shape), list(scales.shape)
        raise AdapterError(f"{key} has shape {shape}, the scales are {wanted}") from None


def _least_squares(plain: torch.Tensor, stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns for each row of [rows, groups, size] the factor from `plain` to `stored`, and its
    standard error. Numbers near the ends of their group are left out: AWQ may clip them."""
    ends = plain.abs().amax(2, keepdim=True)
    inner = torch.where(plain.abs() <= ends / 2, plain, torch.zeros_like(plain)).flatten(1)
    squares = inner.square().sum(1)
    slope = (inner * stored.flatten(1)).sum(1) / squares
    rest = torch.where(inner != 0, stored.flatten(1) - slope[:, None] * inner, 0.0)
    count = (inner != 0).sum(1).clamp(min=2)
    return slope, (rest.square().sum(1) / (count - 1) / squares).sqrt()
