"""The start of an engine of several ranks from files that no cache holds: seconds, and the bytes
that its processes read from the disk.

The base has random weights in a file for each layer, which are made on the device. All ranks share
the host's page cache: what several of them read comes from the disk once. Beside the bytes from the
disk stand those of the files and those of the ranks' parts, which repeat the embedding.

    python -m tests.benchmarks.rank_start --out FILE [--shape llama-3-70b] [--layers 80] [--ranks 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.config import EngineConfig
from engine.factory import FolderReader, open_engine
from engine.model_config import ModelConfig, read_model_config
from engine.parallel.shards import Shard
from engine.runner import ModelRunner
from engine.service import AsyncEngine
from engine.tools.random_base import random_tensor
from engine.types import Request, SamplingParams
from engine.weight_files import INDEX_FILE, weight_files
from engine.weight_shapes import expected_shapes
from tests.benchmarks.report import Report
from tests.benchmarks.shapes import SHAPES, ModelShape

PROMPT, TOKENS = tuple(range(10, 42)), 8


def write_base(shape: ModelShape, folder: Path, device: torch.device) -> None:
    """Writes the base, each layer as soon as it is drawn; its last file is its index."""
    config = read_model_config(shape.write_config(folder))
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    for name, tensors in _files(config, generator):
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def _files(
    config: ModelConfig, generator: torch.Generator
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields each file's name and tensors, in bfloat16."""
    norm = 1.0 - config.family.norm_offset
    of_file: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, dims in expected_shapes(config).items():
        parts = name.split(".")
        place = f"{int(parts[2]):03}" if "layers" in parts else "others"
        of_file.setdefault(f"model-{place}.safetensors", {})[name] = dims
    for file, shapes in of_file.items():
        drawn = {name: random_tensor(name, dims, generator, norm) for name, dims in shapes.items()}
        yield file, {name: tensor.to(torch.bfloat16).cpu() for name, tensor in drawn.items()}


def drop_from_cache(folder: Path) -> None:
    """Has the kernel forget the pages of the base's files."""
    for path in weight_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_bytes(process: int | str = "self") -> int:
    """Returns the bytes that the process has read from disks so far."""
    for line in Path(f"/proc/{process}/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/{process}/io has no read_bytes")


async def _answer(engine: AsyncEngine) -> list[int]:
    """Returns the tokens of a greedy request."""
    tokens: list[int] = []
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    async for output in engine.generate(Request("first", PROMPT, params)):
        tokens += output.token_ids
    return tokens


def start(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Opens the engine and lets it answer."""
    runners: list[ModelRunner] = []

    def reader_of(runner: ModelRunner) -> FolderReader:
        runners.append(runner)
        return FolderReader(runner)

    is_cuda = args.device == "cuda"
    config = EngineConfig(
        str(folder),
        "random",
        device=args.device,
        dtype="bfloat16" if is_cuda else "float32",
        max_model_len=2048,
        num_blocks=None if is_cuda else 64,
        num_threads=None if is_cuda else 1,
        gpu_memory_utilization=0.9,
        tensor_parallel_size=args.ranks,
        adapter_pool_bytes=0,
    )
    before, began_s = read_bytes(), time.perf_counter()
    engine = open_engine(config, reader_of)
    engine.start()
    started_s = time.perf_counter() - began_s
    group = runners[0].group
    read = [read_bytes() - before, *map(read_bytes, () if group is None else group.pids)]
    tokens = asyncio.run(_answer(engine))
    engine.stop()
    model = read_model_config(folder)
    itemsize = torch.bfloat16.itemsize
    shards = [
        itemsize * sum(map(math.prod, Shard(model, rank, args.ranks).shapes().values()))
        for rank in range(args.ranks)
    ]
    files = sum(path.stat().st_size for path in weight_files(folder))
    report.emit(
        ranks=args.ranks,
        shape=args.shape,
        layers=model.num_layers,
        start_s=round(started_s, 2),
        file_bytes=files,
        shard_bytes=shards,
        read_bytes=read,
        read_to_files=round(sum(read) / files, 3),
        tokens=tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-70b")
    parser.add_argument("--layers", type=int, help="the shape's")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "rank-start")
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("rank_start", arguments=sys.argv[1:])
    shape = SHAPES[args.shape]
    shape = replace(shape, num_layers=args.layers or shape.num_layers)
    folder = args.work / f"{shape.name}-{shape.num_layers}"
    if not (folder / INDEX_FILE).is_file():
        began_s = time.perf_counter()
        write_base(shape, folder, torch.device(args.device))
        report.emit(part="written", seconds=round(time.perf_counter() - began_s, 1))
    drop_from_cache(folder)
    start(args, folder, report)


if __name__ == "__main__":
    main()
