"""Ten minutes of everything at once on one engine, at 80 % of its capacity; nothing is left over.

150 adapters of ranks 1 to 64 on odd sets of linears and layers go through a pool that holds about a
tenth of their bytes; requests share prefixes, leave early, ask for several choices and use every
sampling setting, over KV blocks that are too few at times. A fifth is constrained by a grammar, and
each answer judged by an expression of the same texts. The capacity is measured first, with the same
requests in a closed loop. At the end there must be no error, nothing running, waiting or
referenced, no block held, the device's memory as in the first minute, and the same tokens for the
same requests as before the load, greedy and with a seed. Of several ranks on CUDA devices all must
have had the same bits in the last residuals of every step.

    python -m tests.benchmarks.soak --out FILE [--seconds 600] [--shape llama-3-8b] [--ranks 2]
    python -m tests.benchmarks.soak --device cpu --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.host_memory import resident_bytes
from engine.model_config import read_model_config
from engine.parallel import group
from tests.benchmarks.cases import PAGE_RANK, AdapterSpec
from tests.benchmarks.grammar_tokenizer import write_tokenizer
from tests.benchmarks.memory_adapters import pool_bytes, tensor_bytes
from tests.benchmarks.our_engine import OurEngine, Settings
from tests.benchmarks.report import Report, percentile
from tests.benchmarks.shapes import SHAPES
from tests.benchmarks.soak_clients import Clients, Mix, odd_adapters
from tests.benchmarks.soak_grammars import AnswerTexts
from tests.benchmarks.soak_judge import Evidence, MemorySample, broken_promises, window_of
from tests.rank_processes import record_residuals, recording_main

MAX_RANK = 64
LOAD = 0.8  # of the capacity
_SAMPLE_S = 0.5
_IDLE_S = 30.0  # for aborts and copies in flight, when the last request has ended
_REPORT_S = 60.0
_AT_A_TIME = 200  # steps whose checksums are written at once


class Soak:
    def __init__(self, args: argparse.Namespace, report: Report) -> None:
        self._args, self._report = args, report
        write_tokenizer(args.work / args.shape, SHAPES[args.shape])  # grammars need one
        self._specs = odd_adapters(args.adapters, MAX_RANK, args.seed)
        self._records: list[Path] = []
        if args.ranks > 1 and args.device == "cuda":
            self._records = record_both(args.work)
        self._ours = OurEngine(_settings(args, self._specs), "on")

    async def run(self) -> bool:
        """Returns True if every promise was kept."""
        args, ours = self._args, self._ours
        load_s = await ours.load_adapters(self._specs)
        adapter_bytes = sum(ours.reader.tensor_bytes(spec.digest) for spec in self._specs)
        limits = ours.engine.model_limits
        digests = [spec.digest for spec in self._specs]
        mix = Mix(digests, limits.vocab_size, args.longest, args.seed, args.constrained)
        texts = AnswerTexts(args.work / args.shape)
        clients = Clients(ours.engine, mix, args.patience, texts)
        self._report.emit(
            part="start",
            start_s=round(ours.start_s, 2),
            load_adapters_s=round(load_s, 2),
            num_blocks=ours.engine.load().num_blocks,
            adapters=len(self._specs),
            adapter_bytes=adapter_bytes,
            pool_bytes=ours.config.adapter_pool_bytes,
        )
        before = await clients.probe(mix.probes("before", args.probed))
        calibration_s = args.calibration or min(20.0, args.seconds / 6)
        capacity = await clients.closed_loop(2 * args.seqs, calibration_s)
        self._report.emit(part="capacity", requests_per_s=round(capacity, 2), **clients.counts)
        samples, on_device = await self._under_load(clients, LOAD * capacity)
        await self._until_idle()
        after = await clients.probe(mix.probes("after", args.probed))
        await self._until_idle()
        evidence = Evidence(
            errors=tuple(clients.errors),
            load=ours.engine.load(),
            residents=await ours.engine.adapters(),
            changed_probes=sum(a != b for a, b in zip(before, after, strict=True)),
            num_probes=len(before),
            samples=tuple(samples),
            window_s=window_of(args.seconds),
            slack_bytes=int(args.slack_mib * 1024**2),
        )
        broken = broken_promises(evidence)
        load = evidence.load
        fields: dict[str, object] = {"ranks": args.ranks}
        if self._records:
            first, other = (path.read_text().splitlines() for path in self._records)
            pairs = list(zip(first, other, strict=False))  # a rank may be some steps behind
            different = sum(a != b for a, b in pairs)
            fields |= {"compared_residuals": len(pairs), "different_residuals": different}
            if different or not pairs:
                broken.append(f"residuals of {different} of {len(pairs)} steps differ")
        self._report.emit(
            benchmark="soak",
            seconds=args.seconds,
            offered_per_s=round(LOAD * capacity, 2),
            **clients.counts,
            settings=dict(sorted(clients.settings.items())),
            preemptions=load.num_preemptions,
            prefix_hits=load.prefix_hits,
            copies_to_device=load.num_adapter_copies,
            adapters_on_device=percentile(on_device, 50) if on_device else None,
            ttft_ms={f"p{p}": round(1000 * percentile(clients.first_s, p), 1) for p in (50, 99)},
            memory=evidence.memory_fields(),
            **fields,
            broken=broken,
            **{"pass": not broken},
        )
        return not broken

    def close(self) -> None:
        self._ours.close()

    async def _under_load(
        self, clients: Clients, rate: float
    ) -> tuple[list[MemorySample], list[int]]:
        """Returns samples of the memory and the numbers of adapters on the device."""
        samples: list[MemorySample] = []
        on_device: list[int] = []
        args, engine = self._args, self._ours.engine
        device = self._ours.config.device
        start_s = told_s = time.perf_counter()
        load = asyncio.create_task(clients.open_loop(rate, args.seconds))
        while not load.done():
            await asyncio.wait((load,), timeout=_SAMPLE_S)
            now_s = time.perf_counter()
            samples.append(MemorySample(now_s - start_s, *_memory(device)))
            on_device.append(len(engine.load().adapters_on_device))
            if now_s - told_s > _REPORT_S:
                told_s = now_s
                newest = samples[-1]
                self._report.emit(
                    part="minute",
                    seconds=round(now_s - start_s, 1),
                    device_bytes=newest.device_bytes,
                    process_bytes=newest.process_bytes,
                    running=engine.load().num_running,
                    waiting=engine.load().num_waiting,
                    **clients.counts,
                )
        await load
        return samples, on_device

    async def _until_idle(self) -> None:
        """Waits until nothing runs; what is left after the limit is for the judge."""
        engine, deadline_s = self._ours.engine, time.perf_counter() + _IDLE_S
        while time.perf_counter() < deadline_s:
            residents = await engine.adapters()
            load = engine.load()
            is_held = any(one.num_references for one in residents)
            if not (load.num_running or load.num_waiting or is_held):
                return
            await asyncio.sleep(0.05)


def _settings(args: argparse.Namespace, specs: Sequence[AdapterSpec]) -> Settings:
    longest, folder = args.longest, args.work / args.shape
    shape = SHAPES[args.shape]
    model = read_model_config(shape.write_config(folder))
    itemsize = 2 if args.device == "cuda" else 4
    tenth = sum(tensor_bytes(model, spec, itemsize) for spec in specs) // 10
    return Settings(
        shape,
        folder,
        device=args.device,
        max_num_seqs=args.seqs,
        max_num_batched_tokens=args.batched_tokens,
        memory_fraction=args.memory,
        enable_prefix_caching=True,
        num_blocks=max(args.seqs * longest // 32, 4 * longest // 16),
        others={
            "max_model_len": 4 * longest,
            "tensor_parallel_size": args.ranks,
            "max_lora_rank": MAX_RANK,
            # A second thread gains nothing on a base that a CPU can run, and waits for busy cores.
            "num_threads": 1,
            # The largest adapter must fit, too.
            "adapter_pool_bytes": max(tenth, pool_bytes(model, MAX_RANK // PAGE_RANK, itemsize)),
        },
    )


def record_both(folder: Path) -> list[Path]:
    """Lets this process, and the other rank of an engine that it opens from now on, record the
    checksums of their residuals. Returns the paths of both files, which do not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"residuals-{rank}" for rank in range(2)]
    for path in paths:
        path.unlink(missing_ok=True)
    group._MAIN = recording_main(str(paths[1]), _AT_A_TIME)
    record_residuals(str(paths[0]), _AT_A_TIME)
    return paths


