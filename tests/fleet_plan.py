"""The plan of a random fleet: its size, its limits, the registered names, and the faults."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from registry.catalog import Catalog
from registry.entities import AdapterVersion, BaseVersion, Setting
from serve_app.config import FairnessArgs, MigrationArgs, ModelArgs
from serve_app.platform_view import PlatformView, ServedBase
from serve_app.text.base_text import BaseText
from tests.fakes_registry import write_text_files

APP = "base-app"
BROKEN, LOST, UNKNOWN = "broken", "lost", "unknown"
# The first of these may cost a fleet an engine; the last are no reason for a request to fail.
DEATHS = ("kill", "kill engine", "freeze", "hang", "drain", "cut", "cut at once")
FAULTS = (*DEATHS, "cancel", "no memory", "evict", "sleep")
_BASE = BaseVersion("base", 1, "b" * 64, "")


def _adapter(name: str, version: int = 1, *aliases: str) -> AdapterVersion:
    digest = f"{name}{version}".ljust(64, "0")
    return AdapterVersion(name, version, digest, "base", _BASE.digest, 16, ("q",), "", aliases)


_ADAPTERS = (
    _adapter("pirate", 1, "champion"),
    _adapter("pirate", 2, "shadow"),
    _adapter("poet", 1, "champion"),
    _adapter("poet", 2, "canary"),
    _adapter(BROKEN),
    _adapter(LOST),
)
_SETTINGS = (Setting("poet", "canary_weight", "0.5"), Setting("pirate", "shadow_weight", "0.5"))
DIGESTS = {f"{one.name}@{one.version}": one.digest for one in _ADAPTERS}
MODELS = ("base", "base", "base", "pirate", "poet", "poet", BROKEN, LOST, UNKNOWN)


@dataclass(frozen=True, slots=True)
class Plan:
    num_engines: int
    num_ingresses: int
    num_requests: int
    over_s: float  # the time in which the requests arrive
    faults: tuple[str, ...]  # in order
    replaced: float  # share of the hurt engines
    rows: int  # sequences per step of an engine
    batched_tokens: int  # tokens per step of an engine
    max_ongoing: int  # calls at a replica
    max_queued: int  # calls in Serve's router
    step_s: float
    models: tuple[str, ...]
    poison: float  # share of the requests
    leaving: float  # share of the clients
    migration: MigrationArgs
    fairness: FairnessArgs
    max_open: int
    policy: str

    @property
    def is_roomy(self) -> bool:
        """No request has a reason to wait long."""
        return self.rows >= 64 and self.max_ongoing >= 64 and self.batched_tokens > 64

    def view(self) -> PlatformView:
        base = ServedBase(_BASE, APP, "running", ModelArgs(name="base", migration=self.migration))
        catalog = Catalog((_BASE,), _ADAPTERS, settings=_SETTINGS)
        return PlatformView("1", catalog, (base,), (), True, None, cache_salt_key=b"k" * 32)


def draw_plan(draw: random.Random) -> Plan:
    is_roomy = draw.random() < 0.5
    kinds = draw.sample(FAULTS, draw.choice((1, 3, len(FAULTS))))
    return Plan(
        num_engines=draw.choice((2, 3, 4)),
        num_ingresses=draw.choice((1, 1, 2, 3)),
        num_requests=draw.choice((12, 25, 50)),
        over_s=draw.choice((1.0, 6.0, 15.0)),
        faults=tuple(draw.choice(kinds) for _ in range(draw.choice((0, 1, 3, 9)))),
        replaced=draw.choice((0.0, 0.7)),
        rows=64 if is_roomy else draw.choice((4, 8, 16)),
        batched_tokens=8192 if is_roomy else draw.choice((64, 8192)),
        max_ongoing=256 if is_roomy else draw.choice((2, 4, 256)),
        max_queued=256 if is_roomy else draw.choice((2, 256)),
        step_s=draw.choice((0.005, 0.02, 0.05)),
        models=tuple(one for one in MODELS if draw.random() < 0.7) or MODELS,
        poison=draw.choice((0.0, 0.0, 0.05, 0.15)),
        leaving=draw.choice((0.0, 0.3, 0.6)),
        migration=MigrationArgs(
            limit=draw.choice((0, 1, 3, 50, 50)), timeout_s=draw.choice((3.0, 60.0))
        ),
        fairness=FairnessArgs(
            weights={"gold": 4.0, "iron": 0.25},
            max_wait_s=draw.choice((0.5, 10.0)),
            max_engine_queue_s=draw.choice((0.05, 0.5)),
            max_queue_s=draw.choice((2.0, 30.0)),
        ),
        max_open=draw.choice((1000, 1000, 10)),
        policy=draw.choice(("expected_ttft", "expected_ttft", "power_of_two", "round_robin")),
    )


@cache
def base_text() -> tuple[dict[str, bytes], BaseText]:
    """Returns the files of a base and its text side."""
    with tempfile.TemporaryDirectory() as folder:
        write_text_files(Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    return files, BaseText.from_files(files)


@cache
def characters() -> tuple[dict[str, int], dict[int, str]]:
    """Returns the map from characters to tokens, and back."""
    _, text = base_text()
    ids = {chr(code): text.encode(chr(code))[0] for code in (10, *range(32, 127))}
    return ids, {token_id: character for character, token_id in ids.items()}
