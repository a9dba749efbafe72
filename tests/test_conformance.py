"""The judge of the conformance run: what counts as good, and that each client can be set up."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from tests.conformance import environments, known
from tests.conformance.clients import CLIENTS
from tests.conformance.outcome import Outcome, read_junit
from tests.conformance.report import page

FOLDER = Path(environments.__file__).parent
JUNIT = """<testsuites><testsuite>
<testcase classname="client_x" name="test_good"/>
<testcase classname="client_x.TestSuite" name="test_bad"><failure message="404 &#10;no"/></testcase>
<testcase classname="client_x" name="test_broken"><error message="fixture"/></testcase>
<testcase classname="client_x" name="test_left_out"><skipped message="no images"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    junit = tmp_path / "junit.xml"
    junit.write_text(JUNIT)
    outcome = Outcome("x", "1.0")
    read_junit(junit, outcome)
    return outcome


def test_a_report_is_read(outcome: Outcome) -> None:
    assert outcome.passed == ["test_good"]
    assert outcome.failed == {"TestSuite::test_bad": "404 no", "test_broken": "fixture"}
    assert outcome.skipped == 1
    assert not outcome.is_good


def test_known_failures_are_good(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("TestSuite::test_bad", "test_broken")
    entries = tuple(known.Known("x", name, "the client's fault") for name in names)
    monkeypatch.setattr(known, "KNOWN", entries)
    assert outcome.is_good
    assert set(outcome.known) == set(names)


def test_a_known_failure_that_passes_is_not_good(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "KNOWN", (known.Known("x", "test_good", "its cause"),))
    assert "its cause" in outcome.unexpected["test_good"]


def test_a_run_of_some_clients_keeps_the_rows_of_the_others() -> None:
    barred = Outcome("openai", "1.0", ["a"], {"test_b": "a | b"}, seconds=4.0)
    first = page([barred, Outcome("dspy", "1.0", ["a"])], "", date(2026, 1, 1))
    second = page([Outcome("dspy", "2.0", ["a", "b"])], first, date(2026, 2, 2))
    kept = [line for line in first.splitlines() if line.startswith("| openai")]
    assert kept == [r"| openai | 1.0 | 2026-01-01 | 1 | 1 | 0 | 4 | `test_b`: a \| b |"]
    rows = [line for line in second.splitlines() if line.startswith("| ")]
    assert rows[2:] == [*kept, "| dspy | 2.0 | 2026-02-02 | 2 | 0 | 0 | 0 |  |"]


def test_a_client_that_was_renamed_loses_its_row() -> None:
    before = page([Outcome("openai", "1.0")], "", date(2026, 1, 1))
    after = page([], before.replace("| openai |", "| former |"), date(2026, 1, 1))
    assert "former" not in after


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_has_pins_and_a_module(client) -> None:
    assert (FOLDER / client.module).is_file()
    assert all("==" in one for one in environments.requirements(client)[: len(client.packages)])


def test_known_failures_name_clients() -> None:
    assert {one.client for one in known.KNOWN} <= {client.name for client in CLIENTS}
