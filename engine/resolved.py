"""The values that a configuration leaves open, from the machine and the base: backend, device,
types, FP8 and length."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.devices import lacking_capability
from engine.errors import UnsupportedModelError
from engine.kv_layout import KVLayout, kv_layout
from engine.model_config import ModelConfig
from engine.parallel.shards import MAX_RANKS, Shard
from engine.weight_shapes import check_fp8
from kernels.backend import HAS_TRITON, IS_INTERPRETED, Capability, allow_triton
from kernels.e4m3 import E4M3, FIRST_CAPABILITY

logger = logging.getLogger(__name__)


def resolve_backend(config: EngineConfig, device: torch.device) -> bool:
    """Returns True for Triton. `auto` selects it if there is a CUDA device."""
    wants = config.backend == "triton" or (config.backend == "auto" and device.type == "cuda")
    if wants and not HAS_TRITON:
        raise UnsupportedModelError(
            f"backend is {config.backend}, and triton is not installed: pip install 'loraplex[gpu]'"
        )
    if wants and device.type != "cuda" and not IS_INTERPRETED:
        raise UnsupportedModelError("backend is triton: it needs a CUDA device, use reference")
    allow_triton(wants)
    logger.info("backend %s", "triton" if wants else "reference: the kernels are torch operations")
    return wants


def resolve_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Returns the device of a rank: of several ranks the one of its number. Raises
    UnsupportedModelError."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise UnsupportedModelError("device is cuda: torch finds no CUDA device")
    use_cuda = config.device == "cuda" or (config.device == "auto" and has_cuda)
    if not use_cuda:
        return torch.device("cpu")
    size = config.tensor_parallel_size
    if size == 1:
        return torch.device("cuda", torch.cuda.current_device())
    if (count := torch.cuda.device_count()) < size:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}: each rank needs a CUDA device of its own, and torch "
            f"finds {count}"
        )
    return torch.device("cuda", rank)


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_fp8(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, capability: Capability | None
) -> bool:
    """Returns True if the layers' linears are to be in FP8. `model`: a rank's part of the base.
    `capability`: of the CUDA device whose kernels multiply them, None for the references. Raises
    UnsupportedModelError."""
    if config.quantization != "fp8":
        return False
    check_fp8(model, config.tensor_parallel_size)
    if capability is None:
        return True
    if lacking := lacking_capability(capability, FIRST_CAPABILITY):
        raise UnsupportedModelError(f"quantization is fp8: {lacking}")
    if dtype != torch.bfloat16:
        raise UnsupportedModelError(
            f"quantization is fp8: it needs dtype bfloat16, which is {config.dtype}"
        )
    return True


def resolve_kv_dtype(
    config: EngineConfig, dtype: torch.dtype, capability: Capability | None
) -> torch.dtype:
    """Returns the type of keys and values in the cache. `capability`: of the CUDA device whose
    kernels read them, None for the references. Raises UnsupportedModelError."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if capability is not None and (lacking := lacking_capability(capability, FIRST_CAPABILITY)):
        raise UnsupportedModelError(f"kv_cache_dtype is {config.kv_cache_dtype}: {lacking}")
    return E4M3


def resolve_shard(config: EngineConfig, model: ModelConfig, rank: int = 0) -> Shard:
    """Returns a rank's part of the base. Raises UnsupportedModelError."""
    size = config.tensor_parallel_size
    if not 1 <= size <= MAX_RANKS:
        raise UnsupportedModelError(
            f"tensor_parallel_size is {size}, but must be between 1 and {MAX_RANKS}"
        )
    return Shard(model, rank, size)


def resolve_max_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        if model.usual_len < model.max_len:
            logger.info(
                "max_model_len is %d: the base was made for %d with other frequencies, which are "
                "used for all sequences if max_model_len is larger",
                model.usual_len,
                model.max_len,
            )
        return model.usual_len
    if not 0 < config.max_model_len <= model.max_len:
        raise UnsupportedModelError(
            f"max_model_len is {config.max_model_len}, the base was made for {model.max_len}"
        )
    return config.max_model_len


def resolve_layout(model: ModelConfig, config: EngineConfig, max_model_len: int) -> KVLayout:
    """Returns the layout of the configuration: with a host tier, blocks are copied whole."""
    has_host = config.kv_host_bytes > 0
    windows = model.sliding_windows
    return kv_layout(windows, config.block_size, max_model_len, is_contiguous=has_host)
