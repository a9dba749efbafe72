"""JSON answers of the admin API that the server encodes and the command line decodes.

Those of bases and canaries are `platform_view.BaseLine` and `canary.status.CanaryStatus`.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class AdapterResidency(msgspec.Struct, frozen=True):
    """The tier in which an engine replica has an adapter version."""

    engine: str
    tier: str  # device, host, disk, or registry if the node has no copy
    bytes: int = 0  # in memory
    pinned: bool = False
    references: int = 0  # requests in the engine that use it
    # In memory only:
    is_leaving: bool | UnsetType = UNSET  # it leaves memory with its last request
    used_s: float | UnsetType = UNSET
    why_not_pinned: str | UnsetType = UNSET


class AdapterLine(msgspec.Struct, frozen=True):
    """An entry of GET /admin/adapters."""

    name: str
    version: int
    digest: str
    base: str
    aliases: tuple[str, ...]
    is_default: bool  # the bare name means this version
    pin: bool
    engines: tuple[AdapterResidency, ...]


class AdapterLines(msgspec.Struct, frozen=True):
    adapters: list[AdapterLine]


class EngineResult(msgspec.Struct, frozen=True):
    engine: str
    outcome: str


class EngineResults(msgspec.Struct, frozen=True):
    """The answer of POST /admin/adapters/NAME/preload and /evict."""

    name: str
    version: int
    engines: list[EngineResult]


class ExpectedMs(msgspec.Struct, frozen=True):
    """The terms of an expected time to first token, in milliseconds."""

    queue: float
    adapter: float
    prefill: float
    way: float
    total: float


class RouteLine(msgspec.Struct, frozen=True):
    """An engine replica that a request could go to."""

    replica: str
    reason: str
    expected_ms: ExpectedMs
    adapter_tier: str
    cached_tokens: int
    queued_tokens: int
    sequences: int
    kv_usage: float
    is_connected: bool
    is_draining: bool


class RouteAnswer(msgspec.Struct, frozen=True):
    """The answer of POST /admin/route, the chosen replica first."""

    base: str
    policy: str
    tokens: int
    adapter: str | None  # content digest
    replicas: list[RouteLine]
