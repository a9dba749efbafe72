"""The dashboards and alerts in `deploy/`: valid, and about series that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.metrics.families import HELP

DEPLOY = Path(__file__).parent.parent / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
RULES = DEPLOY / "prometheus" / "rules.yml"
_NAME = re.compile(r"\b(?:vllm:|loraplex_|http_)\w+")
_SUFFIX = re.compile(r"(_bucket|_sum|_count|_total)$")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


def is_exported(name: str) -> bool:
    return name in HELP or _SUFFIX.sub("", name) in HELP


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_only_for_series_that_are_exported(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    found = list(expressions(dashboard))
    assert len(found) >= len(dashboard["panels"]) > 5
    queries = [one["query"]["query"] for one in dashboard["templating"]["list"][1:]]
    names = {name for text in (*found, *queries) for name in _NAME.findall(text)}
    assert names
    assert [name for name in names if not is_exported(name)] == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_the_panels_of_a_dashboard_do_not_overlap(path: Path) -> None:
    dashboard = json.loads(path.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_alerts_ask_only_for_series_that_are_exported() -> None:
    names = set(re.findall(r"\b(?:vllm:|loraplex_)\w+", RULES.read_text()))
    assert [name for name in names if not is_exported(name)] == []


@needs_promtool
def test_the_rules_are_valid_and_fire_as_their_tests_say() -> None:
    for command in (("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")):
        done = subprocess.run(
            ["promtool", *command], cwd=RULES.parent, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
