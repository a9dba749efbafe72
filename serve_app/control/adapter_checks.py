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
from serve_app.control.adapter_plan import Key, key_of
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

_MAX_TRIES = 3
_PAUSE_S = 300.0  # after a check without a verdict

Check = Callable[[AdapterVersion], None]


class AdapterChecks:
    """All methods belong to the event loop."""

    def __init__(self) -> None:
        # Of versions without a verdict: the number of tries, and the time of the next.
        self._tries: dict[Key, tuple[int, float]] = {}
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
        self._tries = {key_of(one): self._tries.get(key_of(one), (0, 0.0)) for one in unmeasured}
        for one in unmeasured:
            num_tries, next_s = self._tries[key_of(one)]
            if num_tries < _MAX_TRIES and loop.time() >= next_s:
                # Counted first: a check whose tags are lost or never read is not repeated for ever.
                self._tries[key_of(one)] = num_tries + 1, next_s
                self._task = spawn(self._run(one, check), "check-adapter")
                return

    async def _run(self, version: AdapterVersion, check: Check) -> None:
        name = f"{version.name}@{version.version}"
        try:
            await asyncio.to_thread(check, version)
            logger.info("%s was checked; the verdict is in its tags", name)
        except Exception as error:
            next_s = asyncio.get_running_loop().time() + _PAUSE_S
            self._tries[key_of(version)] = self._tries[key_of(version)][0], next_s
            if isinstance(error, RegistryError | OSError):
                logger.warning("%s could not be checked: %s", name, error)
            else:
                logger.exception("%s could not be checked", name)
        finally:
            self._task = None
