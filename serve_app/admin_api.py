"""JSON answers of the admin API that the server encodes and the command line decodes.

The answers about bases and canaries are `platform_view.BaseLine` and `canary.status.CanaryStatus`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

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


class BaseRemoval(msgspec.Struct, frozen=True):
    """The answer of DELETE /admin/bases/{name}."""

    name: str
    still_served_as: str | None  # another base with the same files, which answers for the name


class BaseSeries(msgspec.Struct, frozen=True):
    """The series of a base, one value for each time of the answer; None: no report came."""

    name: str
    requests_per_s: list[float | None]  # finished
    errors_per_s: list[float | None]  # of these, the server failed
    refused_per_s: list[float | None]  # of these, refused
    prompt_tokens_per_s: list[float | None]  # of finished requests
    output_tokens_per_s: list[float | None]  # of finished requests
    ttft_p50_s: list[float | None]
    ttft_p95_s: list[float | None]
    running: list[int | None]
    waiting: list[int | None]  # in ingresses and engines
    kv_usage: list[float | None]  # 0 to 1, mean of the engines


class SeriesAnswer(msgspec.Struct, frozen=True):
    """The answer of GET /admin/series."""

    interval_s: int
    times_s: list[int]  # Unix time of the begin of each interval
    bases: list[BaseSeries]


class RegisteredBase(msgspec.Struct, frozen=True):
    """A base version in GET /admin/registry."""

    name: str
    version: int
    digest: str
    aliases: tuple[str, ...]
    is_default: bool  # the bare name means this version
    architecture: str
    num_parameters: int
    max_model_len: int | None
    created_s: int
    tags: dict[str, str]  # the user's own


class RegisteredAdapter(msgspec.Struct, frozen=True):
    """An adapter version in GET /admin/registry."""

    name: str
    version: int
    digest: str
    base: str
    aliases: tuple[str, ...]
    is_default: bool  # the bare name means this version
    rank: int
    targets: tuple[str, ...]
    num_parameters: int
    is_noop: bool
    effect: str  # the verdict of the last check; empty: never checked
    effect_figures: dict[str, float]  # of the last check, as in the tags
    refused: str  # why it cannot be served
    text: str
    settings: dict[str, str]  # of the name
    created_s: int
    tags: dict[str, str]


class RefusedVersion(msgspec.Struct, frozen=True):
    name: str
    version: int
    reason: str


class RegistryAnswer(msgspec.Struct, frozen=True):
    """The answer of GET /admin/registry: the catalog that this ingress serves by."""

    revision: str
    error: str | None  # set while the registry is away; then the catalog is the last good one
    bases: list[RegisteredBase]
    adapters: list[RegisteredAdapter]
    rejected: list[RefusedVersion]
    dangling: list[str]  # aliases on versions that cannot be served, in words


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


class RouteAnswer(msgspec.Struct, frozen=True):
    """The answer of POST /admin/route, the chosen replica first."""

    base: str
    policy: str
    tokens: int
    adapter: str | None  # content digest
    replicas: list[RouteLine]


class KeyLine(msgspec.Struct, frozen=True):
    """A key, without its secret. The names are LiteLLM's where they mean the same."""

    token_id: str
    key_name: str
    key_alias: str | None
    team_id: str  # the tenant
    models: tuple[str, ...]
    scopes: tuple[str, ...]
    rpm_limit: int | None
    tpm_limit: int | None
    max_parallel_requests: int | None
    tokens_per_day: int | None
    tokens_per_month: int | None
    max_tokens: int | None
    lowest_priority: int | None
    metadata: dict[str, Any]
    created_at: str
    expires: str | None
    previous_secret_until: str | None = None


class KeyInfo(msgspec.Struct, frozen=True):
    """The answer of GET /key/info."""

    key: str
    info: KeyLine


class NewKey(KeyLine, frozen=True, kw_only=True):
    """The answer of POST /key/generate and /key/regenerate."""

    key: str  # the whole key, shown this once


class UsageLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """An entry of GET /admin/usage: the sums of a group, named by the fields of `by`."""

    requests: int
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens
    output_tokens: int
    engine_ms: float
    cost: float  # by today's prices
    key: str | None = None
    tenant: str | None = None
    base: str | None = None
    model: str | None = None
    arm: str | None = None
    hour: str | None = None  # its begin, in UTC
    day: str | None = None


_USAGE_SUMS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "engine_ms", "cost")


class UsageLines(msgspec.Struct, frozen=True, rename={"from_": "from"}):
    from_: str
    to: str
    usage: list[UsageLine]


class KeyLines(msgspec.Struct, frozen=True):
    """The answer of GET /key/list?return_full_object=true."""

    keys: list[KeyLine]
    total_count: int
    current_page: int
    total_pages: int


def usage_csv(by: Sequence[str], lines: Sequence[UsageLine]) -> str:
    """Returns the lines as CSV with a header, `by` first."""
    text = io.StringIO()
    names = (*by, *_USAGE_SUMS)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for line in lines:
        values = msgspec.structs.asdict(line)
        writer.writerow([_cell(values[name]) for name in names])
    return text.getvalue()


def _cell(value: object) -> object:
    """Returns a value that no spreadsheet runs as a formula: tenants may have any name."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value
