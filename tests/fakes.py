"""A runner and an adapter pool without tensors, that find out when policy breaks KV.

`FakeRunner` keeps what every KV slot holds: a hash of adapter, salt and all tokens up to there.
Each step it writes the slots of the scheduled positions and reads all earlier ones, or those of a
window, through the block tables, as attention would: a block that is shared wrongly, recycled too
soon or never computed is a KVViolation. The drawn token is a pure function of that hash, seed and
choice, so `solo_tokens` says what a request must give whatever else runs.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from functools import lru_cache

from engine.blocks import BlockPool
from engine.config import EngineConfig
from engine.core import Engine
from engine.host_blocks import BlockCopier
from engine.kv_layout import KVLayout, kv_layout, num_uncommitted
from engine.scheduler import Scheduler
from engine.stopping import banned_token_ids, ending
from engine.types import (
    Request,
    Resident,
    Sample,
    SamplingParams,
    ScheduledBatch,
    ScheduledSequence,
    Sequence,
    TokenLogprobs,
    TokenOutput,
)
from engine.window_tables import make_tables

EOS = 0


class KVViolation(BaseException):
    """Not an Exception: the engine must not take it for a fault of the device and go on."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    vocab_size: int = 16
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = (EOS,)


@dataclass(slots=True)
class FakePool:
    """Room for `capacity` adapters at a time; idle ones are evicted as if for nothing."""

    capacity: int = 100
    known: set[str] = field(default_factory=set)
    references: Counter[str] = field(default_factory=Counter)
    blocked: set[str] = field(default_factory=set)  # never find room
    copying: set[str] = field(default_factory=set)  # until `wait_pending`
    pinned: set[str] = field(default_factory=set)
    reserved_bytes: int = 0
    page_bytes: int = 0
    device_bytes_used: int = 0
    host_bytes_used: int = 0
    num_copied_to_device: int = 0
    copy_s: float = 0.0

    @property
    def num_pinned(self) -> int:
        return len(self.pinned)

    def has(self, digest: str) -> bool:
        return digest in self.known

    def land_copies(self) -> None:
        pass

    def obstacle(self, key: str) -> str | None:
        return None

    def invocation(self, key: str) -> tuple[int, ...]:
        return ()

    def acquire(self, digest: str) -> bool:
        assert digest in self.known
        if digest in self.blocked or digest in self.copying:
            return False
        if self.references[digest] == 0 and len(self.on_device()) >= self.capacity:
            return False
        self.references[digest] += 1
        return True

    def prefetch(self, digests: Iterable[str]) -> None:
        assert all(self.has(digest) for digest in digests)

    def has_pending_copies(self) -> bool:
        return bool(self.copying)

    def wait_pending(self) -> None:
        self.copying.pop()

    def release(self, digest: str) -> None:
        assert self.references[digest] > 0, f"{digest} released more often than acquired"
        self.references[digest] -= 1

    def remove(self, digest: str) -> bool:
        if self.references[digest]:
            return False
        self.known.discard(digest)
        return True

    def pin(self, digest: str) -> None:
        self.pinned.add(digest)

    def unpin(self, digest: str) -> None:
        self.pinned.discard(digest)

    def protect(self, digests: Iterable[str]) -> None:
        pass

    def is_pinned(self, digest: str) -> bool:
        return digest in self.pinned

    def residents(self) -> tuple[Resident, ...]:
        return tuple(
            Resident(
                digest,
                digest in self.on_device(),
                1,
                1,
                self.references[digest],
                digest in self.pinned,
                False,
                0.0,
            )
            for digest in self.on_host()
        )

    def on_device(self) -> tuple[str, ...]:
        return tuple(digest for digest, count in self.references.items() if count)

    def on_host(self) -> tuple[str, ...]:
        return tuple(sorted(self.known))


@dataclass(slots=True)
class FakeStep:
    samples: tuple[Sample, ...]
    error: BaseException | None = None

    def draw(self) -> None: ...

    def collect(self) -> tuple[Sample, ...]:
        """A lack of memory passes."""
        error = self.error
        if isinstance(error, MemoryError):
            self.error = None
        if error is not None:
            raise error
        return self.samples


