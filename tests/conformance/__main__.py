"""`python -m tests.conformance`: runs the clients, prints a table, fails on a surprise."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from datetime import date
from pathlib import Path

from tests.conformance.clients import CLIENTS
from tests.conformance.outcome import Outcome
from tests.conformance.report import details, line, page
from tests.conformance.run import run_clients
from tests.demo_server import ROOT

PAGE = ROOT / "docs" / "conformance.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--clients", default="", help="names, separated by commas; default: all")
    parser.add_argument("--home", type=Path, help="a prepared home; default: a temporary one")
    parser.add_argument("--write", action="store_true", help=f"writes their rows of {PAGE.name}")
    parser.add_argument("--lines", type=Path, help="a file for the outcomes as JSON lines")
    options = parser.parse_args()
    names = [name for name in options.clients.split(",") if name]
    if unknown := set(names) - {client.name for client in CLIENTS}:
        parser.error(f"--clients: no client is named {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if not names or client.name in names]

    def report(outcome: Outcome) -> None:
        print("\n".join([line(outcome), *details(outcome)]), flush=True)
        if options.lines:
            with options.lines.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server's end runs in a `finally`
    outcomes = run_clients(chosen, options.home, report)
    if options.write:
        before = PAGE.read_text() if PAGE.exists() else ""
        PAGE.write_text(page(outcomes, before, date.today()))
    passed = sum(len(outcome.passed) for outcome in outcomes)
    failed = sum(len(outcome.failed) for outcome in outcomes)
    print(f"{passed} passed, {failed} failed, {sum(o.skipped for o in outcomes)} skipped")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
