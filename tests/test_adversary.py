"""The short form of the benchmark of hostile clients, against a live server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The attacks of each kind that last seconds; the benchmark runs all of them, ten times as long.
ATTACKS = (
    *("hostile_tags", "hostile_versions", "slow_bodies", "huge_headers", "session_strings"),
    *("large_texts", "json_bombs", "request_ids", "foreign_hosts", "leaving_clients"),
    *("unknown_names", "log_growth", "tenant_flood"),
)


@pytest.mark.serve
@pytest.mark.slow
def test_hostile_clients_and_tags_break_no_promise_to_honest_clients() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.adversary", "--paced", "--short"]
    done = subprocess.run(
        [*command, "--untimed", "--only", ",".join(ATTACKS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    broken = {line["attack"]: line["broken"] for line in lines if line.get("broken")}
    assert not broken
    assert {line["attack"] for line in lines if "attack" in line} == set(ATTACKS), done.stderr
    assert lines[-1] == {"pass": True}
