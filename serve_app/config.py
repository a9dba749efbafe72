"""The `args` of the `api` application in a Serve config file, checked; only here is the environment
read.

YAML -> this pydantic tree (unknown keys are errors) -> frozen inward configs such as EngineConfig.
LORAPLEX_HOME (default ~/.loraplex) holds the embedded registry and the cache; the registry is
`registry.tracking_uri`, else MLFLOW_TRACKING_URI, else SQLite in the home; a database that is no
SQLite file needs `registry.artifact_root`, else LORAPLEX_ARTIFACT_ROOT.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    model_validator,
)

from engine.config import EngineConfig
from registry.catalog import DEFAULT_ALIAS, DefaultAliases
from registry.sources import check_listed
from serve_app.config_values import AliasName, Args, Bytes, HostName, Origin, Replicas
from serve_app.home import default_home as default_home
from serve_app.routing.policies import PolicyError, check_policy, make_policy

ADMIN_TOKEN = "LORAPLEX_ADMIN_TOKEN"  # the variable that holds it
TRACKING_URI = "MLFLOW_TRACKING_URI"  # MLflow's own variable
ARTIFACT_ROOT = "LORAPLEX_ARTIFACT_ROOT"  # the variable for commands that read no file
ARTIFACT_SCHEMES = "LORAPLEX_ARTIFACT_SCHEMES"  # the variable for commands that read no file
WEBHOOK_SECRET = "LORAPLEX_WEBHOOK_SECRET"  # the variable that holds it
FRONT_LIMITS = "LORAPLEX_FRONT_LIMITS"  # the variable that brings args.ingress to Serve's proxies
LOG_FORMAT = "LORAPLEX_LOG_FORMAT"  # the variable that holds it

# A step on a GPU has to be large for its products to run at full rate; on a CPU it has to end.
STEP_LIMITS = {
    "cpu": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
    "cuda": {"max_num_batched_tokens": 8192, "max_num_seqs": 256},
}


class EngineArgs(Args):
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
    max_lora_rank: int = Field(default=512, ge=1, le=512)
    max_adapter_overtakes: int = Field(default=256, ge=0)
    seed: int = 0
    num_threads: int | None = Field(default=None, ge=1, le=4096)

    def to_config(self, model_path: str, base_digest: str, device: str) -> EngineConfig:
        given = {name: value for name, value in self.model_dump().items() if value is not None}
        fields = STEP_LIMITS[device] | given | {"device": device}
        return EngineConfig(model_path=model_path, base_digest=base_digest, **fields)


class _ScaledArgs(Args):
    """`replicas` of something, or what it starts with where `autoscaling` is set."""

    replicas: Replicas = 1

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


class RouterArgs(Args):
    """How requests find an engine replica."""

    # expected_ttft, adapter_affinity, prefix_affinity, power_of_two, round_robin, or your own
    # class, as "module:Class": only in the configuration file, imported where a router is made
    policy: str = Field(default="expected_ttft", min_length=1)
    options: dict[str, bool | int | float | str] = Field(
        default={}
    )  # keyword arguments of the policy

    @model_validator(mode="after")
    def _policy_is_known(self) -> RouterArgs:
        check_policy(self)
        return self


class _RangeArgs(Args):
    min_replicas: Replicas = 1
    max_replicas: Replicas

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


class MigrationArgs(Args):
    """Streams that outlive their engine."""

    limit: int = Field(default=3, ge=0)  # deaths of its engine that a request survives; 0: none
    timeout_s: float = Field(default=60.0, gt=0)  # for another replica to take it


class ModelArgs(_ScaledArgs):
    """One base model to serve: a registered name, as `name`, `name@alias` or `name@version`."""

    name: str = Field(min_length=1)
    alias: AliasName | None = None  # what its adapters' bare names mean; None: registry.alias
    engine: EngineArgs = EngineArgs()
    # As vLLM's --generation-config: the base's generation_config.json sets sampling defaults, or
    # ("vllm") does not.
    generation_config: Literal["auto", "vllm"] = "auto"
    max_ongoing_requests: int = Field(default=256, ge=1)  # a replica
    max_queued_requests: int = Field(default=256, ge=1)  # an ingress replica; beyond it 429
    graceful_shutdown_timeout_s: float = Field(
        default=600.0, ge=0
    )  # the longest stream to wait for
    health_check_period_s: float = Field(default=2.0, gt=0)
    # A step that takes longer counts as hung and its engine is replaced, sooner where such steps
    # take less: after 10 s, or 8 times the longest of the newest steps of that size.
    stall_timeout_s: float = Field(default=60.0, gt=0)
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


class RegistryArgs(Args):
    tracking_uri: str | None = None
    artifact_root: Path | None = None  # where a database that is no SQLite file keeps the files
    alias: AliasName = DEFAULT_ALIAS  # what a bare name means
    poll_interval_s: float = Field(default=2.0, gt=0)
    # Of this server's /v1/registry/webhook, as the MLflow server reaches it. None: polling only.
    webhook_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+/")
    # Whether versions that plain MLflow calls registered are checked beside serving: what they
    # change, or why they cannot be served, becomes tags of the version.
    check_adapters: bool = True
    # Artifact stores that versions are read from beside the tracking server's own: s3, or
    # s3://bucket for one of its buckets; file: any path of a node's disk.
    artifact_schemes: tuple[Annotated[str, AfterValidator(check_listed)], ...] = ()
    # Of a node's local copies; what is unused goes when it is full. None: 80 % of what the disk
    # has free at the start, or holds of them already.
    cache_bytes: Bytes | None = None


class IngressScalingArgs(_RangeArgs):
    """Ingress replicas follow their own open requests."""

    target_ongoing_requests: float = Field(default=200.0, gt=0)  # a replica
    upscale_delay_s: float = Field(default=5.0, ge=0)
    downscale_delay_s: float = Field(default=120.0, ge=0)


class FairnessArgs(Args):
    """The order of requests when engines are full: tenants, then the adapters of each tenant, by
    the tokens that they had."""

    # Set by the gateway in front; requests without it are one tenant. Without
    # `ingress.trusted_gateway` the tenants that `weights` does not name share one account.
    tenant_header: str = Field(default="x-tenant-id", pattern=r"^[A-Za-z0-9-]+$")
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})  # 1 for all others
    # "none": a prompt's KV blocks serve every tenant, and `cached_tokens` tells that another tenant
    # sent the same prefix; a client's `cache_salt` still separates.
    isolate_prefix_cache: Literal["tenant", "none"] = "tenant"
    # No tenant is passed over for longer, and of its turns none of its adapters.
    max_wait_s: float = Field(default=10.0, gt=0)
    # Work that engines are given ahead; the rest waits here, where it can be put in order.
    max_engine_queue_s: float = Field(default=0.5, gt=0)
    # Behind the tenant's own requests too: a request that would wait longer gets 429 at once.
    max_queue_s: float = Field(default=30.0, gt=0)


class IngressArgs(_ScaledArgs):
    autoscaling: IngressScalingArgs | None = None  # then `replicas` is what it starts with
    # A replica; beyond it 429. A request counts from the moment that its body is whole.
    max_ongoing_requests: int = Field(default=1000, ge=1)
    max_queued_requests: int = Field(default=1000, ge=1)  # a proxy; beyond it 429
    max_body_bytes: Bytes = 16 * 1024**2
    # Of one request's header, and seconds that a connection has to send a whole one.
    max_header_bytes: int = Field(default=32 * 1024, ge=1024)
    header_timeout_s: float = Field(default=10.0, gt=0)
    # Seconds that a body has to arrive, and one more for each 16 KiB of it that came.
    body_timeout_s: float = Field(default=10.0, gt=0)
    # Bodies that arrive at once, a process: beyond either bound the oldest one is given up, with
    # 429. The first 64 KiB of a body are not counted in the second.
    max_arriving_requests: int = Field(default=2000, ge=1)
    max_arriving_bytes: Bytes = 256 * 1024**2
    # A client that does not read: output of a stream that waits for it, and seconds that the end of
    # an answer waits without being read. Beyond either its connection is closed.
    max_unread_bytes: int = Field(default=1024**2, ge=64 * 1024)
    write_timeout_s: float = Field(default=60.0, gt=0)
    # Names by which clients may call the server beside localhost, 127.0.0.1 and [::1]; "*": any.
    # Without a trusted gateway all others are refused, so that no web page can rebind its name.
    allowed_hosts: tuple[HostName, ...] = ()
    cors_origins: tuple[Origin, ...] = ()  # web pages that may call it, as https://chat.example.com
    # /v1/load_lora_adapter and its opposite, which take paths on this machine's disk
    allow_runtime_lora_updating: bool = False
    tokenizer_threads: int = Field(default=2, ge=1)
    metrics_max_age_s: float = Field(default=1.0, ge=0)  # /metrics may be so old; see scrape
    max_shadow_requests: int = Field(default=8, ge=0)  # at once, a replica; beyond it no copies
    # The name or address of the authenticating gateway in front, which sets the tenant header of
    # every request and removes a client's own. With it the header is believed and each name in it
    # is a tenant; without it nothing proves the header.
    trusted_gateway: str | None = Field(default=None, pattern=r"\S")
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0)


class CanaryArgs(Args):
    """When a canary is rolled back by itself, compared with what its name means.

    It must be worse by more than these margins, and the counts must make that certain: a canary
    within the margins is rolled back in less than 1 % of hours (see `rollback`). A canary that is
    far worse goes after `min_requests`; a little more than the margin takes much longer to see.
    Beside a stable version that hardly had a request it goes only if most of its own fail; one
    that had all the traffic from the begin on is compared with rates of 0.
    """

    min_requests: int = Field(default=50, ge=1)  # of the canary; of both for the latency
    max_error_rate_increase: float = Field(default=0.02, ge=0, le=1)
    max_empty_rate_increase: float = Field(default=0.05, ge=0, le=1)  # ended without visible text
    max_non_finite: int = Field(default=0, ge=0)  # outputs; does not wait for min_requests
    max_left_rate_increase: float = Field(default=0.2, ge=0, le=1)  # clients that did not wait
    # p95 of the time to first token, of requests that found their adapter on the device
    max_latency_ratio: float = Field(default=2.0, ge=1)
    # What a canary does is judged since its trial began and since several later moments, the last
    # ones a quarter of this apart: the good time before does not hide a bad present for long.
    window_s: float = Field(default=600.0, gt=0)


class PlatformArgs(Args):
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


def check_routers(args: PlatformArgs) -> None:
    """Makes every router policy of a configuration file once, its `module:Class` ones too.

    Raises PolicyError, which names the model. Only for a file that its operator starts: this
    imports what the file names.
    """
    for model in args.models:
        try:
            make_policy(model.router)
        except PolicyError as error:
            raise PolicyError(f"models: {model.name}: router: {error}") from error


def base_name(model: ModelArgs) -> str:
    return model.name.partition("@")[0]


def default_aliases(everywhere: str, models: Iterable[ModelArgs]) -> DefaultAliases:
    """`models`: by their registered names. The first alias counts where a base has several."""
    own: dict[str, str] = {}
    for model in models:
        if model.alias is not None:
            own.setdefault(base_name(model), model.alias)
    return DefaultAliases(everywhere, tuple(sorted(own.items())))


def in_words(error: ValidationError, prefix: str = "") -> str:
    """Each wrong field by its path, in one sentence."""
    found = [
        f"{prefix}{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
        for one in error.errors()
    ]
    return "; ".join(found)


def tracking_uri(args: RegistryArgs) -> str:
    """An embedded SQLite registry unless the file or MLflow's own variable names another."""
    configured = args.tracking_uri or os.environ.get(TRACKING_URI)
    return configured or embedded_uri()


