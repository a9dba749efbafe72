"""The outcome of one client, read from the XML report of its pytest."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

from tests.conformance import known

SHOWN_CHARACTERS = 300  # characters of a reason


@dataclass(slots=True)
class Outcome:
    """The result of one client. `failed` maps a test's name to its reason."""

    client: str
    version: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0
    called_out: list[str] = field(default_factory=list)
    not_run: str = ""  # the reason, if the client's tests did not run at all

    @property
    def known(self) -> dict[str, str]:
        """The failed tests that are known, with their causes."""
        causes = {test: known.cause(self.client, test) for test in self.failed}
        return {test: cause for test, cause in causes.items() if cause is not None}

    @property
    def unexpected(self) -> dict[str, str]:
        """Failures without a known cause, and known failures that pass."""
        wrong = {test: why for test, why in self.failed.items() if test not in self.known}
        for test in self.passed:
            if (cause := known.cause(self.client, test)) is not None:
                wrong[test] = f"passes, and known.py expects it to fail: {cause}"
        return wrong

    @property
    def is_good(self) -> bool:
        return not self.unexpected and not self.not_run


def read_junit(junit: Path, into: Outcome) -> None:
    """Adds the report's tests to the outcome."""
    for case in ET.parse(junit).iter("testcase"):
        # The class's name follows the module's: `client_langchain.TestChatOpenAI`.
        group = case.get("classname", "").partition(".")[2]
        name = f"{group}::{case.get('name')}" if group else str(case.get("name"))
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
            into.failed[name] = " ".join(problem.get("message", "").split())[:SHOWN_CHARACTERS]
        elif case.find("skipped") is not None:
            into.skipped += 1
        else:
            into.passed.append(name)
