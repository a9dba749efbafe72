"""`docs/metrics.md`, from the texts that the processes render.

Each collector gets one event of each kind, so that every family has a sample and thereby labels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from registry.cache import CacheStats
from serve_app.canary.metrics import arms_text
from serve_app.control.base_starts import StartLog
from serve_app.control.registry_metrics import RegistryMetrics
from serve_app.control.watcher import Watcher
from serve_app.metrics.adapter_loads import LoadTimes
from serve_app.metrics.cache import cache_text
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.exposition import join_texts
from serve_app.metrics.ingress import IngressMetrics, RoutingCounts
from serve_app.metrics.migration import MigrationMetrics
from serve_app.metrics.queue import QueueStats
from serve_app.platform_view import BaseLine
from serve_app.tally import ArmCounts, ArmKey
from serve_app.tasks import failures_text, spawn
from tests.docs.markdown import GENERATED, table

INTRODUCTION = """
# Metrics

`GET /metrics` is in Prometheus' text format and covers the whole server: every engine, the manager,
and the sum over all ingresses (without the label `ingress`), at most `ingress.metrics_max_age_s`
old. Whichever ingress answers returns the same. A replica that does not answer within two seconds
is left out. Names that begin with `vllm:` are vLLM's, so that its dashboards work. Histograms also
have the label `le` and the suffixes `_bucket`, `_count` and `_sum`.

In a sound server `loraplex_task_failures_total` and `loraplex_engine_missed_wakeups_total` stay
at 0.
"""
_LABELS = {"model_name": "m", "engine": "e"}


def metrics_page() -> str:
    parts = [GENERATED, INTRODUCTION]
    for title, text in _texts().items():
        parts += [f"\n## {title}\n\n", table(("name", "type", "labels", "meaning"), _rows(text))]
    return "".join(parts)


def _texts() -> Mapping[str, bytes]:
    return {
        "Engine": join_texts([_engine(), _replica()]),
        "Ingress": _ingress(),
        "Manager": _manager(),
        "Every process": asyncio.run(_tasks()),
    }


def _engine() -> bytes:
    return EngineMetrics("m", "e", block_size=16, max_adapters=0).text()


def _replica() -> bytes:
    stats = CacheStats(0, 1, 0, 0, 0, 0, 0)
    return join_texts([cache_text(stats, 0, _LABELS), LoadTimes().text(_LABELS)])


def _ingress() -> bytes:
    metrics = IngressMetrics("i")
    metrics.answered("/v1/models", 200)
    routed = RoutingCounts("m", {"adapter": 1}, 1)
    queue = QueueStats("i", ("t",))
    queue.of_base("m").sheds["full"] += 1
    queue.count_tokens("t", 1)
    migration = MigrationMetrics("i")
    migration.moved("m", "death", is_ok=True)
    migration.gap("m", 0.1)
    migration.lost("m")
    migration.quarantined("m")
    arms = [(ArmKey("a", "canary", 1, "digest"), ArmCounts())]
    split = arms_text("i", arms, [("a", 1)], 0, 0)
    return join_texts([metrics.text(0, [routed]), queue.text(), migration.text(), split])


class _Watcher:
    """A watcher that has seen nothing: every number is 0."""

    catalog = error = None

    def subscribe(self, call: object) -> None:
        pass

    def __getattr__(self, name: str) -> float:
        return 0.0


def _manager() -> bytes:
    starts = StartLog()
    starts.begin("app", 0.0)
    starts.end("app", "m", 1.0, is_cold=True)
    line = BaseLine(*("m", 1, "running", "", "file"), 1, 0.0, 1.0, None, "wait", "app", "digest")
    return join_texts([RegistryMetrics(cast("Watcher", _Watcher())).text(), starts.text([line])])


async def _tasks() -> bytes:
    await spawn(asyncio.sleep(0), "a task")
    return failures_text({"process": "engine, replica, ingress or manager"})


def _rows(text: bytes) -> list[tuple[str, str, str, str]]:
    """One row for each family, by the lines # HELP and # TYPE and the labels of its samples."""
    words: dict[str, str] = {}
    kinds: dict[str, str] = {}
    labels: dict[str, set[str]] = {}
    family = ""
    for line in text.decode().splitlines():
        if line.startswith("# "):
            _, kind, family, rest = line.split(" ", 3)
            (words if kind == "HELP" else kinds)[family] = rest
        elif "{" in line:
            inside = line[line.index("{") + 1 : line.rindex("}")]
            names = {pair.split("=")[0] for pair in inside.split('",') if "=" in pair}
            labels.setdefault(family, set()).update(names - {"le", "ingress"})
    return [
        (
            f"`{name}`",
            kinds[name],
            ", ".join(f"`{one}`" for one in sorted(labels.get(name, ()))),
            text,
        )
        for name, text in sorted(words.items())
    ]
