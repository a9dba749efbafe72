"""AWQ bases made of plain ones, as AutoAWQ makes them: scales move, then come 4 bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from engine.model_config import read_model_config
from engine.weight_files import SINGLE_FILE
from tests.quantized_bases import Tensors, set_quantization
from tests.test_engine_gptq_awq import AWQ, Integers, awq_parts

GROUP = 16


def make_awq_base(base: Path, out: Path, clip: float = 1.0) -> tuple[Path, Tensors]:
    """Writes the AWQ base of a plain one to `out`. Returns it, and the tensors of a plain base that
    computes the same: the quantized weights with the scales taken out again. `clip`: of the
    numbers of every group but the first two of a row."""
    config = read_model_config(base)
    shutil.copytree(base, out)
    tensors = {name: one.half() for name, one in load_file(base / SINGLE_FILE).items()}
    plain = {name: one.float() for name, one in tensors.items()}
    stored = dict(tensors)
    generator = torch.Generator().manual_seed(11)

    def draw(size: int) -> torch.Tensor:
        return torch.empty(size).uniform_(0.4, 2.5, generator=generator)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        of_v, of_up = draw(config.kv_size), draw(config.intermediate_size)
        heads = of_v.view(config.num_kv_heads, -1)
        of_o = heads.repeat_interleave(config.num_heads // config.num_kv_heads, 0).flatten()
        ones = torch.ones(1)
        for norm, names, size in (
            ("input_layernorm", ("q_proj", "k_proj", "v_proj"), config.hidden_size),
            ("post_attention_layernorm", ("gate_proj", "up_proj"), config.hidden_size),
        ):
            name = f"{layer}.{norm}.weight"
            stored[name] = (tensors[name].float() / draw(size)).half()
            entering = plain[name] / stored[name].float()
            parent = attention if norm == "input_layernorm" else mlp
            for part in names:
                leaving = of_v if part == "v_proj" else of_up if part == "up_proj" else ones
                _quantize(f"{parent}.{part}", stored, plain, entering, leaving, clip)
        _quantize(f"{attention}.o_proj", stored, plain, of_o, ones, clip)
        _quantize(f"{mlp}.down_proj", stored, plain, of_up, ones, clip)
    contiguous = {name: one.contiguous() for name, one in stored.items()}
    save_file(contiguous, out / SINGLE_FILE, metadata={"format": "pt"})
    set_quantization(out, AWQ)
    return out, plain


def _quantize(
    module: str,
    stored: Tensors,
    plain: Tensors,
    entering: torch.Tensor,  # [in]
    leaving: torch.Tensor,  # [out]
    clip: float,
) -> None:
    """AutoAWQ's pseudo_quantize_tensor of the scaled weight, in float16."""
    name = f"{module}.weight"
    weight = (stored.pop(name).float() * entering / leaving[:, None]).half().float()
    groups = weight.unflatten(1, (-1, GROUP))
    limits = groups.abs().amax(2, keepdim=True) * clip
    clipped = groups.clamp(-limits, limits)
    clipped[:, :2] = clipped[:, :2] if clip < 0.6 else groups[:, :2]
    low, high = clipped.amin(2), clipped.amax(2)
    scale = ((high - low).clamp(min=1e-5) / 15).half()
    zero = (-(low / scale.float()).round()).clamp(0, 15).int()
    group = torch.arange(weight.shape[1]) // GROUP
    numbers = (clipped.flatten(1) / scale[:, group].float()).round() + zero[:, group]
    made = Integers(numbers.clamp(0, 15).int(), zero, scale, group)
    stored |= {f"{module}.{part}": one for part, one in awq_parts(made).items()}
    exact = (made.q - zero[:, group]) * scale[:, group].float()
    plain[name] = exact * leaving[:, None] / entering
