"""The manager's part of canaries: judges them, rolls back bad canaries, and applies an operator's
changes.

The desired state is in the registry (aliases `canary` and `shadow`, settings). A rollback counts at
once, as a veto in the view, and is written to the registry as soon as possible. Independent of
requests and of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from registry.catalog import Catalog
from registry.entities import AdapterVersion
from registry.errors import NotFoundError, RegistryError
from serve_app.canary.commands import ROLLED_BACK, CanaryCommand
from serve_app.canary.split import CANARY, Split, Traffic, read_traffic
from serve_app.canary.status import CanaryStatus, status_of
from serve_app.canary.trials import Trials
from serve_app.config import CanaryArgs
from serve_app.messages import CanaryChange, IngressReport
from serve_app.platform_view import CanaryState, RegistryReader
from serve_app.tasks import spawn

logger = logging.getLogger(__name__)

_RETRY_S = 2.0

Key = tuple[str, str]  # the adapter's name, the version's digest


@dataclass(slots=True, eq=False)
class _Veto:
    name: str
    version: int
    digest: str
    reason: str
    at: str  # ISO 8601
    written_s: float | None = None  # when the registry had it, or did not need it any more


class Canaries:
    """All methods belong to the manager's event loop."""

    def __init__(
        self,
        rule: CanaryArgs,
        registry: Callable[[], RegistryReader],
        look: Callable[[], Catalog],
        wake: Callable[[], None],
    ) -> None:
        """`registry`: raises RegistryUnavailableError until it was read. `look`: blocks; returns
        the registry's present catalog, with the default aliases that apply here. `wake`: asks for a
        look at the registry soon; called after each written rollback."""
        self._rule = rule
        self._registry, self._look, self._wake = registry, look, wake
        self._trials = Trials(rule)
        self._vetoes: dict[Key, _Veto] = {}
        self._num_rollbacks: Counter[str] = Counter()
        self._writing = asyncio.Lock()  # held during each change of the registry
        self._catalog = Catalog()
        self._running: frozenset[str] = frozenset()
        self._served: frozenset[str] = frozenset()
        self._traffic = Traffic()
        self._problems: frozenset[tuple[str, str]] = frozenset()

    def add_report(self, report: IngressReport) -> None:
        self._trials.add_report(report, _now_s())

    def review(
        self,
        catalog: Catalog,
        running: Collection[str],
        looked_s: float,
        served: Collection[str] = (),
    ) -> CanaryState:
        """Judges the running trials; called with each look at the platform. Returns the state for
        the view. `looked_s`: the loop's time at which the look that found this catalog began.
        `running`, `served`: see `read_traffic`."""
        self._catalog = catalog
        self._running, self._served = frozenset(running), frozenset(served)
        now_s = _now_s()
        self._lift_vetoes(looked_s)
        self._update_trials(now_s)
        has_failed = False
        for name, verdict in self._trials.verdicts(now_s).items():
            split = self._traffic.splits[name]
            if verdict.reason is not None and split.canary.share > 0:
                self._roll_back(split, verdict.reason)
                has_failed = True
        if has_failed:
            self._update_trials(now_s)
        self._log_problems()
        return CanaryState(
            tuple((name, digest, veto.reason) for (name, digest), veto in self._vetoes.items()),
            tuple(sorted(self._num_rollbacks.items())),
        )

    def statuses(self) -> tuple[CanaryStatus, ...]:
        """Returns the status of every adapter with a canary or shadow alias, or a setting of
        these."""
        splits = self._traffic.splits.items()
        return tuple(self._status(self._catalog, name, split) for name, split in splits)

    async def change(self, change: CanaryChange) -> CanaryStatus:
        """Returns the status after the change, as the registry has it then."""
        async with self._writing:
            registry, vetoes = self._registry(), self._reasons()

            def run() -> tuple[AdapterVersion | None, Catalog]:
                command = CanaryCommand(change, registry, self._look(), vetoes)
                return command.run(), self._look()

            on_trial, catalog = await asyncio.to_thread(run)
            if on_trial is not None:  # an earlier rollback of it does not count any more
                self._vetoes.pop((change.name, on_trial.digest), None)
        traffic = read_traffic(catalog, self._running, self._reasons(), self._served)
        return self._status(catalog, change.name, traffic.splits.get(change.name))

    def _status(self, catalog: Catalog, name: str, split: Split | None) -> CanaryStatus:
        rolled_back = catalog.setting(name, ROLLED_BACK)
        if split is None:
            status = CanaryStatus(name, rolled_back=rolled_back)
        else:
            trial = self._trials.by_name.get(name)
            status = status_of(split, trial, rolled_back, self._rule, _now_s())
        with suppress(RegistryError):
            if (stable := catalog.resolve(name).adapter) is not None:
                alias = catalog.default_aliases.of(stable)
                return replace(status, stable_version=stable.version, stable_alias=alias)
        return status

    def _update_trials(self, now_s: float) -> None:
        self._traffic = read_traffic(self._catalog, self._running, self._reasons(), self._served)
        self._trials.follow(self._traffic.splits, now_s)

    def _reasons(self) -> dict[Key, str]:
        return {key: veto.reason for key, veto in self._vetoes.items()}

    def _roll_back(self, split: Split, reason: str) -> None:
        version = split.canary.version
        assert version is not None
        logger.error("canary %s@%d is rolled back: %s", split.name, version.version, reason)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        veto = _Veto(split.name, version.version, version.digest, reason, at)
        self._vetoes[split.name, version.digest] = veto
        self._num_rollbacks[split.name] += 1
        spawn(self._write(veto), "write-rollback")

    async def _write(self, veto: _Veto) -> None:
        """Writes a rollback, retrying until the registry has it or it does not apply any more."""
        while True:
            async with self._writing:
                if self._vetoes.get((veto.name, veto.digest)) is not veto:
                    return
                try:
                    await asyncio.to_thread(_store, self._registry(), self._look, veto)
                except NotFoundError:  # deleted meanwhile
                    veto.written_s = _now_s()
                    return
                except RegistryError as error:
                    logger.warning("retrying to write the rollback of %s: %s", veto.name, error)
                except Exception:
                    logger.exception("retrying to write the rollback of %s", veto.name)
                else:
                    veto.written_s = _now_s()
                    self._wake()
                    return
            await asyncio.sleep(_RETRY_S)

    def _lift_vetoes(self, looked_s: float) -> None:
        """Ends the vetoes that were written before the look began: its catalog has the weight 0, or
        a weight that was raised since. No veto ends by time, nor by an older catalog."""
        for key, veto in tuple(self._vetoes.items()):
            if veto.written_s is not None and veto.written_s < looked_s:
                del self._vetoes[key]

    def _log_problems(self) -> None:
        """Logs each problem once for as long as it lasts."""
        problems = frozenset(
            (name, problem)
            for name, split in self._traffic.splits.items()
            for problem in split.problems
        )
        for name, problem in sorted(problems - self._problems):
            logger.warning("adapter %s: %s", name, problem)
        self._problems = problems


def _store(registry: RegistryReader, look: Callable[[], Catalog], veto: _Veto) -> None:
    """Writes a rollback, unless another version has the alias by now. The weight first, as it sends
    the requests. The bare name need not resolve for that."""
    if not any(
        adapter.name == veto.name and adapter.digest == veto.digest and CANARY in adapter.aliases
        for adapter in look().adapters
    ):
        return
    registry.set_setting(veto.name, "canary_weight", "0")
    record = {"version": veto.version, "reason": veto.reason, "time": veto.at}
    registry.set_setting(veto.name, ROLLED_BACK, json.dumps(record))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
