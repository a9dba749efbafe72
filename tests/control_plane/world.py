"""The world of an order: the store, the processes, the clock, and the journal with which promises
are checked."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from registry.catalog import Catalog
from registry.client import Registry
from registry.sqlite_database import Marker
from serve_app.config import CanaryArgs, ModelArgs, PlatformArgs, RegistryArgs
from serve_app.control import fleet, manager
from serve_app.dispatch import gateway
from tests.control_plane.clock import VirtualLoop
from tests.control_plane.faults import FakeServe, FaultyClient, RegistryFaults
from tests.control_plane.journal import Journal, Tracebacks
from tests.control_plane.processes import Ingress, Managers, Reader, opener, reader_of, use_client
from tests.control_plane.store import PREFIX, Database, Truth
from tests.control_plane.wishes import Wishes

MIN_REQUESTS = 10  # before a canary is judged
_LOGGERS = ("serve_app", "registry")


class Violation(AssertionError):
    """Raised when a promise is broken."""


class World:
    def __init__(
        self, database: Database, loop: VirtualLoop, models: tuple[ModelArgs, ...]
    ) -> None:
        self.database, self.loop, self.models = database, loop, models
        self.journal = Journal()
        self.wishes = Wishes(models)
        self.faults, self.cli_faults = RegistryFaults(), RegistryFaults()
        self.serve = FakeServe(loop, self._on_delete)
        self.fresh: tuple[Marker | None, Catalog] | None = None  # as a new process last read it
        # (name, digest, source) of files that were fetched and right.
        self.fetched = set(database.begun_with)
        self.undo_pages: Callable[[], None] = lambda: None
        self.watch: Callable[[Truth], None] | None = None
        self.broken: list[str] = []  # promises, found between two steps
        self.on_view: Callable[[Ingress], None] = lambda _: None  # with each view of an ingress
        self.cache = database.folder / "cache"
        shutil.rmtree(self.cache, ignore_errors=True)
        # The manager's readers open anew with each manager, on the same disk.
        args = PlatformArgs(
            models=models,
            registry=RegistryArgs(check_adapters=False),
            canary=CanaryArgs(min_requests=MIN_REQUESTS),
        )
        self.managers = Managers(loop, args, lambda: self.reader("manager", self.faults))
        self.ingresses: dict[str, Ingress] = {}
        self.num_ingresses = 0
        # A colleague at MLflow, and `loraplex` of a shell.
        self.client: Any = FaultyClient(database.client, RegistryFaults(), self.on_write)
        self.cli = Registry(database.uri)
        shell = FaultyClient(database.client, self.cli_faults, self.on_write)
        use_client(self.cli, shell, loop)
        self.engine = self.reader("engine", RegistryFaults())

    def reader(self, name: str, faults: RegistryFaults) -> Reader:
        return reader_of(self.database, self.loop, self.cache / name, faults, self.on_write)

    def truth(self) -> Truth:
        return self.database.truth()

    def on_write(self) -> None:
        """Called after each write to the registry, by any process."""
        truth = self.truth()
        self.wishes.note(truth, self.serve.apps, self.loop.time())
        for name in truth:
            self.journal.meanings.setdefault(name, set()).update(self.wishes.meant(name, truth))
        if self.watch is not None:
            self.watch(truth)

    def forget_unwritten(self) -> None:
        """Kills the manager; verdicts that it had not written yet are lost."""
        truth = self.truth()
        self.journal.forget_trials()
        for name, digest in tuple(self.journal.rolled_back):
            weight = truth[name].tags.get(PREFIX + "canary_weight") if name in truth else "0"
            if weight != "0":
                del self.journal.rolled_back[name, digest]

    def _on_delete(self, app: str) -> None:
        truth, now_s = self.truth(), self.loop.time()
        self.wishes.note(truth, self.serve.apps, now_s)
        self.journal.counts["deleted engines"] += 1
        if self.wishes.may_go(app, now_s) or self._may_sleep(app, truth):
            self.wishes.explained.pop(app, None)
            return
        self.broken.append(f"the engines of {app} are deleted, and the base is wished for")

    def _may_sleep(self, app: str, truth: Truth) -> bool:
        name, digest = self.wishes.parts(app)
        if name in self.journal.rested:
            return True
        timeout_s = self.wishes.idle_timeout_s(name, truth)
        asked_s = next((s for d, s in self.journal.asked_s.items() if d.startswith(digest)), 0.0)
        return timeout_s is not None and self.loop.time() - asked_s >= timeout_s

    def one_listing_in_pages(self, between: Callable[[], None]) -> None:
        """`between` is called when the manager's next listing requests its second page."""
        pages, store = pytest.MonkeyPatch(), "registry.store."
        pages.setattr(store + "_MODELS_PER_PAGE", 3)
        pages.setattr(store + "_VERSIONS_PER_PAGE", 3)
        self.undo_pages()
        self.undo_pages = pages.undo

        def change() -> None:
            self.undo_pages()
            between()

        self.faults.between_pages = change

    async def start(self) -> None:
        await self.managers.start()
        self.add_ingress()
        self.client.set_registered_model_tag("beta", PREFIX + "serve", "{}")

    def add_ingress(self) -> str:
        self.num_ingresses += 1
        name = f"ingress {self.num_ingresses}"
        self.ingresses[name] = Ingress(name, self.managers, self.loop, self.on_view)
        return name

    async def remove_ingress(self, name: str) -> None:
        del self.ingresses[name]
        self.loop.kill(name)
        await asyncio.sleep(0)

    async def heal(self) -> None:
        """Ends all faults; the product must repair their effects."""
        for faults in (self.faults, self.cli_faults):
            faults.heal()
        self.undo_pages()
        self.serve.heal()
        self.managers.engines.is_away = False
        self.managers.num_lost_reports = 0
        if self.managers.current is None:
            await self.managers.start()
        if not self.ingresses:
            self.add_ingress()


