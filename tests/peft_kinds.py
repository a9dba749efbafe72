"""Adapters of PEFT's kinds on tiny bases: trained enough that each kind's own numbers matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, get_peft_model

from engine.runner import ModelRunner
from engine.types import SamplingParams
from tests.engine_helpers import (
    Job,
    acquire,
    hf_greedy,
    hf_logits,
    load_hf,
    make_sequence,
    part,
    random_prompt,
    run_mixed,
    step,
)

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NUM_LOGPROBS = 20
_LORA, _BASE = random_prompt(17, seed=21), random_prompt(11, seed=22)

Change = Callable[[str, torch.nn.Parameter], None]


def save_peft(
    folder: Path,
    base: Path,
    config: PeftConfig,
    seed: int = 0,
    std: float = 0.08,
    copies: bool = False,
) -> Path:
    """Saves an adapter whose trainable numbers are random, each close to where it begins. `copies`:
    with the head and the embedding, whether or not they were trained."""
    torch.manual_seed(seed)
    model = get_peft_model(load_hf(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "trainable_tokens" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(std=std)
    model.save_pretrained(str(folder), save_embedding_layers=copies or "auto")
    return folder


@dataclass(frozen=True, slots=True)
class Mixed:
    """The answers of steps that an adapter shares with plain LoRA and the base."""

    tokens: list[int]
    lora_tokens: list[int]
    base_tokens: list[int]
    logprobs: torch.Tensor  # of every token of the prompt but the first, under the adapter


def run_beside_others(runner: ModelRunner, prompt: list[int], num_tokens: int = 10) -> Mixed:
    """Runs the prompt in steps with others. The runner holds the adapters "kind" and "lora"."""
    owners = ("kind", "lora", None, "kind")
    prompts = (prompt, _LORA, _BASE, prompt[: len(prompt) // 2])
    for adapter in ("kind", "lora"):
        acquire(runner, adapter)
    jobs = [
        Job(make_sequence(tokens, first_block=24 * i, adapter=owner), starts_at=i, chunk=5 + 6 * i)
        for i, (owner, tokens) in enumerate(zip(owners, prompts, strict=True))
    ]
    outputs = run_mixed(runner, jobs, num_tokens)
    params = SamplingParams(temperature=0.0, logprobs=_NUM_LOGPROBS, prompt_logprobs=1)
    parts = [
        part(make_sequence(tokens, first_block=24 * i, adapter=owner, params=params))
        for i, (owner, tokens) in enumerate(zip(owners[:3], prompts[:3], strict=True))
    ]
    answer = step(runner, *parts)[0]
    for adapter in ("kind", "lora"):
        runner.adapters.release(adapter)
    found = torch.tensor([entry.logprob for entry in answer.prompt_logprobs])
    return Mixed(outputs[0], outputs[1], outputs[2], found)


def check_against_peft(
    runner: ModelRunner, base: Path, kind: Path, lora: Path, converted: Path | None = None
) -> None:
    """Loads both adapters, and compares tokens and log-probabilities with PEFT's in float32.
    `converted`: the folder for the engine, if it is not the one for PEFT."""
    runner.load_adapter("kind", converted or kind)
    runner.load_adapter("lora", lora)
    prompt = random_prompt(26, seed=5)
    found = run_beside_others(runner, prompt)
    plain = load_hf(base)
    assert found.base_tokens == hf_greedy(plain, _BASE, 10)
    adapted = PeftModel.from_pretrained(load_hf(base), str(kind)).eval()
    before = hf_logits(plain, prompt)
    after = hf_logits(adapted, prompt)
    assert float((after - before).abs().max()) > 0.1  # the adapter does something
    expected = after.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, expected, atol=1e-4, rtol=0)
    assert found.tokens == hf_greedy(adapted, prompt, 10)
    other = PeftModel.from_pretrained(load_hf(base), str(lora)).eval()
    assert found.lora_tokens == hf_greedy(other, _LORA, 10)


def base_logprobs_beside(runner: ModelRunner, adapter: str | None) -> list[float]:
    """Returns log-probabilities of a row of the base in a step with a row of the adapter."""
    params = SamplingParams(temperature=0.0, logprobs=_NUM_LOGPROBS)
    beside = make_sequence(_LORA, first_block=24, adapter=adapter)
    if adapter is not None:
        acquire(runner, adapter)
    answer = step(runner, part(make_sequence(_BASE, params=params)), part(beside))[0]
    if adapter is not None:
        runner.adapters.release(adapter)
    assert answer.logprobs is not None
    return [value for _, value in answer.logprobs.top]
