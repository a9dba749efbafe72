"""The engine's logits with an adapter against those of PEFT, in float32 on the CPU.

One model is in memory at a time: the engine's logits are kept, the base is dropped, and PEFT's are
compared as they come. Free of the registry and of text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.checks.effect_report import Parity
from engine.checks.probe import Probe, requests
from engine.checks.prompts import Prompts, complete_prompts, cut_prompts, prompt_limit
from engine.checks.validation import read_checked
from engine.errors import EngineMemoryError, ParityError
from engine.host_memory import available_bytes
from engine.model import Model
from engine.model_config import ModelConfig, lora_sites, read_model_config
from engine.parallel.shards import Shard
from engine.weight_files import stored_tensors
from engine.weights import WeightBuilder
from kernels.backend import reference_only
from lora.adapter import WEIGHTS_FILE, Adapter
from lora.page_image import PageLayout
from lora.pool import AdapterPool

MAX_DIFFERENCE = 1e-3
_DIGEST = "parity"
_FLOAT32 = 4  # bytes
_LIBRARIES = 512 * 1024**2  # for importing and loading, besides the weights
_GIB = 1024**3


def check_parity(folder: Path, base_folder: Path, num_prompts: int) -> None:
    """Makes the checks that are possible before a model is loaded. Raises ParityError if the base
    is quantized or transformers or PEFT cannot be imported, UnsupportedModelError if the base has
    no weights here, and EngineMemoryError if memory does not suffice for the base in float32, the
    adapter and the logits."""
    config = read_model_config(base_folder)
    if config.quantization is not None:
        # transformers computes by the scheme: it rounds activations, or needs kernels of a device.
        raise ParityError(
            f"the comparison with PEFT is of plain bases, this one is {config.quantization.words}: "
            "transformers computes it with other kernels and may round its activations, the "
            "engine serves it dequantized"
        )
    try:
        import engine.tools.peft_reference  # noqa: F401  (seconds, packages that serving lacks)
    except ImportError as error:
        raise ParityError(
            f"the comparison with PEFT needs transformers and peft ({error}): "
            "pip install 'loraplex[parity]'"
        ) from error
    num_parameters = sum(math.prod(one.shape) for one in stored_tensors(base_folder))
    # PEFT reads the file and copies it into modules; saved modules stand beside the base's own.
    adapter = 4 * (folder / WEIGHTS_FILE).stat().st_size if (folder / WEIGHTS_FILE).is_file() else 0
    rows = (num_prompts + 1) * prompt_limit(config)
    logits = (rows + prompt_limit(config)) * config.vocab_size * _FLOAT32
    needed = num_parameters * _FLOAT32 + adapter + logits + _LIBRARIES
    if (available := available_bytes()) < needed:
        raise EngineMemoryError(
            f"the comparison with PEFT needs {needed / _GIB:.1f} GiB of memory, "
            f"{available / _GIB:.1f} are available: {num_parameters / 1e9:.2f} billion parameters "
            f"in float32 {num_parameters * _FLOAT32 / _GIB:.1f}, adapter {adapter / _GIB:.1f}, "
            f"logits {logits / _GIB:.1f}, libraries {_LIBRARIES / _GIB:.1f}"
        )


def measure_parity(
    folder: Path,
    original: Path,
    base_folder: Path,
    prompts: Prompts,
    bound: float = MAX_DIFFERENCE,
) -> Parity:
    """Compares, after `check_parity`, the adapter of `folder`, which the engine reads, with that of
    `original`, which PEFT reads: they differ if the adapter was converted. Raises AdapterError and
    UnsupportedModelError as loading does, and ParityError if PEFT cannot read the folder."""
    from engine.tools.peft_reference import VERSIONS, peft_logits

    config = read_model_config(base_folder)
    adapter = read_checked(folder, _DIGEST, base_folder, config)
    whole = complete_prompts(cut_prompts(prompts, config), adapter, prompt_limit(config))
    with reference_only():
        ours = _engine_logits(config, base_folder, adapter, whole)
    largest, num_other = 0.0, 0
    try:
        theirs = peft_logits(base_folder, original, whole)
        lengths = [len(prompt) for prompt in whole]
        for own, other in zip(torch.split(ours, lengths), theirs, strict=True):
            largest = max(largest, _difference(own, other))
            num_other += int((own.argmax(dim=-1) != other.argmax(dim=-1)).sum())
    except (ValueError, KeyError, TypeError, RuntimeError, OSError, ImportError) as error:
        raise ParityError(
            f"transformers or PEFT cannot compute it ({VERSIONS}): {type(error).__name__}: {error}"
        ) from error
    return Parity(largest, num_other, len(ours), len(whole), bound, VERSIONS)


@torch.inference_mode()
def _engine_logits(
    config: ModelConfig, base_folder: Path, adapter: Adapter, prompts: Sequence[tuple[int, ...]]
) -> torch.Tensor:
    """Returns [rows of all prompts, V] float32."""
    sites, cpu = lora_sites(config), torch.device("cpu")
    size = PageLayout(sites, torch.float32).num_bytes(adapter)
    pool = AdapterPool(sites, size, torch.float32, cpu, 2 * size)
    pool.insert(pool.pack(adapter))
    while not pool.acquire(adapter.digest):
        pool.wait_pending()
    weights = WeightBuilder(Shard(config), torch.float32, cpu).load(base_folder)
    model = Model(config, weights, config.usual_len)
    run = Probe(model, pool).run(requests(prompts, adapter.digest, adapter.invocation))
    return torch.cat(list(run()))


def _difference(own: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the greatest difference of two sets of logits [rows, V]; infinity if a number of
    either is not finite. A head may have more columns than the base's vocabulary."""
    difference = float((own - other[:, : own.shape[1]]).abs().max())
    return difference if math.isfinite(difference) else math.inf
