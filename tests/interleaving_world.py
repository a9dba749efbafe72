"""A tiny real base and versions of a few adapters, the tokens of each alone, and a ledger of
violations.

The world is small: the device holds two or three adapters, the host two to four of nine,
the KV cache little more than one request. Evictions, drops, preemptions and waiting happen in any
few dozen steps. `Ledger` holds a caller's knowledge: its requests and the outputs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from engine.config import EngineConfig
from engine.core import Engine
from engine.runner import ModelRunner
from engine.types import Request, SamplingParams, TokenOutput
from tests.engine_helpers import make_adapter, make_base, make_runner, random_prompt

NAMES = ("ada", "bob", "cy")
MAX_TOKENS = 10
NUM_BLOCKS = 9
_TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_RANKS = {0: 4, 1: 8, 2: 20}  # of the versions; the last takes two pages
_PROMPT_LENGTHS = (4, 5, 9, 13)
_CLEAR = 1e-4  # of the log-probabilities: a choice by less could go either way in another batch


@dataclass(frozen=True, slots=True)
class World:
    config: EngineConfig
    paths: dict[str, Path]  # by digest
    sizes: dict[str, int]  # on the host
    broken: Path  # an adapter whose weights are cut off
    prompts: tuple[tuple[int, ...], ...]
    alone: dict[tuple[str | None, int], tuple[int, ...]]  # by digest and number of the prompt

    @property
    def digests(self) -> tuple[str, ...]:
        return tuple(self.paths)

    def expected(self, request: Request) -> tuple[int, ...]:
        prompt = self.prompts.index(request.prompt_token_ids)
        return self.alone[request.adapter, prompt][: request.params.max_tokens]


def digest_of(name: str, version: int) -> str:
    return f"{name}-{version}"


def make_request(
    world: World, request_id: str, digest: str | None, prompt: int, n: int, max_tokens: int
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n, ignore_eos=True)
    return Request(request_id, world.prompts[prompt], params, digest)


def make_world(root: Path) -> World:
    base = make_base(
        root / "base",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    paths = {
        digest_of(name, version): make_adapter(
            root / digest_of(name, version), base, rank, _TARGETS, seed=10 * i + version
        )
        for i, name in enumerate(NAMES)
        for version, rank in _RANKS.items()
    }
    roomy = make_runner(base, num_threads=1)
    sizes = {digest: roomy.read_adapter(digest, path).num_bytes for digest, path in paths.items()}
    blocks = {v: roomy.read_adapter("", paths[digest_of(NAMES[0], v)]).num_blocks for v in _RANKS}
    # One of the largest beside one of those that are pinned.
    pool_bytes = (blocks[1] + blocks[2]) * (
        roomy.adapters.reserved_bytes // roomy.adapters.num_blocks
    )
    config = EngineConfig(
        model_path=str(base),
        base_digest="base",
        backend="reference",
        device="cpu",
        block_size=4,
        num_blocks=NUM_BLOCKS,
        max_num_batched_tokens=12,
        max_num_seqs=4,
        max_adapter_overtakes=3,
        adapter_pool_bytes=pool_bytes,
        adapter_host_bytes=sum(sorted(sizes.values())[-2:]),  # two, or four small
        num_threads=1,
    )
    prompts = tuple(
        tuple(random_prompt(length, seed=7)) for length in _PROMPT_LENGTHS
    )  # each begins with the one before: blocks are found again
    return World(
        config, paths, sizes, _break(root, base), prompts, _tokens_alone(roomy, paths, prompts)
    )


def _break(root: Path, base: Path) -> Path:
    folder = make_adapter(root / "broken", base, 4, _TARGETS)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    return folder


def _tokens_alone(
    runner: ModelRunner, paths: dict[str, Path], prompts: tuple[tuple[int, ...], ...]
) -> dict[tuple[str | None, int], tuple[int, ...]]:
    """Returns the tokens of an engine that runs one request at a time and shares nothing between
    them."""
    for known, path in paths.items():
        runner.load_adapter(known, path)
    config = EngineConfig("unused", "base", block_size=4, enable_prefix_caching=False)
    engine = Engine(config, runner)
    alone: dict[tuple[str | None, int], tuple[int, ...]] = {}
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, logprobs=2)
    for number, prompt in enumerate(prompts):
        for digest in (None, *paths):
            engine.add_request(Request("one", prompt, params, digest))
            outputs = [output for step in _steps(engine) for output in step]
            alone[digest, number] = tuple(t for output in outputs for t in output.token_ids)
            for likely in (logprobs.top for output in outputs for logprobs in output.logprobs):
                assert likely[0][1] - likely[1][1] > _CLEAR, "choose other weights"
        answers = {alone[digest, number] for digest in (None, *paths)}
        assert len(answers) == 1 + len(paths), "a wrong version would not be seen"
    return alone


def _steps(engine: Engine) -> list[tuple[TokenOutput, ...]]:
    steps = []
    while engine.has_work:
        steps.append(engine.step().outputs)
    return steps


@dataclass(slots=True)
class Tally:
    """The events that the interleavings met; all of them must happen, otherwise the runs prove
    nothing."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, what: str, number: int = 1) -> None:
        self.counts[what] += number


@dataclass(slots=True)
class Entry:
    request: Request
    tokens: dict[int, tuple[int, ...]]  # of the choices so far
    open: set[int]
    aborted: set[int] = field(default_factory=set)
    may_be_lost: bool = False  # its adapter was dropped from the full host while it waited


@dataclass(slots=True)
class Ledger:
    """Checks that each request ends exactly once, with the tokens of its own version and no
    others."""

    world: World
    tally: Tally
    entries: dict[str, Entry] = field(default_factory=dict)

    def open(self, request: Request) -> None:
        assert request.request_id not in self.entries
        choices = range(request.params.n)
        self.entries[request.request_id] = Entry(request, dict.fromkeys(choices, ()), set(choices))
        self.tally.add("requests")

    def is_open(self, request_id: str) -> bool:
        return bool(self.entries[request_id].open)

    @property
    def open_ids(self) -> tuple[str, ...]:
        return tuple(request_id for request_id in self.entries if self.is_open(request_id))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        entry = self.entries[request_id]
        entry.aborted |= entry.open if choice is None else {choice}

    def note_dropped(self, digests: tuple[str, ...]) -> None:
        self.tally.add("dropped", len(digests))
        for entry in self.entries.values():
            entry.may_be_lost |= bool(entry.open) and entry.request.adapter in digests

    def take(self, output: TokenOutput) -> None:
        entry = self.entries[output.request_id]
        assert output.choice in entry.open, "it has ended before"
        before = entry.tokens[output.choice]
        assert output.offset == len(before)
        tokens = before + output.token_ids
        entry.tokens[output.choice] = tokens
        expected = self.world.expected(entry.request)
        assert tokens == expected[: len(tokens)], "tokens of another version"
        self.tally.add("tokens", len(output.token_ids))
        if output.finish_reason is None:
            return
        entry.open.remove(output.choice)
        self.tally.add(f"ended: {output.finish_reason}")
        if output.finish_reason == "length":
            assert tokens == expected
        elif output.finish_reason == "abort":
            assert output.choice in entry.aborted
        else:
            assert output.finish_reason == "error"
            assert entry.may_be_lost
            assert output.error == f"adapter {entry.request.adapter} is no longer loaded"
