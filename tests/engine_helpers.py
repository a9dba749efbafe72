"""Batches for a runner without a scheduler, and tiny random bases in Hugging Face's own format."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine import mixed_graphs
from engine.config import EngineConfig
from engine.device_step import DeviceSteps
from engine.kv_layout import KVLayout
from engine.mixed_graphs import MixedGraphs
from engine.runner import ModelRunner
from engine.types import (
    Request,
    Sample,
    SamplingParams,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
)

VOCAB = 131
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
_CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_base(folder: Path, family: str = "llama", **changes: object) -> Path:
    """Saved with weights large enough that greedy choices are far apart."""
    config_class, model_class = _CLASSES[family]
    values: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,  # the least that a tensor core takes
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "initializer_range": 0.15,
    } | changes
    torch.manual_seed(len(str(sorted(changes))) + len(family))
    model: PreTrainedModel = model_class(config_class(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                parameter.normal_(mean=1.0, std=0.2)
    model.save_pretrained(folder)
    return folder


def make_small_base(folder: Path, family: str = "llama", **changes: object) -> Path:
    """A base of one layer and two heads that share keys, which the interpreter runs fast."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_base(folder, family, **(sizes | changes))


def make_named_adapters(base: Path, specs: Mapping[str, tuple[int, Many[str]]]) -> dict[str, Path]:
    """Makes adapters beside the base, each of its rank and targets. Returns them by name."""
    return {
        name: make_adapter(base.parent / name, base, rank, targets, seed=i)
        for i, (name, (rank, targets)) in enumerate(specs.items())
    }


def make_adapter(
    folder: Path,
    base: Path,
    rank: int,
    targets: Many[str],
    seed: int = 0,
    keeps_base_copy: bool = False,
) -> Path:
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(targets), init_lora_weights=False
    )
    model = get_peft_model(load_hf(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.08)
    model.save_pretrained(str(folder), save_embedding_layers=keeps_base_copy)
    return folder


def load_hf(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model  # in eval mode already


def make_runner(folder: Path, device: str = "cpu", **changes: object) -> ModelRunner:
    values: dict[str, object] = {
        "model_path": str(folder),
        "base_digest": "base",
        "device": device,
        "dtype": "float32",
        "block_size": BLOCK_SIZE if device == "cpu" else 16,  # a kernel's least
        "num_blocks": 128,
        "adapter_pool_bytes": 16 * 1024 * 1024,
        "adapter_host_bytes": 64 * 1024 * 1024,
    }
    return ModelRunner(EngineConfig(**(values | changes)))  # type: ignore[arg-type]


def open_small(
    base: Path, adapters: Mapping[str, Path], backend: str, dtype: str = "float32"
) -> ModelRunner:
    """Returns a runner for few sequences, in blocks that kernels take, with the adapters loaded."""
    runner = make_runner(base, backend=backend, dtype=dtype, block_size=16, max_num_seqs=8)
    for name, path in adapters.items():
        runner.load_adapter(name, path)
    return runner


def acquire(runner: ModelRunner, adapter: str) -> None:
    while not runner.adapters.acquire(adapter):
        assert runner.adapters.has_pending_copies()
        runner.adapters.wait_pending()


def make_sequence(
    prompt: Many[int],
    first_block: int = 0,
    params: SamplingParams = GREEDY,
    adapter: str | None = None,
    choice: int = 0,
    seed: int = 0,
    num_blocks: int = 24,
    layout: KVLayout | None = None,
) -> Sequence:
    """`layout`: of a model with windows in some of its layers; their blocks follow the others."""
    request = Request(f"r{first_block}", tuple(prompt), params, adapter)
    # Descending: a block table is not a range.
    table = list(range(first_block + num_blocks - 1, first_block - 1, -1))
    sequence = Sequence(request, choice, seed, list(prompt), block_table=table)
    if layout is not None and len(layout.groups) == 2:
        half = num_blocks // 2
        sequence.block_table = layout.entries(0, table[half:])
        sequence.window_table = layout.entries(1, table[:half])
    return sequence


def part(sequence: Sequence, length: int | None = None) -> ScheduledSequence:
    """The next `length` tokens of what is not computed yet, all by default."""
    start = sequence.num_computed_tokens
    end = len(sequence.token_ids) if length is None else start + length
    return ScheduledSequence(sequence, start, end, end == len(sequence.token_ids))


def step(runner: ModelRunner, *parts: ScheduledSequence) -> tuple[Sample, ...]:
    """Runs the parts and commits what they gave, as a scheduler would."""
    samples = runner.execute(ScheduledBatch(parts))
    for scheduled, answer in zip(parts, samples, strict=True):
        scheduled.sequence.num_computed_tokens = scheduled.end
        if answer.token_id is not None:
            scheduled.sequence.token_ids.append(answer.token_id)
    return samples


def decode_beside(
    runner: ModelRunner, owners: Many[str | None], params: SamplingParams
) -> tuple[Sample, ...]:
    """Returns the samples of one decode after the prompts, which are the same for any owners."""
    sequences = [
        make_sequence(random_prompt(4, seed=i), 24 * i, params, owner)
        for i, owner in enumerate(owners)
    ]
    for sequence in sequences:
        step(runner, part(sequence))
    return step(runner, *(part(sequence) for sequence in sequences))


@dataclass(slots=True)
class Job:
    """A sequence that joins at `starts_at` and whose prompt comes in chunks."""

    sequence: Sequence
    starts_at: int = 0
    chunk: int = 1000
    samples: list[Sample] = field(default_factory=list)


def run_mixed(runner: ModelRunner, jobs: Many[Job], num_tokens: int) -> list[list[int]]:
    """Steps until each job has its output: prefill chunks and decodes share steps."""
    tick = 0
    while any(job.sequence.num_output_tokens < num_tokens for job in jobs):
        due = [
            job
            for job in jobs
            if tick >= job.starts_at and job.sequence.num_output_tokens < num_tokens
        ]
        parts = []
        for job in due:
            left = len(job.sequence.token_ids) - job.sequence.num_computed_tokens
            parts.append(part(job.sequence, min(job.chunk, left)))
        for job, answer in zip(due, step(runner, *parts), strict=True):
            job.samples.append(answer)
        tick += 1
    return [job.sequence.token_ids[job.sequence.num_prompt_tokens :] for job in jobs]


def hf_greedy(model: torch.nn.Module, prompt: Many[int], num_tokens: int) -> list[int]:
    """Generates without a cache: the plainest oracle there is."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            ids.append(int(hf_logits(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def hf_logits(model: torch.nn.Module, ids: Many[int]) -> torch.Tensor:
    """[len(ids), V] float32"""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits.float()


def random_prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def make_mixed_graphs(runner: ModelRunner, *sizes: int) -> MixedGraphs:
    """Makes the graphs of steps of so many tokens without CUDA: a graph's work is called again
    instead of replayed."""
    assert isinstance(runner._steps, DeviceSteps)
    graphs = runner._steps._mixed_graphs
    graphs._sizes = sizes

    def called(run, cuts, memory):  # type: ignore[no-untyped-def]
        """Calls the whole step in place of the first graph; it waits for parts of a load itself."""
        whole = SimpleNamespace(replay=lambda: run(None))
        return (whole, *[SimpleNamespace(replay=lambda: None) for _ in cuts]), None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mixed_graphs, "capture_graphs", called)
        for key in graphs.keys:
            graphs.capture(key, None)
    return graphs