def embedded_uri() -> str:
    return f"sqlite:///{default_home() / 'mlflow.db'}"


def artifact_root(args: RegistryArgs) -> Path | None:
    """Of a database; SQLite has its own beside the file, a server too."""
    configured = args.artifact_root or os.environ.get(ARTIFACT_ROOT)
    return Path(configured).expanduser() if configured else None


def artifact_schemes(args: RegistryArgs) -> tuple[str, ...]:
    """The file's, else those of LORAPLEX_ARTIFACT_SCHEMES, apart by commas. ValueError names it."""
    if args.artifact_schemes:
        return args.artifact_schemes
    entries = (entry.strip() for entry in os.environ.get(ARTIFACT_SCHEMES, "").split(","))
    try:
        return tuple(check_listed(entry) for entry in entries if entry)
    except ValueError as error:
        raise ValueError(f"{ARTIFACT_SCHEMES}: {error}") from error


def environment_with(uri: str, root: Path | None, schemes: Iterable[str]) -> dict[str, str]:
    """This process's environment for a command that shall use the same registry and stores. The
    URI may hold a password, which every user of the machine would read among the arguments. The
    server's own secrets are left out."""
    own = {ADMIN_TOKEN, WEBHOOK_SECRET}
    given = {name: value for name, value in os.environ.items() if name not in own}
    if root is not None:
        given[ARTIFACT_ROOT] = str(root)
    return {**given, TRACKING_URI: uri, ARTIFACT_SCHEMES: ",".join(schemes)}


def webhook_secret() -> str | None:
    return os.environ.get(WEBHOOK_SECRET) or None


def admin_token() -> str | None:
    return os.environ.get(ADMIN_TOKEN) or None


def front_limits() -> IngressArgs:
    """In a process that Serve starts before the application, and without its arguments: what
    `loraplex serve` read from the file, else the defaults."""
    given = os.environ.get(FRONT_LIMITS)
    return IngressArgs() if given is None else IngressArgs.model_validate_json(given)


def log_format() -> str:
    """The form of the server's log lines; `loraplex serve --log-format` sets it."""
    value = os.environ.get(LOG_FORMAT) or "text"
    if value not in ("text", "json"):
        raise ValueError(f"{LOG_FORMAT} is {value!r}; it is text or json")
    return value


def cache_folder() -> Path:
    return default_home() / "cache"