@contextmanager
def fake_world(database: Database, models: tuple[ModelArgs, ...], seed: int) -> Iterator[World]:
    """Returns a new world; its loop has not run yet."""
    database.reset()
    random.seed(seed)
    loop = VirtualLoop()
    clock = SimpleNamespace(monotonic=loop.time, time=loop.wall_time, sleep=lambda _: None)
    world = World(database, loop, models)
    handler = Tracebacks(world.journal.tracebacks)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(one.level, one.propagate) for one in loggers]
    with pytest.MonkeyPatch.context() as patch:
        nodes = SimpleNamespace(cluster_resources=dict, nodes=lambda: [{"Alive": True}])
        patch.setattr(manager, "ray", nodes)
        patch.setattr(manager, "install_in_replica", lambda _: None)
        patch.setattr(fleet, "serve", world.serve)
        patch.setattr(fleet, "read_status", lambda: world.serve.status())
        patch.setattr(fleet, "scale", world.serve.scale)
        patch.setattr(gateway, "open_base", opener(world.serve))
        patch.setattr("serve_app.control.watcher.time", clock)
        patch.setattr("registry.adoption.time", clock)
        patch.setattr("registry.mlflow_errors.time", clock)
        patch.setattr("os.fsync", lambda _: None)
        patch.setattr(manager, "_STATUS_POLL_S", 0.5)
        patch.setattr(manager, "_SETTLED_POLL_S", 0.5)
        # Each write would read the whole model first, to see whether it is a prompt.
        patch.setattr("mlflow.MlflowClient._raise_if_prompt", lambda *_: None)
        millis = "mlflow.store.model_registry.sqlalchemy_store.get_current_time_millis"
        patch.setattr(millis, lambda: int(1000 * loop.wall_time()))
        for one in loggers:
            one.setLevel(logging.ERROR)
            one.propagate = False
            one.addHandler(handler)
        try:
            yield world
        finally:
            world.undo_pages()
            for one, (level, propagate) in zip(loggers, before, strict=True):
                one.removeHandler(handler)
                one.setLevel(level)
                one.propagate = propagate
            _close(loop)


def _close(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
