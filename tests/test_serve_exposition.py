"""The text of every metric family: its rendering, and the names that dashboards rely on."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.types import Resident
from registry.cache import CacheStats
from registry.catalog import Catalog
from registry.entities import AdapterVersion
from serve_app.canary.arm_stats import ArmStats
from serve_app.control.base_status import StartLog
from serve_app.control.key_calls import budgets_text
from serve_app.control.watcher import Watcher
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.exposition import as_text, counter, gauge, histogram
from serve_app.metrics.families import HELP
from serve_app.metrics.histograms import Histogram
from serve_app.metrics.ingress import IngressMetrics, MigrationMetrics, QueueStats
from serve_app.metrics.replica import LoadTimes, cache_text, residents_text
from serve_app.observe.request_log import RequestLog
from serve_app.observe.request_metrics import RequestMetrics
from serve_app.platform_view import BaseLine
from serve_app.routing.decisions import Decisions, decisions_text
from serve_app.tally import ArmKey
from serve_app.tasks import failures_text, spawn
from serve_app.tenancy.authentication import Authenticator
from serve_app.tenancy.leases import Grants, LeaseRequest
from serve_app.tenancy.limits import Limits
from serve_app.tenancy.table import KeyTable
from tests.ingress_app import finished_record

HELP_TEXTS = {
    "a_count": 'back\\slash\nand "quotes"',
    "a_gauge": "without labels",
    "no_rows": "without rows",
    "a_time": "labels before and after le",
}
ENGINE = {"model_name": "base", "engine": "e0"}
# type, name, labels without `le`, and HELP of every family, in the order of each text.
FAMILIES = Path(__file__).parent / "metric_families.txt"


class Library(Collector):
    """The families of `ours` as prometheus_client has them."""

    def __init__(self, seconds: Histogram) -> None:
        self._seconds = seconds

    def collect(self) -> Iterator[Metric]:
        count = CounterMetricFamily("a_count", HELP_TEXTS["a_count"], labels=["z", "b"])
        count.add_metric(['"quoted"\\path\n', "x"], 1_234_567)
        count.add_metric(["", "y"], 0.25)
        yield count
        yield GaugeMetricFamily("a_gauge", HELP_TEXTS["a_gauge"], value=True)
        yield GaugeMetricFamily("no_rows", HELP_TEXTS["no_rows"], labels=["b"])
        times = HistogramMetricFamily("a_time", HELP_TEXTS["a_time"], labels=["z", "l2"])
        bounds = zip(self._seconds.bounds, (1, 1, 3, 4), strict=True)
        times.add_metric(["1", "2"], list(bounds), self._seconds.total)
        yield times


def test_families_are_rendered_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in HELP_TEXTS.items():
        monkeypatch.setitem(HELP, name, words)
    seconds = Histogram((0.5, 1.0, 20.0))
    for observed in (0.5, 3.0, 20.0, 1e7):
        seconds.observe(observed)
    ours = as_text(
        counter("a_count", {('"quoted"\\path\n', "x"): 1_234_567, ("", "y"): 0.25}, {}, "z", "b"),
        gauge("a_gauge", True),
        gauge("no_rows", {}, {}, "b"),
        histogram("a_time", {"2": seconds}, {"z": "1"}, "l2"),
    )
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Library(seconds))
    assert ours == generate_latest(registry)


async def test_every_family_keeps_its_name_type_labels_help_and_place() -> None:
    await spawn(asyncio.sleep(0), "a-task")
    found = [line for text in every_text() for line in families_of(text.decode())]
    assert found == FAMILIES.read_text().splitlines()


def test_the_table_of_help_texts_has_the_families_that_there_are() -> None:
    families = [line.split(" ")[:2] for line in FAMILIES.read_text().splitlines()]
    names = {kind: set[str]() for kind in ("counter", "gauge", "histogram")}
    for kind, labelled in families:
        names[kind].add(labelled.partition("{")[0])
    counters = {name.removesuffix("_total") for name in names["counter"]}
    assert set(HELP) == counters | names["gauge"] | names["histogram"]


def families_of(text: str) -> list[str]:
    helps: dict[str, str] = {}
    types: dict[str, str] = {}
    labels: dict[str, list[str]] = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# HELP"):
            _, _, family, helps[family] = line.split(" ", 3)
        elif line.startswith("# TYPE"):
            types[family] = line.split(" ", 3)[3]
        else:
            names = re.findall(r'[{,](\w+)="', line)
            assert line.startswith(family)
            labels.setdefault(family, [name for name in names if name != "le"])
    return [f"{types[name]} {name}{{{','.join(labels[name])}}} {helps[name]}" for name in helps]


async def _no_grants(request: LeaseRequest) -> dict[str, Grants]:
    return {}


def every_text() -> Iterator[bytes]:
    """Yields the text of each process's parts, with a sample in every family."""
    yield EngineMetrics("base", "e0", 16).text()
    ingress = IngressMetrics("i0")
    ingress.answered("/v1/models", 200)
    yield ingress.text(0)
    decisions = Decisions()
    decisions.reasons["load"] += 1
    yield decisions_text([("base", decisions)], "i0")
    migrations = MigrationMetrics("i0")
    migrations.moves["base", "death", "ok"] += 1
    migrations.lost["base"] += 1
    migrations.quarantined["base"] += 1
    migrations.gap("base", 0.5)
    yield migrations.text()
    queues = QueueStats("i0", ())
    queues.of_base("base")
    queues.count_tokens("tenant", 1)
    yield queues.text()
    arms = ArmStats()
    arms.begin(ArmKey("a", "canary", 2, "d"))
    yield arms.text("i0", [("a", 1)], 0, 0)
    yield Authenticator(KeyTable(), None).text("i0")
    yield Limits("i0", _no_grants, lambda: 1).text()
    requests = RequestMetrics("i0", 1, 1, ())
    requests.observe(finished_record("base", "adapter", "tenant"))
    yield requests.text(0.0)
    yield RequestLog(logging.NullHandler(), "i0").text()
    resident = Resident("d", True, 1, 1, 0, False, False, 0.0)
    version = AdapterVersion("a", 1, "d", "base", "b", 16, (), "")
    yield residents_text([resident], {"d": version}, ENGINE)
    yield cache_text(CacheStats(0, 1, 0, 0, 0, 0, 0), 0, ENGINE)
    yield LoadTimes().text(ENGINE)
    starts = StartLog()
    starts.begin("app", 0.0)
    starts.end("app", "base", 1.0, is_cold=True)
    line = BaseLine("base", 1, "running", "", "file", 2, None, None, None, "wait", "app", "d")
    yield starts.text([line])
    yield Watcher(Catalog, 1.0).metrics(0.0)
    yield failures_text({"process": "ingress", "ingress": "i0"})
    yield budgets_text({("key", "tenant", "day"): 0.5})
