"""The metrics of an engine through Ray: the same counts, sums and labels, under Ray's names."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util import metrics as ray_metrics

from engine.admission import EngineLimits
from engine.types import EngineLoad, Request, SamplingParams, StepOutput, TokenOutput
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.histograms import SECONDS, VLLM_GAP_SECONDS, Histogram
from serve_app.replica.ray_metrics import RayExport, spread

OWN = {"model_name": "base", "engine": "e0"}


class Registry:
    """Ray's registry: what each metric was given. Ray itself needs a worker process."""

    def __init__(self) -> None:
        self.names: dict[str, tuple[str, ...]] = {}  # and their tag keys
        self.numbers: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.values: dict[str, list[float]] = {}
        self.bounds: dict[str, list[float]] = {}
        registry = self

        def init(self: Any, name: str, words: str, *rest: Any) -> None:
            assert ":" not in name
            *bounds, keys = rest
            self.its_name = name
            registry.names[name] = keys
            if bounds:
                registry.bounds[name] = bounds[0]
                registry.values[name] = []

        def record(self: Any, value: float, tags: dict[str, str]) -> tuple[str, tuple[str, ...]]:
            assert tuple(tags) == registry.names[self.its_name]
            return self.its_name, tuple(tags.values())

        def inc(self: Any, value: float, tags: dict[str, str]) -> None:
            assert value > 0
            registry.numbers[record(self, value, tags)] += value  # type: ignore[assignment]

        def set_value(self: Any, value: float, tags: dict[str, str]) -> None:
            registry.numbers[record(self, value, tags)] = value  # type: ignore[assignment]

        def observe(self: Any, value: float, tags: dict[str, str]) -> None:
            record(self, value, tags)
            registry.values[self.its_name].append(value)

        def make(kind: type, **methods: Any) -> type:
            return type(kind.__name__, (kind,), {"__init__": init, **methods})

        self.ray = SimpleNamespace(
            Counter=make(ray_metrics.Counter, inc=inc),
            Gauge=make(ray_metrics.Gauge, set=set_value),
            Histogram=make(ray_metrics.Histogram, observe=observe),
        )

    def number(self, name: str) -> float:
        return sum(value for (found, _), value in self.numbers.items() if found == name)


def metrics_after(*gaps_s: float) -> EngineMetrics:
    metrics = EngineMetrics("base", "e0", 16, EngineLimits(4096, 0, 0))
    metrics.begin(Request("r", (1, 2, 3), SamplingParams(), arrival_s=1.0), "pirate", 1.0)
    continue_after(metrics, 0, 1.0, *gaps_s)
    return metrics


def continue_after(metrics: EngineMetrics, offset: int, now_s: float, *gaps_s: float) -> None:
    for number, gap_s in enumerate(gaps_s):
        now_s += gap_s
        output = TokenOutput("r", 0, offset + number, (5,))
        metrics.observe_step(StepOutput((output,), EngineLoad(num_running=1)), now_s)


def test_counters_and_gauges_have_vllms_names_and_labels() -> None:
    registry = Registry()
    export = RayExport(registry.ray)
    metrics = metrics_after(0.5, 0.02, 0.03)
    for _ in range(2):  # the second brings nothing new
        export.update(metrics.text())
    assert set(registry.names["vllm_num_requests_running"]) == set(OWN)
    assert registry.number("vllm_num_requests_running") == 1
    assert registry.number("vllm_generation_tokens") == 3
    assert registry.number("vllm_prompt_tokens") == 3
    assert not [name for name in registry.names if name.startswith("loraplex")]
    assert "vllm_lora_requests_info" not in registry.names


def test_histograms_have_the_same_counts_and_sums_after_every_update() -> None:
    registry = Registry()
    export = RayExport(registry.ray)
    metrics = metrics_after(0.5, 0.02, 0.03)
    export.update(metrics.text())
    continue_after(metrics, 3, 2.0, 0.004, 100.0)
    export.update(metrics.text())
    name = "vllm_inter_token_latency_seconds"
    assert registry.bounds[name] == list(VLLM_GAP_SECONDS)
    ours = metrics._histograms["loraplex_inter_token_latency_seconds"].coarser(VLLM_GAP_SECONDS)
    theirs = Histogram(VLLM_GAP_SECONDS)
    for value in registry.values[name]:
        theirs.observe(value)
    assert theirs.counts == ours.counts
    assert theirs.total == pytest.approx(ours.total, rel=1e-3)


def test_any_values_keep_their_buckets_and_their_sum() -> None:
    draw = random.Random(0)
    for _ in range(200):
        histogram = Histogram(SECONDS)
        for _ in range(draw.randrange(1, 40)):
            histogram.observe(draw.choice((draw.expovariate(1.0), 10 ** draw.uniform(-4, 5))))
        counts, total = [0] * (len(SECONDS) + 1), 0.0
        for value, times in spread(SECONDS, histogram.counts, histogram.total):
            counts[bisect_left(SECONDS, value)] += times
            total += value * times
        assert counts == histogram.counts
        assert total == pytest.approx(histogram.total, rel=1e-4)