class FakeRunner:
    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        adapters: FakePool | None = None,
        model: FakeModel | None = None,
        layout: KVLayout | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kv_layout = layout or plain_layout(block_size)
        self.adapters = adapters or FakePool()
        self.model_config = model or FakeModel()
        self.max_model_len = self.model_config.max_model_len
        # Of one layer of each group, by the entry of its block table: [slots].
        num_slots = (num_blocks + 1) * self.kv_layout.stride * block_size
        self.kv: list[int | None] = [None] * num_slots
        self.batches: list[tuple[tuple[str, int, int, int], ...]] = []
        self.fail_next: BaseException | None = None
        self.not_finite: set[str] = set()  # request ids
        self.runs_ahead = False
        self.max_draws = 1 << 30
        self.graph_sizes: tuple[int, ...] = ()
        self.fail_next_collect: BaseException | None = None
        self.most_tokens: int | None = None  # of a step; with more it finds no memory
        self.too_large: set[str] = set()  # request ids: no step of them finds memory
        self.num_freed = 0
        self.num_late_compilations = 0
        self.kv_copies: BlockCopier | None = None
        self._drawn: dict[Sequence, int] = {}  # by the newest step: what a device would keep

    def launch(self, batch: ScheduledBatch) -> FakeStep:
        samples = self.execute(batch)
        self._drawn = {
            item.sequence: -1 if sample.token_id is None else sample.token_id
            for item, sample in zip(batch.sequences, samples, strict=True)
        }
        error, self.fail_next_collect = self.fail_next_collect, None
        return FakeStep(samples, error)

    def execute(self, batch: ScheduledBatch) -> tuple[Sample, ...]:
        self.batches.append(
            tuple(
                (s.sequence.request.request_id, s.sequence.choice, s.start, s.end)
                for s in batch.sequences
            )
        )
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        if self._lacks_memory(batch):
            self._leave_half_done(batch)
            raise MemoryError
        for item in batch.sequences:
            self._write(item)
        return tuple(self._sample(item) for item in batch.sequences)

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def free_cache(self) -> None:
        self.num_freed += 1

    def close(self) -> None:
        """Does nothing: it has no other processes."""

    def _lacks_memory(self, batch: ScheduledBatch) -> bool:
        names = {item.sequence.request.request_id for item in batch.sequences}
        most = self.most_tokens
        return bool(names & self.too_large) or (most is not None and batch.num_tokens > most)

    def _leave_half_done(self, batch: ScheduledBatch) -> None:
        """The worst that a device may leave: neither KV nor drawn tokens can be used."""
        self._drawn.clear()
        for item in batch.sequences:
            for table in self._tables(item.sequence):
                for position in range(item.start, item.end):
                    self.kv[self._slot(table, position)] = None

    def _write(self, item: ScheduledSequence) -> None:
        sequence = item.sequence
        hashes = prefix_hashes(sequence.request, self._tokens(item))
        for table in self._tables(sequence):
            for position in range(item.start, item.end):
                slot = self._slot(table, position)
                if slot // self.block_size >= self.num_blocks * self.kv_layout.stride:
                    raise KVViolation(f"{sequence.request.request_id} writes to the null block")
                self.kv[slot] = hashes[position]

    def _sample(self, item: ScheduledSequence) -> Sample:
        """Reads after all have written: a slot written by two is seen by one of them."""
        sequence = item.sequence
        hashes = prefix_hashes(sequence.request, self._tokens(item))
        for table, group in zip(self._tables(sequence), self.kv_layout.groups, strict=True):
            seen = 0 if group.window is None else max(0, item.start - group.window + 1)
            kv, size = self.kv, self.block_size  # `_slot` in place: most of the time of the tests
            for position in range(seen, item.end):
                if kv[table[position // size] * size + position % size] != hashes[position]:
                    raise KVViolation(f"{sequence.request.request_id} at position {position}")
        prompt_logprobs = self._prompt_logprobs(item)
        if not item.samples:
            return Sample(None, prompt_logprobs=prompt_logprobs)
        if sequence.request.request_id in self.not_finite:
            return Sample(None, is_finite=False)
        first, *others = [self._draw(row) for row in item.rows]
        return first._replace(prompt_logprobs=prompt_logprobs, after_draft=tuple(others))

    def _draw(self, row: ScheduledSequence) -> Sample:
        token = draw(row.sequence, self._tokens(row), self.model_config)
        wants = row.sequence.request.params.logprobs is not None
        return Sample(token, TokenLogprobs(token, -1.0, 1, ()) if wants else None)

    def _prompt_logprobs(self, item: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        prompt = item.sequence.request.prompt_token_ids
        if item.sequence.request.params.prompt_logprobs is None:
            return ()
        return tuple(
            TokenLogprobs(prompt[position], -float(position), 1, ())
            for position in range(item.start + 1, min(item.end + 1, len(prompt)))
        )

    def _tokens(self, item: ScheduledSequence) -> list[int]:
        known = item.sequence.token_ids
        if item.draft:
            return [*known, *item.draft]
        return known if item.end <= len(known) else [*known, max(self._drawn[item.sequence], 0)]

    def _tables(self, sequence: Sequence) -> tuple[list[int], ...]:
        return (sequence.block_table, sequence.window_table)[: len(self.kv_layout.groups)]

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def prefix_hashes(request: Request, token_ids: list[int]) -> list[int]:
    """Returns a hash of the tokens up to each position, with the adapter and the salt. A sequence
    asks in each of its steps: what does not change is kept, in pieces of 32 tokens."""
    kept = len(token_ids) - len(token_ids) % 32
    hashes = list(_kept_hashes(_first_hash(request), tuple(token_ids[:kept])))
    value = hashes[-1] if hashes else _first_hash(request)
    for token in token_ids[kept:]:
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        hashes.append(value)
    return hashes


def last_hash(request: Request, token_ids: list[int]) -> int:
    """Returns the last of `prefix_hashes`."""
    return zlib.crc32(struct.pack(f"<{len(token_ids)}I", *token_ids), _first_hash(request))


def _first_hash(request: Request) -> int:
    return zlib.crc32(f"{request.adapter}/{request.cache_salt}".encode())


@lru_cache(maxsize=4096)
def _kept_hashes(value: int, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    if not token_ids:
        return ()
    before = _kept_hashes(value, token_ids[:-32])
    value = before[-1] if before else value
    piece = []
    for token in token_ids[-32:]:
        value = zlib.crc32(token.to_bytes(4, "little"), value)
        piece.append(value)
    return (*before, *piece)


def draw(sequence: Sequence, token_ids: list[int], model: FakeModel) -> int:
    last = last_hash(sequence.request, token_ids)
    value = zlib.crc32(f"{last}/{sequence.seed}/{sequence.choice}".encode())
    banned = banned_token_ids(sequence, len(token_ids), model.eos_token_ids)
    allowed = [token for token in range(model.vocab_size) if token not in banned]
    return allowed[value % len(allowed)]


def solo_tokens(request: Request, choice: int, model: FakeModel) -> tuple[int, ...]:
    """Returns the tokens of a choice, from the request alone. Its seed must be set."""
    assert request.params.seed is not None
    sequence = Sequence(request, choice, request.params.seed, list(request.prompt_token_ids))
    while ending(sequence, model.eos_token_ids, model.max_model_len) is None:
        sequence.token_ids.append(draw(sequence, sequence.token_ids, model))
    return tuple(sequence.token_ids[len(request.prompt_token_ids) :])


def make_config(**overrides: int | bool | str | None) -> EngineConfig:
    settings: dict[str, int | bool | str | None] = {
        "model_path": "/nowhere",
        "base_digest": "base",
        "block_size": 4,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
    }
    return EngineConfig(**(settings | overrides))  # type: ignore[arg-type]


def make_request(
    request_id: str = "r",
    prompt: list[int] | int = 4,
    adapter: str | None = None,
    cache_salt: str = "",
    **params: object,
) -> Request:
    """A number as prompt is that many different tokens."""
    ids = [1 + i % 15 for i in range(prompt)] if isinstance(prompt, int) else prompt
    settings: dict[str, object] = {"max_tokens": 4, "ignore_eos": True, "seed": 0}
    sampling = SamplingParams(**(settings | params))  # type: ignore[arg-type]
    return Request(request_id, tuple(ids), sampling, adapter, cache_salt)


def make_engine(
    runner: FakeRunner | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    **config: int | bool | str | None,
) -> tuple[Engine, FakeRunner]:
    runner = runner or FakeRunner()
    return Engine(make_config(block_size=runner.block_size, **config), runner, clock), runner


def plain_layout(block_size: int) -> KVLayout:
    return kv_layout((None,), block_size, 1 << 30)


def make_scheduler(
    num_blocks: int = 10,
    adapters: FakePool | None = None,
    layout: KVLayout | None = None,
    **config: int | bool | str | None,
) -> tuple[Scheduler, BlockPool]:
    """Returns the scheduler of a runner that does not run ahead, and its blocks."""
    settings = make_config(**config)
    uncommitted = num_uncommitted(settings.max_num_batched_tokens, runs_ahead=False)
    blocks = BlockPool(
        num_blocks, settings.block_size, "base", can_share=settings.enable_prefix_caching
    )
    tables = make_tables(blocks, layout or plain_layout(settings.block_size), uncommitted)
    return Scheduler(settings, tables, adapters or FakePool(), (EOS,), 4096), blocks


def run_step(scheduler: Scheduler, token: int = 7) -> tuple[ScheduledBatch, list[TokenOutput]]:
    """A step whose every draw is the same token."""
    batch = scheduler.schedule()
    samples = [Sample(token if item.samples else None) for item in batch.sequences]
    return batch, commit(scheduler, batch, samples)


def commit(scheduler: Scheduler, batch: ScheduledBatch, samples: Many[Sample]) -> list[TokenOutput]:
    scheduler.commit(batch, samples)
    return scheduler.take_outputs()


def ranges(batch: ScheduledBatch) -> list[tuple[str, int, int, int]]:
    """(request, choice, start, end) of a batch."""
    return [
        (item.sequence.request.request_id, item.sequence.choice, item.start, item.end)
        for item in batch.sequences
    ]


def held_blocks(sequence: Sequence, layout: KVLayout) -> list[int]:
    """Returns the blocks of a sequence, whose entries are checked."""
    tables = (sequence.block_table, sequence.window_table)
    held: list[int] = []
    for index, (group, table) in enumerate(zip(layout.groups, tables, strict=False)):
        first = 0 if group.window is None else sequence.num_dropped
        blocks = [entry // layout.stride for entry in table[first :: group.num_spans]]
        assert layout.entries(index, blocks) == table[first:]
        assert len(set(table[:first])) <= 1
        held += blocks
    return held


def check_invariants(
    scheduler: Scheduler, blocks: BlockPool, adapters: FakePool, layout: KVLayout | None = None
) -> None:
    """Holds between any two calls."""
    layout = layout or plain_layout(blocks.block_size)
    blocks_of = {s: held_blocks(s, layout) for s in scheduler.running}
    held = Counter(block for s in scheduler.running for block in blocks_of[s])
    for block in range(blocks.num_blocks):
        assert blocks.num_references(block) == held[block], f"block {block}"
    assert blocks.num_free == blocks.num_blocks - len(held)
    assert all(len(set(one)) == len(one) for one in blocks_of.values())
    for s in scheduler.running:
        for group in layout.groups:
            if group.window is not None:
                unneeded = group.first_needed(s.num_computed_tokens) * group.num_spans
                assert s.num_dropped == unneeded
    assert all(
        not (s.block_table or s.window_table or s.num_scheduled_tokens or s.num_tokens_in_flight)
        for s in scheduler.waiting
    )
    assert all(s.num_computed_tokens <= s.num_scheduled_tokens for s in scheduler.running)
    users = Counter(s.request.adapter for s in scheduler.running if s.request.adapter)
    assert +adapters.references == users
    for line in (scheduler.running, scheduler.waiting):
        assert [s.ordinal for s in line] == sorted(s.ordinal for s in line)
    owners: dict[int, tuple[str | None, str]] = {}
    for s in scheduler.running:
        owner = (s.request.adapter, s.request.cache_salt)
        assert all(owners.setdefault(block, owner) == owner for block in blocks_of[s])
