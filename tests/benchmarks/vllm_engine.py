"""vLLM on the offline workload, through its public API: the other side of `engine`.

The module is a process of its own, started by `engine` with vLLM's packages on its path; an engine
with LoRA and one without are two processes. Dummy weights, adapters from files. CUDA graphs are
captured for the batch sizes of the workload only, which shortens the start and changes no figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

from tests.benchmarks.adapter_files import write_adapters
from tests.benchmarks.cases import Case, adapter_of, cases_from_json, groups_of, make_prompts
from tests.benchmarks.report import emit, machine
from tests.benchmarks.shapes import SHAPES, ModelShape, in_gptq

GRAPH_SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
WARM_UP_TOKENS = 8


def open_vllm(shape: ModelShape, args: argparse.Namespace) -> LLM:
    lora: dict[str, object] = {}
    if args.lora:
        lora = {
            "enable_lora": True,
            "max_loras": args.max_loras,
            "max_lora_rank": args.max_rank,
            "max_cpu_loras": 128,
        }
    return LLM(
        model=str(shape.write_config(args.work / shape.name)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_seqs=256,
        gpu_memory_utilization=args.memory,
        quantization=args.quantization,
        tensor_parallel_size=args.ranks,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": GRAPH_SIZES},
        **lora,
    )


def run(llm: LLM, case: Case, adapters: Sequence[LoRARequest], vocab_size: int, salt: int) -> float:
    """Runs all requests of the case. Returns the seconds from all prompts to all tokens."""
    prompts = [{"prompt_token_ids": list(ids)} for ids in make_prompts(case, vocab_size, salt)]
    indices = [adapter_of(case, i) for i in range(case.requests)]
    chosen = [None if index is None else adapters[index] for index in indices]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=case.output, ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    results = llm.generate(
        prompts, sampling, lora_request=chosen if case.distinct else None, use_tqdm=False
    )
    seconds = time.perf_counter() - start
    assert sum(len(r.outputs[0].token_ids) for r in results) == case.output_tokens
    return seconds


class Adapters:
    """The adapters' files, written when a case first uses them; ids are unique in the process."""

    def __init__(self, root: Path, shape: ModelShape) -> None:
        self._root, self._shape = root, shape
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._ids: dict[str, int] = {}

    def of(self, case: Case) -> list[LoRARequest]:
        folders = write_adapters(self._root, self._shape, case.adapters, self._device)
        return [
            LoRARequest(
                folder.name, self._ids.setdefault(folder.name, len(self._ids) + 1), str(folder)
            )
            for folder in folders
        ]


def measure(
    llm: LLM, group: Sequence[Case], adapters: Adapters, shape: ModelShape, args: argparse.Namespace
) -> None:
    """Measures cases of equal requests in turns; the first is their base."""
    requests = {case.name: adapters.of(case) for case in group}
    for case in group:
        short = replace(case, output=min(WARM_UP_TOKENS, case.output))
        run(llm, short, requests[case.name], shape.vocab_size, salt=-1)
    runs: dict[str, list[float]] = {case.name: [] for case in group}
    began_s = time.perf_counter()
    for number in range(args.repeats):
        if number and time.perf_counter() - began_s > args.seconds_per_case * len(group):
            break
        for case in group:
            seconds = run(llm, case, requests[case.name], shape.vocab_size, salt=number)
            runs[case.name].append(seconds)
    base_s = runs[group[0].name]
    for case in group:
        median_s = statistics.median(runs[case.name])
        rounds = zip(runs[case.name], base_s, strict=True)
        ratio = statistics.median(base / seconds for seconds, base in rounds)
        emit(
            side="vllm",
            shape=shape.name,
            case=case.name,
            ranks=args.ranks,
            lora_enabled=bool(args.lora),
            seconds=round(median_s, 4),
            runs_s=[round(seconds, 4) for seconds in runs[case.name]],
            output_tokens_per_s=round(case.output_tokens / median_s, 1),
            to_base=round(ratio, 3) if case.distinct else None,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--cases", required=True, help="as JSON (cases.cases_as_json)")
    parser.add_argument("--lora", type=int, choices=[0, 1], required=True)
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the base")
    parser.add_argument("--quantization", help="of the base: fp8, or gptq")
    parser.add_argument("--max-loras", type=int, default=32)
    parser.add_argument("--max-rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds-per-case", type=float, default=6.0)
    parser.add_argument("--memory", type=float, default=0.8, help="share of the device")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    if args.quantization == "gptq":
        shape, args.quantization = in_gptq(shape), None  # vLLM takes its fastest kernels for it
    start = time.perf_counter()
    llm = open_vllm(shape, args)
    emit(
        side="vllm",
        shape=shape.name,
        ranks=args.ranks,
        lora=args.lora,
        max_loras=args.max_loras,
        max_rank=args.max_rank,
        start_s=round(time.perf_counter() - start, 1),
        versions=machine("vllm")["versions"],
    )
    adapters = Adapters(args.work / f"{shape.name}-adapters", shape)
    for group in groups_of(cases_from_json(args.cases)):
        measure(llm, group, adapters, shape, args)


if __name__ == "__main__":
    main()
