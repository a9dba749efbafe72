"""An engine replica of a fleet with its engine process: the faults of both, and the resources that
both must have released in the end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from engine.admission import EngineLimits
from registry.entities import AdapterVersion, BaseVersion
from registry.errors import ArtifactError
from serve_app.autoscaling.stats import ScalingStats
from serve_app.metrics.engine import EngineMetrics
from serve_app.platform_view import RegistryReader
from serve_app.replica.adapter_loads import AdapterLoads
from serve_app.replica.deployment import EngineReplica
from serve_app.replica.engine_actor import EngineHost
from tests.fleet_actor import PROCESS, Actor, Process
from tests.fleet_calls import ServeReplica
from tests.fleet_engine import REFUSED, StepEngine
from tests.virtual_loop import VirtualLoop
from tests.virtual_network import Connection

_EXIT_S = 0.5  # as `replica._EXIT_DELAY_S`
_LAST_LOOK_S = 0.5


class Files:
    """The part of a registry that a replica reads. Engines refuse `broken`; `lost` have no
    files."""

    def __init__(self, broken: str, lost: str) -> None:
        self._broken, self._lost = broken, lost

    def fetch(self, version: BaseVersion | AdapterVersion) -> Path:
        if version.name == self._lost:
            raise ArtifactError(f"the files of {version.name} are gone")
        return Path("/", REFUSED if version.name == self._broken else version.digest)

    def release(self, folder: Path) -> None:
        pass

    def verify(self, version: BaseVersion | AdapterVersion) -> bool:
        return True

    def local_digests(self) -> frozenset[str]:
        return frozenset()


class _Replica(EngineReplica):
    """A replica that is given its actor. `EngineNode` ends its process."""

    def __init__(self, engine_id: str, actor: Actor, limits: EngineLimits, files: Files) -> None:
        self._spec = cast(Any, SimpleNamespace(base=SimpleNamespace(name="base")))
        self._engine_id = engine_id
        self._actor = cast(Any, actor)
        self._limits = limits
        self._loads = AdapterLoads(cast(RegistryReader, files), actor.load_adapter.remote)
        self._scaling = ScalingStats(limits)
        self._is_dead = self._is_stopping = False
        self._death_message = "the engine of base died"

    def __del__(self) -> None:  # type: ignore[override]
        pass


class EngineNode:
    def __init__(
        self,
        loop: VirtualLoop,
        engine_id: str,
        engine: StepEngine,
        files: Files,
        max_ongoing: int,
    ) -> None:
        self.engine_id = engine_id
        self.engine = engine
        self.is_up = True  # Serve's controller lists it
        self.is_dead = False
        self.died_s: float | None = None  # when its engine died
        self.is_frozen = False
        self._loop = loop
        self.process = process = Process(loop, engine_id)
        self.metrics = EngineMetrics("base", engine_id, 16)
        self.host: EngineHost = process.run(EngineHost, engine, engine_id, self.metrics)
        self.actor = Actor(
            loop,
            process,
            {
                "submit": self.host.submit,
                "attend": self.host.attend,
                "abort_all": self.host.abort_all,
                "load_adapter": engine.load_adapter,
                "has_adapter": self.host.has_adapter,
            },
        )
        self.replica = process.run(_Replica, engine_id, self.actor, engine.limits, files)
        self.serve = ServeReplica(loop, process, engine_id, self.replica, max_ongoing)
        engine.crash = self.kill_engine
        process.run(self.host.start)
        self._watch = process.task(self._exit_with_the_engine())

    @property
    def connections(self) -> list[Connection]:
        return [
            one for one in self._loop.connections if one.ends[0].context[PROCESS] is self.process
        ]

    def kill_engine(self) -> None:
        """Acts as `kill -9` of the engine's process; its replica's follows."""
        if not self.actor.is_dead:
            self.died_s = self._loop.time()
            for connection in self.connections:
                connection.cut()
            self.host.stop()
            self.actor.kill()
            self.host.dead.set()

    def kill(self) -> None:
        """Ends both processes at once, as when their node is lost."""
        self._watch.cancel()
        self.kill_engine()
        self.replica._is_dead = True
        self.serve.kill()
        self.is_dead = True
        self.is_up = False

    def freeze(self) -> None:
        """Acts as SIGSTOP of the engine's process: its connections stay, but no frame comes."""
        self.is_frozen = True
        self.engine.is_hung = True
        self.actor.freeze()
        assert self.host._heartbeat is not None
        self.host._heartbeat.cancel()
        for connection in self.connections:
            connection.hold()

    def thaw(self) -> None:
        if self.is_dead or not self.is_frozen:
            return
        self.is_frozen = False
        self.host._heartbeat = self.process.task(self.host._beat())
        for connection in self.connections:
            connection.release()
        self.actor.thaw()
        self.engine.is_hung = False
        self.engine.go_on()

    def hang(self) -> None:
        """Begins a step that does not end."""
        self.engine.is_hung = True

    async def drain(self) -> None:
        """Stops the replica as Serve does: its calls end first."""
        self.is_up = False
        while self.serve.calls and not self.is_dead:
            await asyncio.sleep(_LAST_LOOK_S)
        self.kill()

    def leftovers(self) -> list[str]:
        """Returns the resources that would never be released."""
        host, found = self.host, []
        for what, left in (
            ("calls at the engine host", host._calls),
            ("requests in the engine", self.engine._runs),
            ("requests in the engine's metrics", self.metrics._live),
            ("calls of Serve", self.serve.calls),
            ("calls of the actor", self.actor._calls),
        ):
            if left:
                found.append(f"{self.engine_id}: {what}: {len(left)}")
        return found

    def orphans(self) -> list[str]:
        """Returns the requests that run for an ingress whose connection is gone."""
        return [
            request_id
            for request_id, call in self.host._calls.items()
            if not call.link.is_open and not call.done.done()
        ]

    async def _exit_with_the_engine(self) -> None:
        """Ends the process, as `EngineReplica._exit_with_the_actor` does."""
        await self.host.dead.wait()
        self.replica._is_dead = True
        await asyncio.sleep(_EXIT_S)
        self.kill()
