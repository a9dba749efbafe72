"""Adapters from files to the first token: on an idle engine, several at once, then next to streams
of the base.

One engine without a server; weights of the base and of the adapters are random, the files are in
the page cache. `load` is the whole of `load_adapter`, `read` and `pack` are its parts; a first
token includes the load; a file of the form of an earlier one is neither read nor packed in full,
and has none of the two parts. The gaps of the streams are those between two steps.

    python -m tests.benchmarks.cold_adapters [--out FILE] [--shape llama-3-8b] [--device cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.factory import open_engine
from engine.model_config import lora_sites, read_model_config
from engine.service import AsyncEngine
from engine.types import Request, SamplingParams, StepOutput
from lora import file_packer
from lora.page_image import PageLayout
from lora.pool import AdapterPool
from tests.benchmarks.memory_adapters import pool_bytes
from tests.benchmarks.report import Report, percentile
from tests.benchmarks.shapes import SHAPES, ModelShape

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_PAUSE_S = 0.4  # between two loads next to streams
_QUIET_S = 2.5  # of streams without loads


def write_adapter(folder: Path, shape: ModelShape, rank: int, dtype: torch.dtype) -> None:
    """All linears; the scale is 2."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(rank)
    tensors = {}
    for layer in range(shape.num_layers):
        for module, (columns, rows) in shape.linears.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            for side, size in (("A", (rank, columns)), ("B", (rows, rank))):
                drawn = torch.randn(size, generator=generator) * 0.01
                tensors[f"{prefix}.lora_{side}.weight"] = drawn.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(shape.adapter_config(rank, 2 * rank)))


class Phases:
    """Durations in ms of functions of the reader, which are replaced by ones that are timed."""

    def __init__(self) -> None:
        self.newest: dict[str, float] = defaultdict(float)
        file_packer.read_adapter = self._timed("read", file_packer.read_adapter)  # type: ignore
        AdapterPool.pack = self._timed("pack", AdapterPool.pack)  # type: ignore

    def _timed(self, name: str, work: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **named: object) -> object:
            began_s = time.perf_counter()
            try:
                return work(*arguments, **named)
            finally:
                self.newest[name] += 1000 * (time.perf_counter() - began_s)

        return run

    def take(self) -> dict[str, float]:
        found = {name: round(ms, 1) for name, ms in self.newest.items()}
        self.newest.clear()
        return found


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.shape = SHAPES[args.shape]
        self.args, self.folder = args, folder
        self.phases = Phases()
        self.steps: list[tuple[float, tuple[str, ...]]] = []  # end of each step, its requests
        model = read_model_config(self.shape.write_config(folder / "base"))
        is_cuda = args.device == "cuda"
        layout = PageLayout(lora_sites(model), torch.bfloat16 if is_cuda else torch.float32)
        began_s = time.perf_counter()
        self.engine: AsyncEngine = open_engine(
            EngineConfig(
                model_path=str(folder / "base"),
                base_digest="random",
                load_format="dummy",
                device=args.device,
                dtype="bfloat16" if is_cuda else "float32",
                max_model_len=2048,
                num_blocks=None if is_cuda else 4096,
                max_num_seqs=64,
                enable_prefix_caching=False,
                adapter_pool_bytes=pool_bytes(model, args.adapters + 8, layout.dtype.itemsize),
                adapter_host_bytes=args.host * layout.page_bytes,
            )
        )
        self.engine.subscribe(self._on_step)
        self.engine.start()
        self.start_s = time.perf_counter() - began_s
        self.loaded_s = 0.0  # end of the newest load
        self._vocab_size = self.engine.model_limits.vocab_size
        self._count = 0

    def _on_step(self, step: StepOutput) -> None:
        ids = tuple(output.request_id for output in step.outputs if output.token_ids)
        if ids:
            self.steps.append((time.perf_counter(), ids))

    def request(self, tokens: int, adapter: str | None) -> Request:
        self._count += 1
        prompt = tuple((self._count * 7919 + i) % (self._vocab_size - 9) + 3 for i in range(128))
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Request(f"r{self._count}", prompt, params, adapter)

    async def answer(self, tokens: int, adapter: str | None = None) -> float:
        """Returns the ms until the first token."""
        began_s, first_s = time.perf_counter(), 0.0
        async for _ in self.engine.generate(self.request(tokens, adapter)):
            first_s = first_s or time.perf_counter() - began_s
        return 1000 * first_s

    async def cold(self, digest: str, kind: str) -> dict[str, object]:
        began_s = time.perf_counter()
        await self.engine.load_adapter(digest, digest, str(self.folder / kind / digest))
        load_ms = 1000 * (time.perf_counter() - began_s)
        self.loaded_s = time.perf_counter()
        first_ms = load_ms + await self.answer(2, digest)
        return {"load": round(load_ms, 1), "first_token": round(first_ms, 1), **self.phases.take()}

    async def run(self, report: Report) -> None:
        report.emit(part="engine", start_s=round(self.start_s, 1))
        for _ in range(3):
            await self.answer(20)
        warm = [await self.answer(2) for _ in range(5)]
        report.emit(part="first tokens of the base, ms", median=round(statistics.median(warm), 1))
        names = iter(sorted(path.name for path in (self.folder / "bf16").iterdir()))
        idle = [await self.cold(next(names), "bf16") for _ in range(self.args.idle)]
        report.emit(part="idle, bf16, ms", first=idle[0], second=idle[1], **summary(idle[1:]))
        wide = [await self.cold(path.name, "fp32") for path in (self.folder / "fp32").iterdir()]
        report.emit(part="idle, fp32, ms", first=wide[0], **summary(wide[1:]))
        rest = list(names)
        at_once = [rest[first : first + self.args.burst] for first in (0, self.args.burst)]
        for number, several in enumerate(at_once):
            report.emit(
                part=f"{len(several)} at once, bf16, ms", time=number, **await self.burst(several)
            )
        await self.next_to_streams(rest[2 * self.args.burst :], report)

    async def burst(self, names: list[str]) -> dict[str, list[float]]:
        """Requests adapters all at once. Returns the ms of their loads and first tokens, sorted."""
        found = await asyncio.gather(*(self.cold(name, "bf16") for name in names))
        return {
            part: sorted(float(str(row[part])) for row in found) for part in ("load", "first_token")
        }

    async def next_to_streams(self, names: list[str], report: Report) -> None:
        streams = [
            asyncio.create_task(self.answer(self.args.tokens)) for _ in range(self.args.streams)
        ]
        await asyncio.sleep(_QUIET_S)
        self.steps.clear()
        await asyncio.sleep(_QUIET_S)
        quiet = gaps_ms(self.steps)
        loaded: list[dict[str, object]] = []
        longest: list[float] = []
        longest_of_loads: list[float] = []  # the others are those of steps with the new prompt
        for name in names:
            self.steps.clear()
            loaded.append(await self.cold(name, "bf16"))
            longest.append(max(gaps_ms(self.steps)))
            steps = [step for step in self.steps if step[0] <= self.loaded_s]
            longest_of_loads.append(max(gaps_ms(steps), default=0.0))
            await asyncio.sleep(_PAUSE_S)
        is_whole = not any(stream.done() for stream in streams)
        usual = percentile(quiet, 99)
        report.emit(
            part=f"next to {self.args.streams} streams, bf16, ms",
            streams_ran_throughout=is_whole,
            **summary(loaded),
            all_first_tokens=[one["first_token"] for one in loaded],
            quiet_gap={"p50": round(statistics.median(quiet), 2), "p99": round(usual, 2)},
            longest_gaps=[round(gap, 1) for gap in longest],
            longest_gaps_of_loads=[round(gap, 1) for gap in longest_of_loads],
            ratio=ratios(longest, usual),
            ratio_of_loads=ratios(longest_of_loads, usual),
        )
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


