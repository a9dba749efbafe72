"""Continuous batching over three adapters and the base, beside Hugging Face + PEFT.

Both sides in one run, taking turns, fp32, same threads, same prompts, same number of output tokens:
- theirs: `PeftModel.generate(adapter_names=[...])`, static batches of 16 in order of arrival, left
  padding; a batch ends with its longest request, and only the tokens that were asked for count;
- ours: the engine with at most 16 requests in flight, a new one as soon as one ends.

    python -m tests.benchmarks.cpu_demo [--requests 64] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from engine.config import EngineConfig
from engine.factory import open_engine
from engine.service import AsyncEngine
from engine.types import Request, SamplingParams
from serve_app.cli.demo.prepare import ADAPTERS_DIR, base_folder, prepare
from serve_app.config import default_home
from tests.benchmarks.report import emit, emit_machine, spread
from tests.benchmarks.workload import Job, make_jobs

CONCURRENCY = 16
ADAPTERS = ("pirate", "sql", "extract")  # those that answer plain text


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    first_token_s: list[float]
    gaps_s: list[float]


def encode(tokenizer: PreTrainedTokenizerBase, job: Job) -> list[int]:
    messages = [{"role": "user", "content": job.text}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def run_static(model: PeftModel, tokenizer: PreTrainedTokenizerBase, jobs: Sequence[Job]) -> float:
    """Seconds for all jobs in static batches of 16."""
    start = time.perf_counter()
    for first in range(0, len(jobs), CONCURRENCY):
        batch = jobs[first : first + CONCURRENCY]
        longest = max(job.num_output_tokens for job in batch)
        inputs = tokenizer.pad(
            {"input_ids": [encode(tokenizer, job) for job in batch]},
            padding=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            model.generate(
                **inputs,
                adapter_names=[job.target or "__base__" for job in batch],
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
            )
    return time.perf_counter() - start


async def run_continuous(
    engine: AsyncEngine, tokenizer: PreTrainedTokenizerBase, jobs: Sequence[Job], tag: str
) -> Timing:
    slots = asyncio.Semaphore(CONCURRENCY)
    first_token_s: list[float] = []
    gaps_s: list[float] = []

    async def one(index: int, job: Job) -> None:
        async with slots:
            params = SamplingParams(
                max_tokens=job.num_output_tokens, temperature=0.0, ignore_eos=True
            )
            request = Request(
                request_id=f"{tag}-{index}",
                prompt_token_ids=tuple(encode(tokenizer, job)),
                params=params,
                adapter=job.target,
                cache_salt=f"{tag}-{index}",  # no help from the prefix cache: theirs has none
            )
            last = start = time.perf_counter()
            received = 0
            async for output in engine.generate(request):
                now = time.perf_counter()
                if output.token_ids:
                    (gaps_s if received else first_token_s).append(now - last)
                    last = now
                received += len(output.token_ids)
            assert received == job.num_output_tokens, (received, job)
            assert last > start

    start = time.perf_counter()
    await asyncio.gather(*(one(i, job) for i, job in enumerate(jobs)))
    return Timing(time.perf_counter() - start, first_token_s, gaps_s)


def load_peft(base: Path) -> PeftModel:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    peft = PeftModel.from_pretrained(model, ADAPTERS_DIR / ADAPTERS[0], adapter_name=ADAPTERS[0])
    for name in ADAPTERS[1:]:
        peft.load_adapter(ADAPTERS_DIR / name, adapter_name=name)
    return peft.eval()


def measure_static(jobs: Sequence[Job], warm: Sequence[Job]) -> dict[str, object]:
    base = base_folder(default_home())
    tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
    model = load_peft(base)
    run_static(model, tokenizer, warm)
    return {"seconds": run_static(model, tokenizer, jobs)}


async def measure_continuous(jobs: Sequence[Job], warm: Sequence[Job]) -> dict[str, object]:
    base = base_folder(default_home())
    tokenizer = AutoTokenizer.from_pretrained(base)
    engine = open_engine(
        EngineConfig(model_path=str(base), base_digest="cpu-demo", device="cpu", dtype="float32")
    )
    engine.start()
    for name in ADAPTERS:
        await engine.load_adapter(name, name, str(ADAPTERS_DIR / name))
    await run_continuous(engine, tokenizer, warm, "warm")
    timing = await run_continuous(engine, tokenizer, jobs, "timed")
    engine.stop()
    return {
        "seconds": timing.seconds,
        "time_to_first_token_s": spread(timing.first_token_s),
        "inter_token_latency_s": spread(timing.gaps_s),
    }


def run_side(side: str, requests: int) -> dict[str, object]:
    """Runs a side in a process of its own: its threads do not disturb the other side."""
    command = [sys.executable, "-m", "tests.benchmarks.cpu_demo", "--side", side]
    done = subprocess.run(
        [*command, "--requests", str(requests)], check=True, stdout=subprocess.PIPE, text=True
    )
    figures: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=("static", "continuous"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    jobs = make_jobs((None, *ADAPTERS), arguments.requests)
    if arguments.side is not None:
        warm = make_jobs((None, *ADAPTERS), CONCURRENCY, mean=8, longest=8, seed=1)
        if arguments.side == "static":
            emit(**measure_static(jobs, warm))
        else:
            emit(**asyncio.run(measure_continuous(jobs, warm)))
        return
    emit_machine("cpu_demo")
    prepare(default_home())
    tokens = sum(job.num_output_tokens for job in jobs)
    rates: dict[str, list[float]] = {"static": [], "continuous": []}
    for number in range(arguments.rounds):
        for side, measured in rates.items():
            figures = run_side(side, arguments.requests)
            seconds = figures["seconds"]
            assert isinstance(seconds, float)
            measured.append(tokens / seconds)
            emit(
                round=number,
                side=side,
                requests=arguments.requests,
                output_tokens=tokens,
                tokens_per_s=round(tokens / seconds, 1),
                **figures,
            )
    theirs, ours = (statistics.median(rates[side]) for side in ("static", "continuous"))
    emit(
        benchmark="cpu_demo",
        hf_peft_tokens_per_s=round(theirs, 1),
        loraplex_tokens_per_s=round(ours, 1),
        ratio=round(ours / theirs, 2),
        target=2.0,
        **{"pass": ours / theirs >= 2.0},
    )


if __name__ == "__main__":
    main()
