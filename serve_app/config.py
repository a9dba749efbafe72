"""The `args` of the `api` application in a Serve config file, checked; only here is the environment
read.

YAML -> this pydantic tree (unknown keys are errors) -> frozen inward configs such as EngineConfig.
LORAPLEX_HOME (default ~/.loraplex) holds the embedded registry and the cache; the registry is
`registry.tracking_uri`, else MLFLOW_TRACKING_URI, else SQLite in the home; a database that is no
SQLite file needs `registry.artifact_root`, else LORAPLEX_ARTIFACT_ROOT.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from engine.config import EngineConfig
from registry.catalog import DEFAULT_ALIAS, DefaultAliases
from registry.errors import InvalidNameError
from registry.names import check_alias
from serve_app.home import default_home as default_home
from serve_app.routing.policies import make_policy

ADMIN_TOKEN = "LORAPLEX_ADMIN_TOKEN"  # the variable that holds it
WEBHOOK_SECRET = "LORAPLEX_WEBHOOK_SECRET"  # the variable that holds it

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_bytes(value: object) -> object:
    """256MiB, 1.5GB, 4096 -> a number of bytes; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write 1048576, 512MiB or 4GB")
    return int(float(match[1]) * _UNITS[match[2]])


def _legal_alias(value: str) -> str:
    try:
        return check_alias(value)
    except InvalidNameError as error:
        raise ValueError(str(error)) from error


AliasName = Annotated[str, AfterValidator(_legal_alias)]
Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]