def gaps_ms(steps: list[tuple[float, tuple[str, ...]]]) -> list[float]:
    return [1000 * (later - earlier) for (earlier, _), (later, _) in pairwise(steps)]


def ratios(gaps: list[float], usual: float) -> dict[str, float]:
    return {
        "median": round(statistics.median(gaps) / usual, 2),
        "worst": round(max(gaps) / usual, 2),
    }


def summary(rows: list[dict[str, object]]) -> dict[str, object]:
    return {
        name: {
            "median": round(statistics.median(values), 1),
            "max": round(max(values), 1),
        }
        for name in rows[0]
        if (values := [float(str(row[name])) for row in rows])
    }


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Files of their own for each adapter, so that each is read from its own part of the cache."""
    shape = SHAPES[args.shape]
    for kind, count in (("bf16", args.adapters), ("fp32", 4)):
        write_adapter(folder / kind / "000", shape, args.rank, DTYPES[kind])
        for number in range(1, count):
            shutil.copytree(folder / kind / "000", folder / kind / f"{number:03}")
        for number in range(count):
            (folder / kind / f"{number:03}").rename(folder / kind / f"{kind}{number:03}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--folder", type=Path, help="kept; made where it is not there")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=48)
    parser.add_argument("--idle", type=int, default=22, help="of them, loaded on the idle engine")
    parser.add_argument("--burst", type=int, default=8, help="of them, loaded at once, twice")
    parser.add_argument("--host", type=int, default=40, help="room in host memory, in adapters")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=1900, help="of each stream")
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("cold_adapters", arguments=sys.argv[1:])
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "bf16").is_dir():
            prepare(folder, args)
        bench = Bench(args, folder)
        asyncio.run(bench.run(report))
        bench.engine.stop()


if __name__ == "__main__":
    main()
