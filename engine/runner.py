"""Owns the device: the base's weights, the KV tensors, the adapter pool; runs one step at a time.

Loads at its start, then `execute` turns a ScheduledBatch into Samples. One thread calls it, between
steps it inserts adapters; `read_adapter` alone is slow and may run in any thread. Decides nothing
about who runs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.inputs import ForwardInputs, build_inputs, num_prompt_logprobs
from engine.kv_cache import allocate_kv_cache, count_blocks
from engine.model import Model
from engine.model_config import ModelConfig, lora_sites, read_model_config
from engine.sampler import finite_rows, sample, token_logprobs
from engine.types import Sample, ScheduledBatch, TokenLogprobs
from engine.weights import load_weights
from lora.adapter import Adapter, read_adapter
from lora.pool import AdapterPool

logger = logging.getLogger(__name__)

_PROMPT_ROWS = 128  # logits of so many prompt rows at a time: 25 MB of a vocabulary of 49152


@dataclass(frozen=True, slots=True)
class FinishedStep:
    samples: tuple[Sample, ...]

    def collect(self) -> tuple[Sample, ...]:
        return self.samples


class ModelRunner:
    """Implements `types.Runner`."""

    runs_ahead = False

    def __init__(self, config: EngineConfig) -> None:
        started_s = time.perf_counter()
        # Not torch's own default: Ray tells it 1 in an actor that reserves no CPUs.
        torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
        _check_backend(config)
        self.device = _resolve_device(config)
        self.dtype = _resolve_dtype(config, self.device)
        folder = Path(config.model_path)
        self.model_config: ModelConfig = read_model_config(folder)
        self.max_model_len = _resolve_max_len(config, self.model_config)
        self._max_lora_rank = config.max_lora_rank
        self._sites = lora_sites(self.model_config)
        self._weights = load_weights(folder, self.model_config, self.dtype, self.device)
        self._model = Model(self.model_config, self._weights, self.max_model_len)
        self.adapters = AdapterPool(
            self._sites,
            config.adapter_pool_bytes,
            self.dtype,
            self.device,
            config.adapter_host_bytes,
        )
        self.num_blocks = count_blocks(
            self.model_config, config, self.max_model_len, self.dtype, self.device
        )
        self._kv = allocate_kv_cache(
            self.model_config, self.num_blocks, config.block_size, self.dtype, self.device
        )
        logger.info(
            "%s on %s in %s: %d KV blocks, %d adapter pages, %.1f s",
            self.model_config.architecture,
            self.device,
            self.dtype,
            self.num_blocks,
            self.adapters.num_pages,
            time.perf_counter() - started_s,
        )

    def launch(self, batch: ScheduledBatch) -> FinishedStep:
        return FinishedStep(self.execute(batch))

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> tuple[Sample, ...]:
        if not batch.sequences:
            return ()
        inputs = build_inputs(batch, self._kv.block_size, self.device, self.adapters)
        hidden = self._model.forward(inputs, self._kv, self.adapters)
        drawn = iter(self._sample(batch, inputs, hidden))
        prompts = iter(self._prompt_logprobs(batch, inputs, hidden))
        samples: list[Sample] = []
        for part in batch.sequences:
            answer = next(drawn) if part.samples else Sample(None)
            if num_prompt_logprobs(part):
                logprobs = next(prompts)
                # No token either: the same weights and KV gave both.
                answer = (
                    Sample(None, is_finite=False)
                    if logprobs is None
                    else Sample(answer.token_id, answer.logprobs, logprobs, answer.is_finite)
                )
            samples.append(answer)
        return tuple(samples)

    def read_adapter(self, digest: str, path: Path) -> Adapter:
        """Raises AdapterError. Touches neither pool nor device's adapters: any thread may call."""
        return read_adapter(path, digest, self._sites, self._max_lora_rank, self._weights.of_module)

    def insert_adapter(self, adapter: Adapter) -> tuple[str, ...]:
        """Between steps. Returns the digests dropped from the host tier to make room."""
        return self.adapters.add(adapter)

    def load_adapter(self, digest: str, path: Path) -> tuple[str, ...]:
        return self.insert_adapter(self.read_adapter(digest, path))

    def unload_adapter(self, digest: str) -> bool:
        """Between steps. False: still in use, it goes with the last reference."""
        return self.adapters.remove(digest)

    def _sample(
        self, batch: ScheduledBatch, inputs: ForwardInputs, hidden: torch.Tensor
    ) -> list[Sample]:
        parts = [part for part in batch.sequences if part.samples]
        if not parts:
            return []
        rows = inputs.logit_rows[: inputs.num_samples]
        logits = self._model.logits(hidden[: inputs.num_samples], rows, inputs.lora, self.adapters)
        return sample(logits, parts, self.model_config.eos_token_ids)

    def _prompt_logprobs(
        self, batch: ScheduledBatch, inputs: ForwardInputs, hidden: torch.Tensor
    ) -> list[tuple[TokenLogprobs, ...] | None]:
        """One entry for each sequence that asks; None where the logits are not finite."""
        results: list[tuple[TokenLogprobs, ...] | None] = []
        first = inputs.num_samples
        for part in batch.sequences:
            count = num_prompt_logprobs(part)
            if count == 0:
                continue
            tokens = part.sequence.token_ids[part.start + 1 : part.start + 1 + count]
            limit = part.sequence.request.params.prompt_logprobs or 0
            results.append(self._row_logprobs(inputs, hidden, first, tokens, limit))
            first += count
        return results

    def _row_logprobs(
        self,
        inputs: ForwardInputs,
        hidden: torch.Tensor,
        first: int,
        tokens: Sequence[int],
        limit: int,
    ) -> tuple[TokenLogprobs, ...] | None:
        found: list[TokenLogprobs] = []
        for begin in range(0, len(tokens), _PROMPT_ROWS):
            chunk = tokens[begin : begin + _PROMPT_ROWS]
            here = slice(first + begin, first + begin + len(chunk))
            logits = self._model.logits(
                hidden[here], inputs.logit_rows[here], inputs.lora, self.adapters
            )
            if not all(finite_rows(logits)):
                return None
            found += token_logprobs(logits, chunk, [limit] * len(chunk))
        return tuple(found)


def _check_backend(config: EngineConfig) -> None:
    if config.backend == "triton":
        raise UnsupportedModelError(
            "backend is triton: its kernels do not exist yet, use auto or reference"
        )
    logger.info("backend reference: the kernels are torch operations")


def _resolve_device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise UnsupportedModelError("device is cuda: torch finds no CUDA device")
    use_cuda = config.device == "cuda" or (config.device == "auto" and has_cuda)
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def _resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


def _resolve_max_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len is None:
        return model.max_len
    if not 0 < config.max_model_len <= model.max_len:
        raise UnsupportedModelError(
            f"max_model_len is {config.max_model_len}, the base was made for {model.max_len}"
        )
    return config.max_model_len
