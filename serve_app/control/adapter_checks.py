"""Checks adapter versions that were never measured, singly and while the server serves: their
effect, or why they cannot be served, becomes tags of the version, which a later poll reads.

`loraplex register` checks its adapters; plain MLflow calls do not. The caller passes the check.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import RegistryError
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

_MAX_TRIES = 3
_PAUSE_S = 300.0  # after a check without a verdict

Key = tuple[str, str]  # digests of the base and of the adapter
Check = Callable[[AdapterVersion], None]


class AdapterChecks:
    """All methods belong to the event loop."""

    def __init__(self) -> None:
        self._tries: dict[Key, int] = {}  # of versions without a verdict
        self._not_before_s: dict[Key, float] = {}
        self._task: asyncio.Task[None] | None = None

    def update(self, catalog: Catalog, check: Check) -> None:
        """Begins the next check unless a check runs. Returns at once; called in every round.
        `check` blocks; it raises RegistryError if it reached no verdict."""
        loop = asyncio.get_running_loop()
        if self._task is not None:
            return
        bases = {base.digest for base in catalog.bases}
        unmeasured = [
            one for one in catalog.adapters if not one.effect and one.base_digest in bases
        ]
        keys = {_key(one) for one in unmeasured}
        self._tries = {key: tries for key, tries in self._tries.items() if key in keys}
        self._not_before_s = {k: until for k, until in self._not_before_s.items() if k in keys}
        for one in unmeasured:
            is_due = loop.time() >= self._not_before_s.get(_key(one), 0.0)
            if is_due and self._tries.get(_key(one), 0) < _MAX_TRIES:
                self._task = spawn(self._run(one, check), "check-adapter")
                return

    async def _run(self, version: AdapterVersion, check: Check) -> None:
        name = f"{version.name}@{version.version}"
        # Counted first: a check whose tags are lost or never read is not repeated for ever.
        self._tries[_key(version)] = self._tries.get(_key(version), 0) + 1
        try:
            await asyncio.to_thread(check, version)
            logger.info("%s was checked; the verdict is in its tags", name)
        except Exception as error:
            now_s = asyncio.get_running_loop().time()
            self._not_before_s[_key(version)] = now_s + _PAUSE_S
            if isinstance(error, RegistryError | OSError):
                logger.warning("%s could not be checked: %s", name, error)
            else:
                logger.exception("%s could not be checked", name)
        finally:
            self._task = None


def _key(version: AdapterVersion) -> Key:
    return version.base_digest, version.digest