class _Args(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


# A step on a GPU has to be large for its products to run at full rate; on a CPU it has to end.
STEP_LIMITS = {
    "cpu": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
    "cuda": {"max_num_batched_tokens": 8192, "max_num_seqs": 256},
}


class EngineArgs(_Args):
    """EngineConfig's fields as the user writes them; see there for what they mean."""

    backend: Literal["auto", "reference", "triton"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = Field(default=None, ge=1)
    block_size: int = Field(default=16, ge=1, le=1024)
    num_blocks: int | None = Field(default=None, ge=1)
    kv_cache_bytes: Bytes | None = None
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    max_num_batched_tokens: int | None = Field(default=None, ge=1)  # None: STEP_LIMITS
    max_num_seqs: int | None = Field(default=None, ge=1)  # None: STEP_LIMITS
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    adapter_pool_bytes: Bytes | None = None
    adapter_host_bytes: Bytes | None = None
    max_lora_rank: int = Field(default=512, ge=1)
    max_adapter_overtakes: int = Field(default=256, ge=0)
    seed: int = 0
    num_threads: int | None = Field(default=None, ge=1)

    def to_config(self, model_path: str, base_digest: str, device: str) -> EngineConfig:
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        fields = STEP_LIMITS[device] | given | {"device": device}
        return EngineConfig(model_path=model_path, base_digest=base_digest, **fields)


class _ScaledArgs(_Args):
    """`replicas` of something, or what it starts with where `autoscaling` is set."""

    replicas: int = Field(default=1, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _starts_with_the_least(cls, fields: object) -> object:
        if not isinstance(fields, dict) or "replicas" in fields:
            return fields
        scaling = fields.get("autoscaling")
        least = scaling.get("min_replicas") if isinstance(scaling, dict) else None
        least = getattr(scaling, "min_replicas", least)
        return fields if least is None else {**fields, "replicas": least}

    @model_validator(mode="after")
    def _starts_within_its_range(self) -> Self:
        scaling: AutoscalingArgs | IngressScalingArgs | None = getattr(self, "autoscaling", None)
        if scaling is None or scaling.min_replicas <= self.replicas <= scaling.max_replicas:
            return self
        raise ValueError(
            f"replicas is {self.replicas}, but autoscaling keeps it between "
            f"min_replicas {scaling.min_replicas} and max_replicas {scaling.max_replicas}"
        )


class RouterArgs(_Args):
    """How requests find an engine replica."""

    # expected_ttft, adapter_affinity, prefix_affinity, power_of_two, round_robin, or your own
    # class, as "module:Class"
    policy: str = Field(default="expected_ttft", min_length=1)
    options: dict[str, bool | int | float | str] = {}  # keyword arguments of the policy

    @model_validator(mode="after")
    def _policy_can_be_made(self) -> RouterArgs:
        make_policy(self)
        return self


class _RangeArgs(_Args):
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1)

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas {self.max_replicas} < min_replicas {self.min_replicas}")
        return self


class AutoscalingArgs(_RangeArgs):
    """Engine replicas of one base between two numbers; to zero and back: `idle_timeout_s`."""

    target_ttft_s: float = Field(default=1.0, gt=0)  # the expected one, queue included
    target_kv_usage: float = Field(default=0.85, gt=0, le=1)
    upscale_delay_s: float = Field(default=3.0, ge=0)
    downscale_delay_s: float = Field(default=60.0, ge=0)


class MigrationArgs(_Args):
    """Streams that outlive their engine."""

    limit: int = Field(default=3, ge=0)  # deaths of its engine that a request survives; 0: none
    timeout_s: float = Field(default=60.0, gt=0)  # for another replica to take it


class ModelArgs(_ScaledArgs):
    """One base model to serve: a registered name, as `name`, `name@alias` or `name@version`."""

    name: str = Field(min_length=1)
    alias: AliasName | None = None  # what its adapters' bare names mean; None: registry.alias
    engine: EngineArgs = EngineArgs()
    max_ongoing_requests: int = Field(default=256, ge=1)  # a replica
    max_queued_requests: int = Field(default=256, ge=0)  # an ingress replica; beyond it 429
    graceful_shutdown_timeout_s: float = Field(
        default=600.0, ge=0
    )  # the longest stream to wait for
    health_check_period_s: float = Field(default=2.0, gt=0)
    stall_timeout_s: float = Field(
        default=60.0, gt=0
    )  # no step for so long with work to do: replaced
    # Scale to zero: without a request for so long its engines stop. None: never.
    idle_timeout_s: float | None = Field(default=None, gt=0)
    # What a request for a base that sleeps gets while it starts: it waits, at most
    # max_queued_requests of them an ingress replica, or 503 with Retry-After.
    cold_start: Literal["wait", "refuse"] = "wait"
    cold_start_timeout_s: float = Field(default=300.0, gt=0)
    router: RouterArgs = RouterArgs()
    autoscaling: AutoscalingArgs | None = None  # then `replicas` is what it starts with
    migration: MigrationArgs = MigrationArgs()


# Changing these restarts no engine.
FRONT_SETTINGS = frozenset(
    {"alias", "idle_timeout_s", "cold_start", "cold_start_timeout_s", "migration"}
)


class RegistryArgs(_Args):
    tracking_uri: str | None = None
    artifact_root: Path | None = None  # where a database that is no SQLite file keeps the files
    alias: AliasName = DEFAULT_ALIAS  # what a bare name means
    poll_interval_s: float = Field(default=2.0, gt=0)
    # Of this server's /v1/registry/webhook, as the MLflow server reaches it. None: polling only.
    webhook_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+/")
    # Of a node's local copies. None: all that the disk holds; what is unused goes when it is full.
    cache_bytes: Bytes | None = None


class IngressScalingArgs(_RangeArgs):
    """Ingress replicas follow their own open requests."""

    target_ongoing_requests: float = Field(default=200.0, gt=0)  # a replica
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=120.0, ge=0)


class FairnessArgs(_Args):
    """Who goes first when engines are full: tenants, then each one's adapters, by the tokens they
    had."""

    # Set by the gateway in front; without it all are one tenant.
    tenant_header: str = Field(default="x-tenant-id", pattern=r"^[A-Za-z0-9-]+$")
    weights: dict[str, Annotated[float, Field(gt=0)]] = {}  # by tenant; 1 for all others
    # No tenant is passed over for longer, and of its turns none of its adapters.
    max_wait_s: float = Field(default=10.0, gt=0)
    # Work that engines are given ahead; the rest waits here, where it can be put in order.
    max_engine_queue_s: float = Field(default=0.5, gt=0)
    # Behind one's own requests too: who has to expect a longer wait gets 429 at once.
    max_queue_s: float = Field(default=30.0, gt=0)


class IngressArgs(_ScaledArgs):
    autoscaling: IngressScalingArgs | None = None  # then `replicas` is what it starts with
    max_ongoing_requests: int = Field(default=1000, ge=1)  # a replica; beyond it the proxy queues
    max_queued_requests: int = Field(default=1000, ge=0)  # a proxy; beyond it 429
    max_body_bytes: Bytes = 16 * 1024**2
    # /v1/load_lora_adapter and its opposite, which take paths on this machine's disk
    allow_runtime_lora_updating: bool = False
    tokenizer_threads: int = Field(default=2, ge=1)
    max_shadow_requests: int = Field(default=8, ge=0)  # at once, a replica; beyond it no copies
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0)


