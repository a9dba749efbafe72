"""The quarantine of bad digests: the reason of each, and when it may be tried again.

Every failure doubles the pause, up to a cap, with jitter, so that replicas do not retry in step. A
success, or a day after its pause, ends it. Unlike with tenacity, which repeats a call, no caller
waits: requests fail at once with the stored reason.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from registry.errors import QuarantinedError
from registry.files import disk_errors

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 600.0
_FORGOTTEN_AFTER_S = 24 * 3600.0
_MAX_REASON_CHARS = 2000
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Verdict:
    reason: str
    num_failures: int
    retry_at_s: float  # wall clock, as it outlives processes


def pause_s(num_failures: int, random_share: float) -> float:
    """Returns the pause after the n-th failure in a row: between half and the whole of
    first * 2^(n-1), capped."""
    longest = min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 32), LONGEST_PAUSE_S)
    return longest * (1 + random_share) / 2


class Quarantine:
    """A quarantine in memory. Belongs to one thread, or to callers that hold the digest's lock."""

    def __init__(
        self,
        now_s: Callable[[], float] = time.time,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        self._now_s = now_s
        self._random_share = random_share
        self._verdicts: dict[str, Verdict] = {}

    def check(self, digest: str) -> None:
        """Raises QuarantinedError while the digest's pause lasts."""
        verdict = self._known(digest)
        if verdict is not None and (left_s := verdict.retry_at_s - self._now_s()) > 0:
            raise QuarantinedError(verdict.reason, max(1, round(left_s)))

    def add(self, digest: str, reason: str) -> Verdict:
        known = self._known(digest)
        num_failures = 1 if known is None else known.num_failures + 1
        left_s = pause_s(num_failures, self._random_share())
        verdict = Verdict(reason[:_MAX_REASON_CHARS], num_failures, self._now_s() + left_s)
        self._write(digest, verdict)
        logger.warning(
            "%s is bad (%d times), next try in %.0f s: %s",
            digest[:12],
            num_failures,
            left_s,
            verdict.reason,
        )
        return verdict

    def clear(self, digest: str) -> None:
        self._verdicts.pop(digest, None)

    def verdicts(self) -> dict[str, Verdict]:
        """Returns the verdict of each digest that failed and did not succeed since."""
        known = {digest: self._known(digest) for digest in self._digests()}
        return {digest: verdict for digest, verdict in known.items() if verdict is not None}

    def _known(self, digest: str) -> Verdict | None:
        verdict = self._read(digest)
        if verdict is None:
            return None
        left_s = verdict.retry_at_s - self._now_s()
        # If the pause exceeds the longest possible pause, the clock was set back.
        if -_FORGOTTEN_AFTER_S < left_s <= LONGEST_PAUSE_S:
            return verdict
        self.clear(digest)
        return None

    def _digests(self) -> list[str]:
        return list(self._verdicts)

    def _read(self, digest: str) -> Verdict | None:
        return self._verdicts.get(digest)

    def _write(self, digest: str, verdict: Verdict) -> None:
        self._verdicts[digest] = verdict


class FolderQuarantine(Quarantine):
    """A quarantine in files, for all processes of a node, now and later. Callers that check or
    change a digest hold its lock."""

    def __init__(
        self,
        folder: Path,
        now_s: Callable[[], float] = time.time,
        random_share: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(now_s, random_share)
        self._folder = folder
        with disk_errors():
            folder.mkdir(parents=True, exist_ok=True)
            self.verdicts()  # removes the expired files

    def clear(self, digest: str) -> None:
        with suppress(FileNotFoundError):
            (self._folder / digest).unlink()

    def _digests(self) -> list[str]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:  # removed by a user
            return []
        return [name for name in names if _DIGEST.fullmatch(name)]

    def _read(self, digest: str) -> Verdict | None:
        try:
            row = json.loads((self._folder / digest).read_bytes())
            return Verdict(str(row["reason"]), int(row["num_failures"]), float(row["retry_at_s"]))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):  # truncated by a crash
            self.clear(digest)
            return None

    def _write(self, digest: str, verdict: Verdict) -> None:
        fresh = self._folder / f"{digest}.new"  # safe: the caller holds the digest's lock
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # a user may have removed it
            fresh.write_text(json.dumps(asdict(verdict)))
            fresh.rename(self._folder / digest)
        except OSError as error:  # such as a full disk: the next request retries
            logger.warning("the verdict on %s cannot be kept: %s", digest[:12], error)
