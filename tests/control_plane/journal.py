"""The journal of an order: the effects of its steps on which promises depend."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Journal:
    """The journal of a single order."""

    # (name, digest) that were rolled back in this order and not started again since.
    rolled_back: dict[tuple[str, str], str] = field(default_factory=dict)
    unsound: set[str] = field(default_factory=set)  # adapters whose canary had a bad outcome
    num_bad: Counter[tuple[str, str]] = field(default_factory=Counter)  # by canary, in one trial
    num_good: Counter[tuple[str, str]] = field(default_factory=Counter)
    tampered: set[tuple[str, int]] = field(default_factory=set)  # versions with strange tags
    # Versions that a name may have meant at any time: its champion, or where it had none any.
    meanings: dict[str, set[int]] = field(default_factory=dict)
    registered: set[str] = field(default_factory=set)  # adapters that are still there
    disturbed: set[str] = field(default_factory=set)  # bases whose engines the world killed
    rested: set[str] = field(default_factory=set)  # bases that an operator put to sleep
    asked_s: dict[str, float] = field(default_factory=dict)  # by base digest: the last request
    served_calm: set[str] = field(default_factory=set)  # ingresses that did so once
    num_rollbacks: Counter[str] = field(default_factory=Counter)
    tracebacks: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # situations that occurred in the order

    def touch(self, name: str) -> None:
        """Notes that the adapter's canary changed, or may have changed."""
        for key in [key for key in self.rolled_back if key[0] == name]:
            del self.rolled_back[key]
        for counts in (self.num_bad, self.num_good):
            for key in [key for key in counts if key[0] == name]:
                del counts[key]

    def forget_trials(self) -> None:
        """Notes that counts may be lost."""
        self.num_bad.clear()
        self.num_good.clear()


class Tracebacks(logging.Handler):
    """The errors that were not injected."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and "injected" not in _chain(error):
            self._found.append(f"{record.getMessage()}: {type(error).__name__}: {error}"[:500])


def _chain(error: BaseException | None) -> str:
    words = ""
    while error is not None:
        words += str(error)
        error = error.__cause__ or error.__context__
    return words
