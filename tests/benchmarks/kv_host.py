"""The host tier of KV: first tokens by tier, gaps of streams beside loads, and resumed sequences.

One engine without a server, driven step by step; weights are random. `computed`, `device` and
`host` are the ms until the first token of a prompt whose KV is nowhere, on the device, and on the
host alone. Gaps are those between two steps in which streams decode: quiet, beside prompts found on
the device, and beside the same prompts loaded from the host one after another, so that the copies
alone make the difference. `plain blocks` are those of an engine without a host tier. A sequence is
resumed after its preemption, on an idle engine whose device has lost its blocks: by swap, and by
recompute.

    python -m tests.benchmarks.kv_host --out FILE [--shape llama-3-8b] [--device cpu]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import Engine
from engine.kv_offload import KVOffload
from engine.runner import ModelRunner
from engine.step_cost import StepCost
from engine.types import KVHostLoad, Request, SamplingParams
from tests.benchmarks.report import Report, spread
from tests.benchmarks.shapes import SHAPES

_BLOCK_SIZE = 16
_WARM_UPS = 2


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path, host_gib: float) -> None:
        self.args = args
        is_cuda = args.device == "cuda"
        longest = args.prompt + 2 * args.tokens
        streams = args.streams * self._blocks(args.stream_prompt + args.tokens)
        config = EngineConfig(
            model_path=str(SHAPES[args.shape].write_config(folder / "base")),
            base_digest="random",
            load_format="dummy",
            device=args.device,
            dtype="bfloat16" if is_cuda else "float32",
            max_model_len=longest,
            block_size=_BLOCK_SIZE,
            num_blocks=args.blocks or streams + 2 * self._blocks(longest),
            kv_host_bytes=int(host_gib * 1024**3),
            max_num_batched_tokens=8192 if is_cuda else 512,
            max_num_seqs=args.streams + 8,
            adapter_pool_bytes=0,
        )
        began_s = time.perf_counter()
        self.runner = ModelRunner(config)
        self.engine = Engine(config, self.runner)
        if host_gib:
            # Copies whatever computing costs: a small model on a large device may be as fast.
            self.offload._cost = StepCost()
        self.start_s = time.perf_counter() - began_s
        self._count = 0

    @property
    def offload(self) -> KVOffload:
        assert self.engine._offload is not None
        return self.engine._offload

    @property
    def host(self) -> KVHostLoad:
        return self.engine.load().kv_host

    def prompt(self, length: int) -> tuple[int, ...]:
        self._count += 1
        size = self.engine.limits.vocab_size - 9
        return tuple((self._count * 7919 + 31 * i) % size + 3 for i in range(length))

    def add(self, prompt: tuple[int, ...], tokens: int) -> str:
        self._count += 1
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.add_request(Request(f"r{self._count}", prompt, params))
        return f"r{self._count}"

    def until(self, is_done: Callable[[str], bool]) -> None:
        """Steps until a request with a new token, by its id, is the one."""
        while self.engine.has_work:
            if any(o.token_ids and is_done(o.request_id) for o in self.engine.step().outputs):
                return
        raise RuntimeError("the engine has no work left")

    def first_token_ms(self, prompt: tuple[int, ...]) -> float:
        began_s = time.perf_counter()
        name = self.add(prompt, 1)
        self.until(lambda one: one == name)
        return 1000 * (time.perf_counter() - began_s)

    def first_tokens(self, report: Report) -> None:
        found: dict[str, list[float]] = {"computed": [], "device": [], "host": []}
        for turn in range(_WARM_UPS + self.args.repeats):
            prompt = self.prompt(self.args.prompt)
            ms = {"computed": self.first_token_ms(prompt), "device": self.first_token_ms(prompt)}
            self.leave_device()
            hits = self.host.hit_tokens
            ms["host"] = self.first_token_ms(prompt)
            usable = (len(prompt) - 1) // _BLOCK_SIZE * _BLOCK_SIZE
            if self.host.hit_tokens - hits != usable:
                raise RuntimeError(f"{self.host.hit_tokens - hits} of {usable} tokens: {self.host}")
            if turn >= _WARM_UPS:
                for kind, one in ms.items():
                    found[kind].append(one)
        medians = {kind: statistics.median(values) for kind, values in found.items()}
        report.emit(
            part=f"first token of {self.args.prompt} tokens, ms",
            **{kind: spread(values, 2) for kind, values in found.items()},
            host_over_device=round(medians["host"] / medians["device"], 3),
            computed_over_host=round(medians["computed"] / medians["host"], 3),
            **self.speeds(),
        )

    def leave_device(self) -> None:
        """Stores all idle blocks on the host and evicts them from the device."""
        pool, offload = self.offload._pool, self.offload
        offload._store(pool.next_unsaved(pool.num_blocks))
        while offload._stores:
            offload._stores[-1].copy.synchronize()
            offload.begin_step()
        pool.release(pool.allocate(pool.num_free))

    def start_streams(self) -> set[str]:
        """Returns the ids of requests that decode."""
        streams = {
            self.add(self.prompt(self.args.stream_prompt), self.args.tokens)
            for _ in range(self.args.streams)
        }
        seen: set[str] = set()
        while seen < streams:
            seen |= {output.request_id for output in self.engine.step().outputs}
        return streams

    def gaps(self, report: Report) -> None:
        streams = self.start_streams()
        quiet = self.quiet_gaps(streams)
        # More than the device holds: each one's blocks are evicted before its next turn.
        room = self.engine.load().num_free_blocks // self._blocks(self.args.prompt)
        prompts = tuple(self.prompt(self.args.prompt) for _ in range(room + 2))
        for prompt in prompts:
            self.first_token_ms(prompt)
        self.first_token_ms(prompts[-1])
        on_device = self.measure(self.args.steps, streams, prompts[-1:])
        before, began_s = self.host, time.perf_counter()
        on_host = self.measure(self.args.steps, streams, prompts)
        took_s, after = time.perf_counter() - began_s, self.host
        self.end(streams)
        loaded = after.loaded_bytes - before.loaded_bytes
        report.emit(
            part=f"gaps of {len(streams)} streams, ms",
            quiet=spread(quiet, 3),
            beside_device_hits=spread(on_device, 3),
            beside_host_hits=spread(on_host, 3),
            mean_ratio=round(statistics.mean(on_host) / statistics.mean(on_device), 4),
            loaded_gb_s=round(loaded / took_s / 1e9, 3),
            stored_gb_s=round((after.stored_bytes - before.stored_bytes) / took_s / 1e9, 3),
        )
        if not loaded:
            raise RuntimeError(f"nothing was loaded beside the streams: {after}")

    def plain(self, report: Report) -> None:
        """Measures an engine without a host tier, whose blocks are not contiguous."""
        computed = [
            self.first_token_ms(self.prompt(self.args.prompt))
            for _ in range(_WARM_UPS + self.args.repeats)
        ]
        streams = self.start_streams()
        report.emit(
            part="plain blocks, ms",
            computed=spread(computed[_WARM_UPS:], 2),
            quiet=spread(self.quiet_gaps(streams), 3),
        )
        self.end(streams)

    def quiet_gaps(self, streams: set[str]) -> list[float]:
        self.measure(8, streams, ())
        return self.measure(self.args.steps, streams, ())

    def end(self, streams: set[str]) -> None:
        for name in streams:
            self.engine.abort(name)
        while self.engine.has_work:
            self.engine.step()

    def measure(
        self, steps: int, streams: set[str], prompts: tuple[tuple[int, ...], ...]
    ) -> list[float]:
        """Returns the gaps of so many steps, with a request for one of the prompts, in turn, under
        way at all times."""
        ends = [time.perf_counter()]
        current, turn = "", 0
        while len(ends) <= steps:
            if prompts and not self.engine.scheduler.has_request(current):
                current, turn = self.add(prompts[turn % len(prompts)], 1), turn + 1
            outputs = self.engine.step().outputs
            if streams & {output.request_id for output in outputs}:
                ends.append(time.perf_counter())
        return [1000 * (later - earlier) for earlier, later in pairwise(ends)]

    def resumes(self, report: Report) -> None:
        found: dict[str, list[float]] = {"swap": [], "recompute": []}
        for turn in range(_WARM_UPS + self.args.repeats):
            for kind, values in found.items():
                ms = self.resume_ms(swaps=kind == "swap")
                if turn >= _WARM_UPS:
                    values.append(ms)
        swap, recompute = (statistics.median(values) for values in found.values())
        report.emit(
            part=f"resume of {self.args.preempted} tokens, ms",
            **{kind: spread(values, 2) for kind, values in found.items()},
            recompute_over_swap=round(recompute / swap, 3),
        )

    def resume_ms(self, *, swaps: bool) -> float:
        engine, pool = self.engine, self.offload._pool
        name = self.add(self.prompt(self.args.preempted), 12)
        for _ in range(4):
            self.until(lambda one: one == name)
        (victim,) = engine.scheduler.running
        before = self.host
        if swaps:
            engine.scheduler._preempt(victim)
            self.leave_device()
        else:  # its blocks are lost
            swap_out, self.offload.swap_out = self.offload.swap_out, lambda _: None  # type: ignore
            engine.scheduler._preempt(victim)
            self.offload.swap_out = swap_out  # type: ignore[method-assign]
            pool.release(pool.allocate(pool.num_free))
        while engine._in_flight.batch.sequences:  # computed before the preemption
            engine._collect_in_flight()
        began_s = time.perf_counter()
        self.until(lambda one: one == name)
        took_ms = 1000 * (time.perf_counter() - began_s)
        while engine.has_work:  # until a load that the first step waited for is counted
            engine.step()
        if (self.host.loaded_bytes > before.loaded_bytes) != swaps:
            raise RuntimeError(f"swaps is {swaps}, from {before} to {self.host}")
        return took_ms

    def speeds(self) -> dict[str, float]:
        host = self.host
        return {
            "store_gb_s": round(host.stored_bytes / max(host.store_s, 1e-9) / 1e9, 2),
            "load_gb_s": round(host.loaded_bytes / max(host.load_s, 1e-9) / 1e9, 2),
        }

    @staticmethod
    def _blocks(num_tokens: int) -> int:
        return -(-num_tokens // _BLOCK_SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens whose KV is found")
    parser.add_argument("--preempted", type=int, default=2000, help="tokens of the resumed one")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-prompt", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1500, help="of each stream, at most")
    parser.add_argument("--steps", type=int, default=300, help="of each measurement of gaps")
    parser.add_argument("--blocks", type=int, help="of KV; the streams and two prompts otherwise")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--host-gib", type=float, default=16.0)
    args = parser.parse_args()
    report = Report(args.out)
    report.emit_machine("kv_host", arguments=sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        without = Bench(args, Path(folder), 0.0)
        without.plain(report)
        without.runner.close()
        del without
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        bench = Bench(args, Path(folder), args.host_gib)
        report.emit(
            part="engine",
            start_s=round(bench.start_s, 1),
            blocks=bench.runner.num_blocks,
            host_blocks=bench.host.num_blocks,
            block_bytes=bench.offload._copier.block_bytes,
        )
        bench.first_tokens(report)
        bench.gaps(report)
        bench.resumes(report)
        bench.runner.close()


if __name__ == "__main__":
    main()
