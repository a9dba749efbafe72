"""The engine's metrics through Ray: Ray's Serve LLM dashboard reads vLLM's names as `ray_vllm_*`.

They are exported by the Serve replica's process, because the dashboard joins them with Serve's own
series by the worker's id. Ray's histograms take one value at a time: the counts since the last
update are put into the same buckets, as values inside them that add up to the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.util import metrics as ray_metrics

UPDATE_S = 5.0
_PREFIX = "vllm:"
# Ray keeps a series for ever, and the labels of these change with every load or request.
_SKIPPED = frozenset(("vllm:lora_requests_info", "vllm:lora_adapter_loaded"))
_EDGE = 1e-6  # of a bucket's width: values keep away from its ends

Labels = tuple[tuple[str, str], ...]


class RayExport:
    """The families of an engine in Ray's registry of this process. Not for several threads at
    once."""

    def __init__(self, ray: Any = ray_metrics) -> None:
        self._ray = ray
        self._families: dict[str, ray_metrics.Metric] = {}
        self._last: dict[tuple[str, Labels], tuple[float, ...]] = {}

    def update(self, text: bytes) -> None:
        """Brings Ray's numbers to those of the exposition. Blocks for some milliseconds."""
        for family in text_string_to_metric_families(text.decode()):
            if not family.name.startswith(_PREFIX) or family.name in _SKIPPED:
                continue
            if family.type == "histogram":
                self._update_histogram(family)
                continue
            for sample in family.samples:
                tags = dict(sample.labels)
                known = self._family(family, tuple(tags))
                if isinstance(known, ray_metrics.Gauge):
                    known.set(sample.value, tags)
                elif isinstance(known, ray_metrics.Counter):
                    (grown,) = self._growth(family.name, tags, (sample.value,))
                    if grown > 0:
                        known.inc(grown, tags)

    def _update_histogram(self, family: Metric) -> None:
        buckets: dict[Labels, list[tuple[float, float]]] = {}
        sums: dict[Labels, float] = {}
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "le"}
            key = tuple(labels.items())
            if sample.name.endswith("_bucket"):
                buckets.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_sum"):
                sums[key] = sample.value
        for key, cumulative in buckets.items():
            tags = dict(key)
            bounds = tuple(bound for bound, _ in cumulative if bound != inf)
            known = self._family(family, tuple(tags), bounds)
            assert isinstance(known, ray_metrics.Histogram)
            numbers = [number for _, number in cumulative]
            counts = [b - a for a, b in zip((0.0, *numbers), numbers, strict=False)]
            *grown, total = self._growth(family.name, tags, (*counts, sums[key]))
            for value, times in spread(bounds, grown, total):
                for _ in range(times):
                    known.observe(value, tags)

    def _growth(
        self, name: str, tags: Mapping[str, str], numbers: Sequence[float]
    ) -> tuple[float, ...]:
        """Returns the growth of each number since the last update."""
        key = name, tuple(tags.items())
        last = self._last.get(key, (0.0,) * len(numbers))
        self._last[key] = tuple(numbers)
        return tuple(new - old for new, old in zip(numbers, last, strict=True))

    def _family(
        self, family: Metric, labels: tuple[str, ...], bounds: tuple[float, ...] = ()
    ) -> ray_metrics.Metric:
        known = self._families.get(family.name)
        if known is None:
            # Ray adds `ray_` and a counter's `_total`.
            name, words = family.name.replace(":", "_"), family.documentation
            if family.type == "histogram":
                known = self._ray.Histogram(name, words, list(bounds), labels)
            elif family.type == "counter":
                known = self._ray.Counter(name, words, labels)
            else:
                known = self._ray.Gauge(name, words, labels)
            self._families[family.name] = known
        return known


def spread(
    bounds: Sequence[float], counts: Sequence[float], total: float
) -> Iterator[tuple[float, int]]:
    """Yields values and how often each occurs: `counts` of them in each bucket (the last one has no
    upper bound), with the sum `total`, up to a millionth of the buckets' widths."""
    lows, highs = (0.0, *bounds), (*bounds, bounds[-1])
    least = sum(count * low for count, low in zip(counts, lows, strict=True))
    most = sum(count * high for count, high in zip(counts, highs, strict=True))
    share = (total - least) / (most - least) if most > least else 1.0
    share = min(max(share, _EDGE), 1 - _EDGE)
    beyond = max(total - most, 0.0) / counts[-1] if counts[-1] else 0.0
    for count, low, high in zip(counts[:-1], lows, highs, strict=False):
        if count:
            yield low + share * (high - low), int(count)
    if counts[-1]:
        yield bounds[-1] * (1 + _EDGE) + beyond, int(counts[-1])