def _memory(device: str) -> tuple[int, int]:
    """Returns the bytes in use on the device (all processes), and those of this process."""
    process = resident_bytes() or 0
    if device != "cuda":
        return process, process
    free, total = torch.cuda.mem_get_info()
    return total - free, process


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--seconds", type=float, default=600.0, help="under load")
    parser.add_argument("--calibration", type=float, help="seconds; as a sixth of them, 20 at most")
    parser.add_argument("--shape", choices=SHAPES, help="llama-3-8b; tiny on a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, choices=[1, 2], default=1)
    parser.add_argument("--adapters", type=int, default=150)
    parser.add_argument("--seqs", type=int, help="sequences in a step: 128; 16 on a CPU")
    parser.add_argument("--batched-tokens", type=int, default=2048)
    parser.add_argument("--longest", type=int, help="tokens of a prompt, or an answer: 512; 48")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device")
    parser.add_argument("--constrained", type=float, default=0.2, help="share with a grammar")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds until one is stuck")
    parser.add_argument("--slack-mib", type=float, default=32.0, help="growth that counts as flat")
    parser.add_argument("--probed", type=int, default=12, help="adapters asked before and after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "engine-bench")
    args = parser.parse_args(arguments)
    is_cuda = args.device == "cuda"
    args.shape = args.shape or ("llama-3-8b" if is_cuda else "tiny")
    args.seqs = args.seqs or (128 if is_cuda else 16)
    args.longest = args.longest or (512 if is_cuda else 48)
    return args


async def soak(args: argparse.Namespace, report: Report) -> bool:
    """Returns True if every promise was kept."""
    one = Soak(args, report)
    try:
        return await one.run()
    finally:
        one.close()


def main() -> int:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("soak", shape=args.shape, arguments=sys.argv[1:])
    return int(not asyncio.run(soak(args, report)))


if __name__ == "__main__":
    raise SystemExit(main())