class CanaryArgs(_Args):
    """When a canary is rolled back by itself, compared with what its name means."""

    min_requests: int = Field(default=50, ge=1)  # of the canary; of both for the latency
    max_error_rate_increase: float = Field(default=0.02, ge=0, le=1)
    max_empty_rate_increase: float = Field(default=0.05, ge=0, le=1)  # ended without visible text
    max_non_finite: int = Field(default=0, ge=0)  # outputs; does not wait for min_requests
    max_latency_ratio: float = Field(default=2.0, ge=1)  # p95 of the time to first token
    # The rule looks back so far, and farther where that holds fewer than min_requests.
    window_s: float = Field(default=600.0, gt=0)


class PlatformArgs(_Args):
    """All of `args`."""

    models: tuple[ModelArgs, ...] = ()
    registry: RegistryArgs = RegistryArgs()
    ingress: IngressArgs = IngressArgs()
    canary: CanaryArgs = CanaryArgs()
    fairness: FairnessArgs = FairnessArgs()

    @model_validator(mode="after")
    def _names_are_distinct(self) -> PlatformArgs:
        names = [model.name for model in self.models]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models listed twice: {', '.join(twice)}")
        aliases = {(base_name(model), model.alias) for model in self.models if model.alias}
        if len(aliases) != len({name for name, _ in aliases}):
            raise ValueError("models of one base name have different aliases")
        return self


def base_name(model: ModelArgs) -> str:
    return model.name.partition("@")[0]


def default_aliases(everywhere: str, models: Iterable[ModelArgs]) -> DefaultAliases:
    own = {(base_name(model), model.alias) for model in models if model.alias is not None}
    return DefaultAliases(everywhere, tuple(sorted(own)))


def in_words(error: ValidationError, prefix: str = "") -> str:
    """Each wrong field by its path, in one sentence."""
    found = [
        f"{prefix}{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
        for one in error.errors()
    ]
    return "; ".join(found)


def tracking_uri(args: RegistryArgs) -> str:
    """An embedded SQLite registry unless the file or MLflow's own variable names another."""
    configured = args.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    return configured or embedded_uri()


def embedded_uri() -> str:
    return f"sqlite:///{default_home() / 'mlflow.db'}"


def artifact_root(args: RegistryArgs) -> Path | None:
    """Of a database; SQLite has its own beside the file, a server too."""
    configured = args.artifact_root or os.environ.get("LORAPLEX_ARTIFACT_ROOT")
    return Path(configured).expanduser() if configured else None


def webhook_secret() -> str | None:
    return os.environ.get(WEBHOOK_SECRET) or None


def admin_token() -> str | None:
    return os.environ.get(ADMIN_TOKEN) or None


def cache_folder() -> Path:
    return default_home() / "cache"
