"""Device time of our operations, beside the peers' where they are: LoRA, attention, small ones.

LoRA: one Llama-3-8B layer, four sites, inside a CUDA graph over rotated copies of the weights; a
line for each site, then one for their sum beside the layer's own matrix products. Tokens are sorted
by adapter, as our engine has them. Peers come from a folder with `peer_api.py` (one class a peer:
made of a problem, `step`, `run`). Kernels are compiled beforehand by several processes at once.

    python -m tests.benchmarks.kernels --out FILE [--peers FOLDER] [--cases 'decode-*'] [--only ...]
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear

from tests.benchmarks.children import module, relay
from tests.benchmarks.kernel_timing import (
    LARGEST_ERROR,
    LoraCase,
    LoraOp,
    LoraProblem,
    graph_time_us,
    num_copies,
    time_lora,
)
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.shapes import SHAPES

OURS = "tests.benchmarks.lora_peer:OurLora"
PEERS = "sglang_v2,sglang_triton,sglang_csgmv,vllm"
# The others are benchmarks of their own: LoRA among the base's products in one graph, and the rest.
MODULES = {"added": "lora_sites", "small": "small_kernels", "attention": "attention"}
SITES = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}


def lora_cases() -> tuple[LoraCase, ...]:
    decode = ((1, 1), (8, 8), (32, 1), (32, 32), (64, 8), (64, 32), (256, 1), (256, 32))
    cases = [_decode(tokens, distinct, (16,)) for tokens, distinct in decode]
    cases += [_decode(t, d, (64,)) for t, d in ((1, 1), (32, 32), (64, 32), (256, 32))]
    cases += [_decode(tokens, 33, (8, 16, 64)) for tokens in (66, 264)]
    cases += [_prefill(2048, 1), _prefill(4096, 1), _prefill(4096, 16)]
    both = (0,) * 2048 + tuple(1 + i // 2 for i in range(64))
    cases.append(LoraCase("mixed-T2048+64-D33-r16", both, (16,) * 33, is_prefill=True))
    return tuple(cases)


def _decode(tokens: int, distinct: int, ranks: Sequence[int]) -> LoraCase:
    of_adapters = tuple(ranks[i % len(ranks)] for i in range(distinct))
    name = f"decode-T{tokens}-D{distinct}-r{'+'.join(map(str, ranks))}"
    return LoraCase(name, tuple(sorted(i % distinct for i in range(tokens))), of_adapters)


def _prefill(tokens: int, distinct: int) -> LoraCase:
    idx = tuple(i * distinct // tokens for i in range(tokens))
    name = f"prefill-T{tokens}-D{distinct}-r16"
    return LoraCase(name, idx, (16,) * distinct, is_prefill=True)


def makers(args: argparse.Namespace, case: LoraCase) -> dict[str, Callable[[LoraProblem], LoraOp]]:
    """Returns by name ours, then the peers in their form for this kind of batch."""
    found: dict[str, Callable[[LoraProblem], LoraOp]] = {}
    if args.ours:
        name, _, attribute = args.ours.partition(":")
        found["ours"] = getattr(importlib.import_module(name), attribute)
    if args.peers is not None:
        api = importlib.import_module("peer_api")
        for name in filter(None, args.names.split(",")):
            found[name] = api.ALL[name]
        if case.is_prefill and "sglang_triton" in found:
            found["sglang_triton"] = partial(api.ALL["sglang_triton"], merged=False)
        if case.is_prefill and "sglang_v2" in found:
            found["sglang_v2"] = partial(api.ALL["sglang_v2"], phase="prefill")
    return found


def measure_site(
    args: argparse.Namespace, case: LoraCase, site: str
) -> dict[str, float | str | None]:
    """Microseconds by name; what a side cannot do is its exception in words."""
    in_features, out_features = SITES[site]
    probe = LoraProblem(in_features, out_features, case, "cuda", 0)
    count = 1 if args.warm_up else num_copies(probe)
    problems = [
        probe,
        *(LoraProblem(in_features, out_features, case, "cuda", s) for s in range(1, count)),
    ]
    line: dict[str, float | str | None] = {"floor": round(probe.floor_us(), 2)}
    for name, make in makers(args, case).items():
        try:
            us, error = time_lora(make, problems, is_warm_up=args.warm_up)
        except Exception as reason:  # a peer's fault must not end the run
            line[name] = repr(reason)[:160]
            continue
        line[name] = round(us, 2)
        if error is not None and not error < LARGEST_ERROR:
            line[f"{name}_error"] = error if error == error else "NaN"
    if not args.warm_up:
        line["base_gemm"] = round(_base_gemm_us(in_features, sum(out_features), case.num_tokens), 2)
    del problems, probe
    torch.cuda.empty_cache()
    return line


def _base_gemm_us(in_features: int, out_features: int, num_tokens: int) -> float:
    weight_bytes = 2 * in_features * out_features
    count = max(2, min(8, int(4e8 / weight_bytes)))
    weights = [
        torch.randn(out_features, in_features, device="cuda", dtype=torch.bfloat16)
        for _ in range(count)
    ]
    x = torch.randn(num_tokens, in_features, device="cuda", dtype=torch.bfloat16)
    return graph_time_us([partial(linear, x, weight) for weight in weights * 2])


def measure_lora(args: argparse.Namespace, report: Report) -> None:
    rows = []
    for case in [c for c in lora_cases() if _is_wanted(args, c.name)]:
        totals: dict[str, float] = {}
        missing: set[str] = set()
        for site in args.sites.split(","):
            line = measure_site(args, case, site)
            if args.warm_up:
                continue
            report.emit(part="lora", case=case.name, site=site, us=line)
            for name, value in line.items():
                if isinstance(value, float) and not name.endswith("_error"):
                    totals[name] = totals.get(name, 0.0) + value
                else:
                    missing.add(name.removesuffix("_error"))
        if args.warm_up:
            continue
        layer = {name: round(us, 1) for name, us in totals.items() if name not in missing}
        ours, base = layer.get("ours"), layer.get("base_gemm")
        added = round(100 * ours / base, 2) if ours and base else None
        report.emit(part="lora", case=case.name, layer_us=layer, ours_to_base_gemm_percent=added)
        names = ("floor", "ours", *args.names.split(","), "base_gemm")
        rows.append((case.name, *(layer.get(name) for name in names), added))
    if rows:
        header = ("us a layer", "floor", "ours", *args.names.split(","), "base_gemm", "ours/base %")
        print_table(header, rows)


def _is_wanted(args: argparse.Namespace, name: str) -> bool:
    return any(fnmatchcase(name, pattern.strip()) for pattern in args.cases.split(","))


def compile_beforehand(args: argparse.Namespace) -> None:
    """A process a site: Triton compiles one kernel at a time, its cache is on disk."""
    own = ["--ours", args.ours, "--names", args.names, "--cases", args.cases]
    own += ["--peers", str(args.peers)] if args.peers is not None else []
    processes = [
        subprocess.Popen(
            module("kernels", *own, "--warm-up", "--only", "lora", "--sites", site),
            stdout=subprocess.DEVNULL,
        )
        for site in args.sites.split(",")
    ]
    for process in processes:
        process.wait()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="file that gets every line, too")
    parser.add_argument("--ours", default=OURS, metavar="MODULE:CLASS", help="'' for none")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="with peer_api.py")
    parser.add_argument("--names", default=PEERS, help=f"of the peers (default {PEERS})")
    parser.add_argument("--cases", default="*", help="shell patterns of LoRA cases, by comma")
    parser.add_argument("--sites", default=",".join(SITES))
    parser.add_argument("--only", default=",".join(["lora", *MODULES]), help="some of %(default)s")
    parser.add_argument("--no-compile", action="store_true", help="not in parallel beforehand")
    parser.add_argument("--warm-up", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    report = Report(None if args.warm_up else args.out)
    parts = args.only.split(",")
    if args.peers is not None:
        sys.path.append(str(args.peers))
        importlib.import_module("peer_api").use("vllm_lora_ops", "sglang_lora_ops")
    if not args.warm_up:
        report.emit_machine("kernels", arguments=sys.argv[1:], shape=SHAPES["llama-3-8b"].name)
        if "lora" in parts and not args.no_compile:
            compile_beforehand(args)
    if "lora" in parts:
        measure_lora(args, report)
    for part in parts:
        if part in MODULES:
            relay(module(MODULES[part]), report, timeout_s=150)


if __name__ == "__main__":
    main()
