"""Loads, unloads, flips, pins, requests, aborts and steps in any order, on the real engine.

The machine is the only thread, so its model can predict what must hold after each rule: the
adapters on the host, the holders of blocks, the requests that may be refused. At the end
everything is drained and nothing may be left. Half of the runs have a pool whose copies land when a
rule decides, as on a device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.config import EngineConfig
from engine.core import Engine
from engine.device_memory import adapter_budgets
from engine.errors import UnknownAdapterError
from engine.runner import ModelRunner
from lora.errors import AdapterError, HostMemoryError
from lora.pool import AdapterPool
from tests.fakes import FakePool, check_invariants
from tests.interleaving_world import (
    MAX_TOKENS,
    NAMES,
    NUM_BLOCKS,
    Ledger,
    Tally,
    World,
    digest_of,
    make_request,
)
from tests.lora_helpers import HandCopier

# In any hundred of them, or they show nothing.
MUST_HAPPEN = (
    "flips",
    "pins",
    "evicted",
    "dropped",
    "preempted",
    "prefix hits",
    "refused",
    "broken",
    "no host memory",
    "unloads taken back",
    "copies called off",
    "ended: length",
    "ended: abort",
    "ended: error",
)
_VERSIONS = 3
_MOST_STEPS = 2_000  # to drain; a run takes some dozens
_OPEN_REQUESTS = 12

names = st.sampled_from(NAMES)
versions = st.integers(0, _VERSIONS - 1)


@dataclass(frozen=True, slots=True)
class Wish:
    name: str | None  # None: the base
    flips_to: int | None  # a version, at once before the request
    prompt: int
    n: int
    max_tokens: int
    loads_first: bool


wishes = st.builds(
    Wish,
    name=st.sampled_from((*NAMES, *NAMES, None)),
    flips_to=st.none() | versions,
    prompt=st.integers(0, 3),
    n=st.sampled_from((1, 1, 2)),
    max_tokens=st.integers(1, MAX_TOKENS),
    loads_first=st.sampled_from((True, True, True, False)),
)


class HandRunner(ModelRunner):
    """A runner whose copies to the device land when the machine decides."""

    copier: HandCopier

    def _make_pool(self, config: EngineConfig) -> AdapterPool:
        self._pool_bytes, host_bytes = adapter_budgets(
            config, self._sites, self.dtype, self.device, self._rank.weight_bytes
        )
        self.copier = HandCopier(2)
        return AdapterPool(
            self._sites,
            self._pool_bytes,
            self.dtype,
            self.device,
            host_bytes,
            copier=self.copier,
        )


class Interleaving(RuleBasedStateMachine):
    """One run. `machine_of` provides its world."""

    world: World
    tally: Tally

    @initialize(by_hand=st.booleans())
    def begin(self, by_hand: bool) -> None:
        kind = HandRunner if by_hand else ModelRunner
        self.runner = kind(self.world.config)
        self.engine = Engine(self.world.config, self.runner)
        self.pool = self.runner.adapters
        self.ledger = Ledger(self.world, self.tally)
        self.champion = {name: digest_of(name, 0) for name in NAMES}
        self.known: set[str] = set()  # on the host
        self.retiring: set[str] = set()
        self.pinned: str | None = None
        self.resident: set[str] = set()  # after the rule before

    @rule(name=names, version=versions)
    def flip(self, name: str, version: int) -> None:
        self.champion[name] = digest_of(name, version)
        self.tally.add("flips")

    @rule(name=names, version=versions, is_broken=st.booleans())
    def load(self, name: str, version: int, is_broken: bool) -> None:
        if not is_broken:
            self._load(digest_of(name, version))
            return
        with pytest.raises(AdapterError):
            self.runner.load_adapter("broken", self.world.broken)
        self.tally.add("broken")

    @rule(name=names, version=versions)
    def unload(self, name: str, version: int) -> None:
        digest = digest_of(name, version)
        self.retiring.add(digest)
        self.tally.add("unloads")
        self._ask_whether_gone(digest)

    @precondition(lambda self: self.ledger.open_ids)
    @rule(data=st.data())
    def cancel_all_and_unload(self, data: st.DataObject) -> None:
        """Cancels all requests of one adapter and unloads it: its copy to the device may be in
        flight, without a user."""
        open_ones = [self.ledger.entries[request_id] for request_id in self.ledger.open_ids]
        digest = data.draw(st.sampled_from(open_ones)).request.adapter
        for request in [entry.request for entry in open_ones if entry.request.adapter == digest]:
            self.engine.abort(request.request_id)
            self.ledger.abort(request.request_id)
            self.tally.add("cancels")
        if digest is not None:
            self.tally.add("copies called off", digest in self.pool._arriving)
            self.retiring.add(digest)
            self.tally.add("unloads")
            self._ask_whether_gone(digest)

    @precondition(lambda self: self.pinned is None)
    @rule(name=names, version=st.integers(0, 1))
    def pin(self, name: str, version: int) -> None:
        """Pins an adapter of one page: the room that is left is enough for any other."""
        digest = digest_of(name, version)
        if digest in self.known:
            self.pool.pin(digest)
            self.pinned = digest
            self.tally.add("pins")

    @precondition(lambda self: self.pinned is not None)
    @rule()
    def unpin(self) -> None:
        assert self.pinned is not None
        self.pool.unpin(self.pinned)
        self.pinned = None

    @rule(wishes=st.lists(wishes, min_size=1, max_size=5))
    def request(self, wishes: list[Wish]) -> None:
        for wish in wishes:
            if len(self.ledger.open_ids) < _OPEN_REQUESTS:
                self._request(wish)

    @rule(wishes=st.lists(wishes, min_size=1, max_size=5), count=st.integers(1, 12))
    def request_and_step(self, wishes: list[Wish], count: int) -> None:
        self.request(wishes)
        self.steps(count)

    @precondition(lambda self: self.ledger.open_ids)
    @rule(data=st.data(), choice=st.sampled_from((None, None, 0, 1)))
    def cancel(self, data: st.DataObject, choice: int | None) -> None:
        request_id = data.draw(st.sampled_from(self.ledger.open_ids))
        self.engine.abort(request_id, choice)
        self.ledger.abort(request_id, choice)
        self.tally.add("cancels")

    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self._step()

    @rule()
    def copies_land(self) -> None:
        if isinstance(self.runner, HandRunner):
            self.runner.copier.end()

    @invariant()
    def memory_is_as_told(self) -> None:
        pool, engine = self.pool, self.engine
        on_device, on_host = engine.load().adapters_on_device, engine.load().adapters_on_host
        assert set(on_host) == self.known
        assert set(on_device) <= self.known
        assert pool.host_bytes_used == sum(self.world.sizes[digest] for digest in on_host)
        assert pool.host_bytes_used <= (self.world.config.adapter_host_bytes or 0)
        held = [block for digest in on_device for block in pool._table.blocks(digest)]
        assert len(set(held)) == len(held) == pool.num_blocks - pool.num_free_blocks
        for digest in self.world.digests:
            assert engine.has_adapter(digest) == self._takes_requests(digest)
        references = Counter(
            {d: pool._table.num_references(d) - (d in pool._arriving) for d in on_device}
        )
        blocks = engine.scheduler._tables.pool
        check_invariants(engine.scheduler, blocks, FakePool(references=references))
        self.tally.add("evicted", len((self.resident & self.known) - set(on_device)))
        assert self.pinned is None or {self.pinned} & self.resident <= set(on_device)
        self.resident = set(on_device)

    def teardown(self) -> None:
        """Ends everything and checks that nothing is left."""
        if not hasattr(self, "engine"):
            return
        for _ in range(_MOST_STEPS):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.engine.has_work
        assert not self.ledger.open_ids
        assert not self.retiring
        load = self.engine.load()
        assert (load.num_running, load.num_waiting) == (0, 0)
        assert load.num_free_blocks == NUM_BLOCKS
        for digest in sorted(self.known):
            assert self.engine.retire_adapter(digest)
        assert self.pool.num_free_blocks == self.pool.num_blocks
        assert self.pool.host_bytes_used == 0
        assert not self.pool._table._references
        self.tally.add("interleavings")
        self.tally.add("steps", load.num_steps)
        self.tally.add("preempted", load.num_preemptions)
        self.tally.add("prefix hits", load.prefix_hits)

    def _takes_requests(self, digest: str) -> bool:
        return digest in self.known and digest not in self.retiring

    def _request(self, wish: Wish) -> None:
        if wish.name is not None and wish.flips_to is not None:
            self.flip(wish.name, wish.flips_to)
        digest = None if wish.name is None else self.champion[wish.name]
        if digest is not None and wish.loads_first and not self.engine.has_adapter(digest):
            self._load(digest)
        request_id = f"r{len(self.ledger.entries)}"
        request = make_request(self.world, request_id, digest, wish.prompt, wish.n, wish.max_tokens)
        if digest is None or self._takes_requests(digest):
            self.engine.add_request(request)
            self.ledger.open(request)
        else:
            with pytest.raises(UnknownAdapterError):
                self.engine.add_request(request)
            self.tally.add("refused")

    def _step(self) -> None:
        for output in self.engine.step().outputs:
            self.ledger.take(output)
        # Only a pinned adapter that fills the pool could keep others out for ever.
        assert not (self.engine.is_stuck and self.engine.has_work), "nothing more would happen"
        for digest in tuple(self.retiring):
            self._ask_whether_gone(digest)

    def _load(self, digest: str) -> None:
        was_known, was_free = digest in self.known, self._free_host_bytes
        held = {s.request.adapter for s in self.engine.scheduler.running}
        held |= {self.pinned} | set(self.pool._arriving)
        size = 0 if was_known else self.world.sizes[digest]
        try:
            dropped = self.runner.load_adapter(digest, self.world.paths[digest])
        except HostMemoryError:
            idle = sum(self.world.sizes[d] for d in self.known - held)
            assert was_free + idle < size, "there was room"
            self.tally.add("no host memory")
            return
        self.tally.add("loads")
        self.tally.add("unloads taken back", digest in self.retiring)
        self.engine.keep_adapter(digest)
        self.retiring.discard(digest)
        assert self.known - held >= set(dropped), "somebody used it"
        spared = sum(self.world.sizes[d] for d in dropped[:-1])
        assert not dropped or was_free + spared < size, "there was room without it"
        self.known = (self.known - set(dropped)) | {digest}
        self.ledger.note_dropped(dropped)

    @property
    def _free_host_bytes(self) -> int:
        return (self.world.config.adapter_host_bytes or 0) - self.pool.host_bytes_used

    def _ask_whether_gone(self, digest: str) -> None:
        users = [e for e in self.ledger.entries.values() if e.request.adapter == digest and e.open]
        is_gone = self.engine.retire_adapter(digest)
        if is_gone:
            assert all(e.open <= e.aborted for e in users), "somebody used it"
            self.retiring.discard(digest)
            self.known.discard(digest)
            self.pinned = None if self.pinned == digest else self.pinned
            self.resident.discard(digest)
        else:
            assert any(e.open - e.aborted for e in users), "nobody used it"


def machine_of(world: World, tally: Tally) -> type[Interleaving]:
    return type("InterleavingOfWorld", (Interleaving,), {"world": world, "tally": tally})


def run_interleavings(machine: type[Interleaving], count: int, seed: int) -> None:
    """Runs the same interleavings for the same seed and version of hypothesis; raises at the first
    violation, with the shortest run that shows it."""
    run_state_machine_as_test(
        hypothesis.seed(seed)(machine),
        settings=hypothesis.settings(
            max_examples=count,
            stateful_step_count=50,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
