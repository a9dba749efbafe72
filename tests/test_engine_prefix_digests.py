"""Prefix names: an engine reports the same cached prefixes that a router would count."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from engine import block_tables
from engine.core import Engine
from engine.host_blocks import OffloadedPool
from engine.kv_layout import kv_layout
from engine.prefix_digests import chunk_size, extend_digests, prefix_digests
from engine.types import Request, ResumedChoice
from tests.fakes import FakePool, FakeRunner, make_engine, make_request
from tests.kv_host_helpers import runner_with_host


def test_a_digest_names_all_chunks_before_it_adapter_and_salt() -> None:
    ids = list(range(100))
    names = prefix_digests(ids, "a", "s", 32)
    assert len(names) == 3
    assert prefix_digests(ids[:64], "a", "s", 32) == names[:2]
    extended = list(names[:2])
    extend_digests(extended, ids, len(ids), "a", "s", 32)
    assert tuple(extended) == names
    for other in (
        prefix_digests([7, *ids[1:]], "a", "s", 32),
        prefix_digests(ids, "b", "s", 32),
        prefix_digests(ids, None, "as", 32),
        prefix_digests(ids, "as", "", 32),
    ):
        assert not set(other) & set(names)


def test_digests_are_made_as_far_as_asked() -> None:
    ids, digests = list(range(100)), list[int]()
    for num_tokens in (10, 32, 95, 70):
        extend_digests(digests, ids, num_tokens, None, "", 32)
        assert tuple(digests[: num_tokens // 32]) == prefix_digests(ids[:num_tokens], None, "", 32)
    assert len(digests) == 2


@pytest.mark.parametrize(("block_size", "chunk"), [(4, 32), (16, 32), (32, 32), (48, 48), (64, 64)])
def test_a_chunk_is_whole_blocks(block_size: int, chunk: int) -> None:
    assert chunk_size(block_size) == chunk


class Follower:
    """A router's view of an engine, from its steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.known: set[int] = set()
        self.times_told: dict[int, int] = defaultdict(int)
        self.outputs: dict[str, list[int]] = defaultdict(list)

    def step(self) -> None:
        step = self.engine.step()
        assert not set(step.cached_prefixes) & set(step.evicted_prefixes)
        self.known.update(step.cached_prefixes)
        self.known.difference_update(step.evicted_prefixes)
        for digest in step.cached_prefixes:
            self.times_told[digest] += 1
        for output in step.outputs:
            self.outputs[output.request_id] += output.token_ids

    def num_cached(self, request: Request, token_ids: list[int]) -> int:
        """Counts as `ReplicaView` does."""
        chunk = self.engine.limits.prefix_chunk
        count = 0
        for digest in prefix_digests(token_ids, request.adapter, request.cache_salt, chunk):
            if digest not in self.known:
                break
            count += 1
        return count * chunk

    def num_findable(self, request: Request, token_ids: list[int]) -> int:
        """Returns the count in the pool itself, rounded down to chunks."""
        pool, chain = self.engine._blocks, list[bytes]()
        pool.extend_chain(chain, token_ids, len(token_ids), request.adapter, request.cache_salt)
        chunk = self.engine.limits.prefix_chunk
        if isinstance(pool, OffloadedPool):  # a chunk counts while one tier has its last block
            ends, host = chain[chunk // pool.block_size - 1 :: chunk // pool.block_size], pool._host
            known = [pool.find_one(name) is not None or host.knows(name) for name in ends]
            return [*known, False].index(False) * chunk
        found = len(pool.find(chain)) * pool.block_size
        return found - found % chunk


def finish(follower: Follower) -> None:
    while follower.engine.has_work:
        follower.step()


def test_a_prompt_and_its_output_are_told_chunk_by_chunk_and_once() -> None:
    engine, _ = make_engine(max_num_batched_tokens=40)
    follower = Follower(engine)
    request = make_request("a", 70, max_tokens=30)
    engine.add_request(request)
    seen = []
    while engine.has_work:
        follower.step()
        seen.append(len(follower.known))
    assert seen[:2] == [1, 2]
    whole = [*request.prompt_token_ids, *follower.outputs["a"]]
    # The last token was never computed: 99 of 100 make three chunks.
    assert follower.known == set(prefix_digests(whole[:99], None, "", 32))
    assert set(follower.times_told.values()) == {1}
    engine.add_request(make_request("b", 70, max_tokens=1))
    finish(follower)
    assert set(follower.times_told.values()) == {1}


def test_what_is_found_is_not_named_again_by_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine()
    follower = Follower(engine)
    prompt = [1 + i % 13 for i in range(200)]
    engine.add_request(make_request("a", prompt[:160], max_tokens=1))
    finish(follower)
    hashed: list[int] = []

    def counting(digests: list[int], token_ids: list[int], num: int, *rest: object) -> None:
        hashed.append(num // 32 - len(digests))
        extend_digests(digests, token_ids, num, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(block_tables, "extend_digests", counting)
    engine.add_request(make_request("b", prompt, max_tokens=1))
    finish(follower)
    assert hashed == [1]
    assert follower.known == set(prefix_digests(prompt, None, "", 32))


def test_nothing_is_told_when_nothing_can_be_found_again() -> None:
    engine, _ = make_engine(enable_prefix_caching=False)
    follower = Follower(engine)
    engine.add_request(make_request("a", 100, max_tokens=30))
    finish(follower)
    assert not follower.times_told


@pytest.mark.parametrize("host_tokens", [0, 160, 2000])  # less than the device holds, and more
@pytest.mark.parametrize("runs_ahead", [True, False])
@pytest.mark.parametrize("block_size", [4, 16, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_follower_always_knows_what_the_cache_holds(
    seed: int, block_size: int, runs_ahead: bool, host_tokens: int
) -> None:
    generator = random.Random(seed)
    pool = FakePool(known={"x"})
    layout = kv_layout((None,), block_size, 1 << 20, is_contiguous=host_tokens > 0)
    runner = FakeRunner(560 // block_size, block_size=block_size, adapters=pool, layout=layout)
    if host_tokens:
        runner_with_host(runner, host_tokens // block_size, lambda: generator.randrange(1, 9))
    runner.runs_ahead = runs_ahead
    engine, _ = make_engine(runner, max_num_batched_tokens=48, max_num_seqs=5)
    follower = Follower(engine)
    roots = [[1 + generator.randrange(15) for _ in range(120)] for _ in range(3)]
    requests: list[Request] = []
    for i in range(60):
        cut = generator.randint(1, 120)
        prompt = generator.choice(roots)[:cut]
        prompt += [1 + generator.randrange(15) for _ in range(generator.randint(0, 40))]
        request = make_request(
            f"r{i}",
            prompt,
            generator.choice([None, "x"]),
            generator.choice(["", "salt"]),
            n=generator.choice([1, 1, 3]),
            max_tokens=generator.randint(4, 50),
        )
        if generator.random() < 0.3:
            done = tuple(1 + generator.randrange(15) for _ in range(3))
            choice = generator.randrange(request.params.n)
            request = Request(
                request.request_id,
                request.prompt_token_ids,
                request.params,
                request.adapter,
                request.cache_salt,
                resumed=(ResumedChoice(choice, done),),
            )
        requests.append(request)
        engine.add_request(request)
        for _ in range(generator.randint(0, 6)):
            if engine.has_work:
                follower.step()
        if generator.random() < 0.1:
            engine.abort(request.request_id)
        if not engine.has_work:
            continue
        follower.step()  # tells what the aborts and the newest schedule changed
        for one in requests[-12:]:
            ids = list(one.prompt_token_ids)
            assert follower.num_cached(one, ids) == follower.num_findable(one, ids)
    finish(follower)
    assert max(follower.times_told.values()) > 1  # evicted and come back
