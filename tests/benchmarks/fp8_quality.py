"""The change that FP8 linears, FP8 keys and values, and int8 adapters make to the demo's base and
its adapters.

Every target answers held-out prompts of its task, greedily and in the base's type; then the base in
its type and in fewer bits read prompt and answer, and their logits are compared at each token of
the answer: the mean KL divergence in nats, and the share of positions with the same first choice.

    python -m tests.benchmarks.fp8_quality [--prompts 20] [--tokens 48] [--device cpu]
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.checks.probe import Probe, compare_rows, requests
from engine.config import EngineConfig
from engine.factory import open_engine
from engine.model import Model
from engine.model_config import ModelConfig, lora_sites, read_model_config
from engine.parallel.shards import Shard
from engine.types import Request, SamplingParams
from engine.weights import WeightBuilder
from kernels.backend import reference_only
from kernels.e4m3 import E4M3
from lora.adapter import read_adapter
from lora.page_image import PageLayout
from lora.pool import AdapterPool
from serve_app.cli.demo.prepare import ADAPTER_NAMES, ADAPTERS_DIR, convert_base
from serve_app.config import default_home
from serve_app.text.base_text import BaseText
from tests.benchmarks.effect import Task, make_tasks, text_of
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.workload import make_jobs

SEED = 99
MAX_RANK = 64
TOGETHER = 5  # texts of a step
LARGEST_KL = 0.1  # nats: the mean of a target
Text = tuple[tuple[int, ...], tuple[int, ...]]  # prompt, answer


def prompts_of(
    base: BaseText, name: str | None, tasks: dict[str, Task], count: int
) -> list[tuple[int, ...]]:
    if name is None:
        jobs = make_jobs((None,), count, seed=SEED)
        chats = [base.render_chat([{"role": "user", "content": job.text}]) for job in jobs]
        return [tuple(base.encode(chat, add_special_tokens=False)) for chat in chats]
    text, task = text_of(base, ADAPTERS_DIR / name), tasks[name]
    chats = (
        [text.render_chat(chat.messages, tools=chat.tools) for chat in task.chats]
        if task.chats
        else [text.render_chat([{"role": "user", "content": one}]) for one in task.prompts]
    )
    return [tuple(text.encode(chat, add_special_tokens=False)) for chat in chats]


async def answered(
    args: argparse.Namespace, folder: Path, prompts: dict[str | None, list[tuple[int, ...]]]
) -> dict[str | None, list[Text]]:
    """Returns every prompt with the greedy answer of the base in its own type."""
    engine = open_engine(EngineConfig(str(folder), "fp8-quality", device=args.device))
    engine.start()
    for name in ADAPTER_NAMES:
        await engine.load_adapter(name, name, str(ADAPTERS_DIR / name))

    async def one(name: str | None, index: int, prompt: tuple[int, ...]) -> Text:
        params = SamplingParams(max_tokens=args.tokens, temperature=0.0)
        request = Request(f"{name}-{index}", prompt, params, name)
        ids = [i async for output in engine.generate(request) for i in output.token_ids]
        return prompt, tuple(ids)

    found = {
        name: await asyncio.gather(*(one(name, i, prompt) for i, prompt in enumerate(own)))
        for name, own in prompts.items()
    }
    engine.stop()
    return found


def make_pool(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, *, is_int8: bool = False
) -> AdapterPool:
    """Returns a pool with all adapters of the demo, each acquired."""
    sites = lora_sites(config)
    layout = PageLayout(sites, dtype, is_int8=is_int8)
    adapters = [read_adapter(ADAPTERS_DIR / name, name, sites, MAX_RANK) for name in ADAPTER_NAMES]
    size = sum(map(layout.num_bytes, adapters))
    pool = AdapterPool(sites, size, dtype, device, 2 * size, is_int8=is_int8)
    for adapter in adapters:
        pool.insert(pool.pack(adapter))
        while not pool.acquire(adapter.digest):
            pool.wait_pending()
    return pool


def compare(
    plain: Probe,
    other: Probe,
    name: str | None,
    texts: Sequence[Text],
    kv_dtype: torch.dtype | None = None,  # of the other; None: that of the activations
) -> dict[str, object]:
    """Returns the figures over all tokens of the answers, each predicted at the position before
    it."""
    kl, same = [], []
    for start in range(0, len(texts), TOGETHER):
        part = texts[start : start + TOGETHER]
        whole = [prompt + answer for prompt, answer in part]
        wanted = []
        for prompt, answer in part:
            wanted += [False] * (len(prompt) - 1) + [True] * len(answer) + [False]
        rows = torch.tensor(wanted).nonzero().flatten()
        before, after = (
            torch.cat([part.cpu() for part in probe.run(requests(whole, name), dtype)()])
            for probe, dtype in ((plain, None), (other, kv_dtype))
        )
        found = compare_rows(before[rows], after[rows])
        kl.append(found.kl)
        same.append(~found.argmax_changed)
    all_kl, all_same = torch.cat(kl), torch.cat(same)
    return {
        "positions": len(all_kl),
        "mean_kl": round(float(all_kl.mean()), 6),
        "p99_kl": round(float(all_kl.quantile(0.99)), 6),
        "top_1_same": round(float(all_same.double().mean()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20, help="for each target")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, at most")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    args = parser.parse_args()
    report = Report(args.out)
    folder = convert_base(default_home())
    config, text = read_model_config(folder), BaseText.from_folder(folder)
    tasks = make_tasks(args.prompts)
    targets: tuple[str | None, ...] = (None, *ADAPTER_NAMES)
    prompts = {name: prompts_of(text, name, tasks, args.prompts) for name in targets}
    device = torch.device(args.device)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    report.emit_machine("fp8_quality", prompts=args.prompts, dtype=str(dtype).split(".")[1])
    texts = asyncio.run(answered(args, folder, prompts))
    rows = []
    with reference_only():
        pool = make_pool(config, dtype, device)
        weights = (
            WeightBuilder(Shard(config), dtype, device, is_fp8=is_fp8).load(folder)
            for is_fp8 in (False, True)
        )
        models = [Model(config, one, config.usual_len) for one in weights]
        plain, fp8 = (Probe(one, pool) for one in models)
        int8 = Probe(models[0], make_pool(config, dtype, device, is_int8=True))
        kinds: list[tuple[str, Probe, torch.dtype | None]] = [
            ("linears in FP8", fp8, None),
            ("KV in FP8", plain, E4M3),
            ("adapter in int8", int8, None),
        ]
        for name in targets:
            for what, other, kv_dtype in kinds[: 2 if name is None else 3]:
                figures = compare(plain, other, name, texts[name], kv_dtype)
                report.emit(target=name or "base", change=what, **figures)
                rows.append((name or "base", what, *figures.values()))
    print_table(("target", "change", "positions", "mean KL", "p99 KL", "top-1"), rows)
    worst = max(float(str(row[3])) for row in rows)
    report.emit(benchmark="fp8_quality", largest_mean_kl=worst, **{"pass": worst < LARGEST_KL})


if __name__ == "__main__":
    main()
