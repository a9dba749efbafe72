"""`docs/metrics.md`, from the texts that the processes render.

Each collector gets one event of each kind, so that every family has a sample and thereby labels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from engine.types import Resident
from registry.cache import CacheStats
from registry.catalog import Catalog
from registry.entities import AdapterVersion
from serve_app.canary.arm_stats import ArmStats
from serve_app.control.base_status import StartLog
from serve_app.control.key_calls import budgets_text
from serve_app.control.watcher import Watcher
from serve_app.metrics.engine import EngineMetrics
from serve_app.metrics.exposition import join_texts
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
from tests.docs.markdown import GENERATED, table
from tests.ingress_app import finished_record

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
        "Ingress": asyncio.run(_ingress()),
        "Manager": _manager(),
        "Every process": asyncio.run(_tasks()),
    }


def _engine() -> bytes:
    return EngineMetrics("m", "e", block_size=16).text()


def _replica() -> bytes:
    stats = CacheStats(0, 1, 0, 0, 0, 0, 0)
    resident = Resident("d", True, 1, 1, 0, False, False, 0.0)
    version = AdapterVersion("a", 1, "d", "m", "b", 16, (), "")
    adapters = residents_text([resident], {"d": version}, _LABELS)
    return join_texts([adapters, cache_text(stats, 0, _LABELS), LoadTimes().text(_LABELS)])


async def _ingress() -> bytes:
    metrics = IngressMetrics("i")
    metrics.answered("/v1/models", 200)
    decisions = Decisions()
    decisions.reasons["adapter"] += 1
    routed = decisions_text([("m", decisions)], "i")
    queue = QueueStats("i", ("t",))
    queue.of_base("m").sheds["full"] += 1
    queue.count_tokens("t", 1)
    migration = MigrationMetrics("i")
    migration.moves["m", "death", "ok"] += 1
    migration.gap("m", 0.1)
    migration.lost["m"] += 1
    migration.quarantined["m"] += 1
    arms = ArmStats()
    arms.begin(ArmKey("a", "canary", 1, "digest"))
    split = arms.text("i", [("a", 1)], 0, 0)
    limits = Limits("i", _no_grants, lambda: 1)
    requests = RequestMetrics("i", 1, 1, ())
    requests.observe(finished_record("m", "a", "t"))
    log = RequestLog(logging.NullHandler(), "i").text()
    keys = Authenticator(KeyTable(), None).text("i")
    parts = [metrics.text(0), routed, queue.text(), migration.text(), split, limits.text(), keys]
    return join_texts([*parts, requests.text(0.0), log])


async def _no_grants(request: LeaseRequest) -> dict[str, Grants]:
    return {}


def _manager() -> bytes:
    starts = StartLog()
    starts.begin("app", 0.0)
    starts.end("app", "m", 1.0, is_cold=True)
    line = BaseLine(*("m", 1, "running", "", "file"), 1, 0.0, 1.0, None, "wait", "app", "digest")
    budgets = budgets_text({("k", "t", "day"): 0.5})
    return join_texts([Watcher(Catalog, 1.0).metrics(0.0), starts.text([line]), budgets])


async def _tasks() -> bytes:
    await spawn(asyncio.sleep(0), "a task")
    return failures_text({"process": "engine, replica, ingress or manager", **_LABELS})


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
