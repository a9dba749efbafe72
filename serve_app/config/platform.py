"""The configuration of the whole platform: registry, ingress, fairness, canaries, and the list of
base models."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Strict, model_validator

from registry.catalog import DEFAULT_ALIAS
from registry.sources import check_listed
from serve_app.config.models import ModelArgs, base_name
from serve_app.config.tenancy import TenancyArgs
from serve_app.config.values import (
    AliasName,
    Args,
    Bytes,
    HostName,
    Origin,
    RangeArgs,
    ScaledArgs,
)
from serve_app.routing.policies import PolicyError, make_policy

# "module:class"; not a part of the default installation
OTLP_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter:OTLPSpanExporter"


class RegistryArgs(Args):
    """The MLflow registry and the local copies of its files."""

    tracking_uri: str | None = None
    """The URI of an MLflow server or database. By default the variable `MLFLOW_TRACKING_URI`,
    otherwise SQLite in the home."""
    artifact_root: Path | None = None
    """The folder in which a database other than SQLite keeps the files. By default the variable
    `LORAPLEX_ARTIFACT_ROOT`."""
    alias: AliasName = DEFAULT_ALIAS
    """The alias that a bare name means."""
    poll_interval_s: float = Field(default=2.0, gt=0)
    """Seconds between two looks at the registry."""
    webhook_url: str | None = Field(default=None, pattern=r"^https?://[^\s/]+/")
    """The URL of this server's `/v1/registry/webhook`, as the MLflow server reaches it. By default
    polling only."""
    check_adapters: bool = True
    """Whether versions that plain MLflow registered are checked while the server runs. Their
    effect, or the reason why they cannot be served, becomes tags of the version."""
    artifact_schemes: tuple[Annotated[str, AfterValidator(check_listed)], ...] = ()
    """Artifact stores that versions are read from in addition to the tracking server's own: `s3`,
    `s3://bucket` for one bucket, `file` for any path of a node's disk. By default the variable
    `LORAPLEX_ARTIFACT_SCHEMES`, separated by commas."""
    cache_bytes: Bytes | None = None
    """The limit of a node's local copies; the least recently used are evicted, never one in use. By
    default 80 % of the disk space that is free at the start or already holds copies."""


class IngressScalingArgs(RangeArgs):
    """Scales the ingress replicas with their open requests."""

    target_ongoing_requests: float = Field(default=200.0, gt=0)
    """The open requests per replica to aim at."""
    upscale_delay_s: float = Field(default=5.0, ge=0)
    """Seconds for which more replicas must be needed before they are added."""
    downscale_delay_s: float = Field(default=120.0, ge=0)
    """Seconds for which fewer replicas must suffice before some are removed."""


class FairnessArgs(Args):
    """The order of requests while engines are full: tenants take turns, then the adapters of each
    tenant, by the tokens that they have had."""

    tenant_header: str = Field(default="x-tenant-id", pattern=r"^[A-Za-z0-9-]+$")
    """The header with the tenant, set by the gateway in front. Requests without it are one tenant.
    Without `ingress.trusted_gateway` all tenants that `weights` does not name share one account."""
    weights: dict[str, Annotated[float, Strict(), Field(gt=0)]] = Field(default={})
    """The share of each tenant; 1 for all others."""
    isolate_prefix_cache: Literal["tenant", "none"] = "tenant"
    """`tenant`: no prompt meets another tenant's KV blocks. `none`: all tenants share them, so that
    `cached_tokens` reveals whether another tenant sent the same prefix; a client's `cache_salt`
    still separates."""
    max_wait_s: float = Field(default=10.0, gt=0)
    """The longest wait of a tenant behind other tenants, and of an adapter behind the tenant's
    other adapters."""
    max_engine_queue_s: float = Field(default=0.5, gt=0)
    """Seconds of work that engines receive ahead. The rest waits in the ingress, where it can be
    ordered."""
    max_queue_s: float = Field(default=30.0, gt=0)
    """A request that would wait longer gets 429 at once, also if it waits behind its own tenant's
    requests."""


class IngressArgs(ScaledArgs):
    """The HTTP front: ingress replicas and the limits of their clients."""

    autoscaling: IngressScalingArgs | None = None
    """Off by default."""
    max_ongoing_requests: int = Field(default=1000, ge=1)
    """The most open requests per replica; beyond it requests get 429. A request counts as soon as
    its body is complete."""
    max_queued_requests: int = Field(default=1000, ge=1)
    """The most queued requests per proxy; beyond it requests get 429."""
    max_body_bytes: Bytes = 16 * 1024**2
    """The largest body."""
    max_header_bytes: int = Field(default=32 * 1024, ge=1024)
    """The largest header of a request."""
    header_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which a connection has to send a whole header."""
    body_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds in which a body has to arrive, plus one for each 16 KiB that has come."""
    max_arriving_requests: int = Field(default=2000, ge=1)
    """The most bodies that arrive at once, per process. Beyond it the oldest is given up with
    429."""
    max_arriving_bytes: Bytes = 256 * 1024**2
    """The most bytes of arriving bodies, per process. Beyond it the oldest is given up with 429.
    The first 64 KiB of each body are not counted."""
    max_unread_bytes: int = Field(default=1024**2, ge=64 * 1024)
    """The most output of a stream that its client has not read; beyond it the connection is
    closed."""
    write_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds for which the end of an answer may remain unread before the connection is closed."""
    allowed_hosts: tuple[HostName, ...] = ()
    """Names by which clients may call the server in addition to `localhost`, `127.0.0.1` and
    `[::1]`; `*`: any. Without a trusted gateway other names are refused, so that no web page can
    rebind its own name to this server."""
    cors_origins: tuple[Origin, ...] = ()
    """Web pages that may call the server, such as `https://chat.example.com`."""
    allow_runtime_lora_updating: bool = False
    """Whether `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` exist. They take paths on the
    manager's disk and need the admin token."""
    tokenizer_threads: int = Field(default=2, ge=1)
    """Threads that tokenize, per replica."""
    metrics_max_age_s: float = Field(default=1.0, ge=0)
    """The greatest age of the numbers at `/metrics`."""
    max_shadow_requests: int = Field(default=8, ge=0)
    """The most shadow copies at once, per replica. No copies are made while requests wait."""
    trusted_gateway: str | None = Field(default=None, pattern=r"\S")
    """The name or address of the gateway in front that authenticates clients, sets the tenant
    header of every request and removes a client's own. With it the header is believed and each name
    in it is a tenant; without it the server listens on loopback only."""
    graceful_shutdown_timeout_s: float = Field(default=600.0, ge=0)
    """Seconds that a replica that goes waits for its longest stream."""


class MetricsArgs(Args):
    """The series at `/metrics` whose number grows with the registry, and copies of them."""

    max_adapters: int = Field(default=50, ge=0, le=10_000)
    """The busiest adapters that have series of their own, per ingress replica. All others share
    `other`."""
    max_tenants: int = Field(default=50, ge=0, le=10_000)
    """The busiest tenants of keys that have series of their own, per ingress replica. The tenants
    that `fairness.weights` names always have."""
    to_ray: bool = False
    """Whether engine replicas export their metrics through Ray, too, as `ray_vllm_*`: Ray's Serve
    LLM dashboard reads these names."""


class RequestLogArgs(Args):
    """The request log: one JSON line for each finished request, without prompts and answers."""

    enabled: bool = False
    """Whether it is written. Off by default: a line for each request is a use of the disk that only
    its operator can weigh."""
    path: Path | None = None
    """Its file. By default `logs/requests.jsonl` in the home. A second ingress replica on the same
    machine writes to `requests-1.jsonl`, and so on."""
    max_bytes: Bytes = 64 * 1024**2
    """The size at which the file is rotated: `requests.jsonl.1` is the part before it. 0: never."""
    num_files: int = Field(default=3, ge=2, le=1000)
    """The files of each ingress replica that are kept, the current one included."""


class LoggingArgs(Args):
    """Logs for operators."""

    requests: RequestLogArgs = RequestLogArgs()


class TracesArgs(Args):
    """Traces of requests, by OpenTelemetry (extra `otel`), without prompts and answers."""

    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """The URL that receives traces by OTLP over HTTP, such as `http://collector:4318/v1/traces`. No
    traces by default. The variable `OTEL_EXPORTER_OTLP_HEADERS` adds headers."""
    sample_ratio: float = Field(default=0.01, ge=0, le=1)
    """The share of requests that is traced. A request with a `traceparent` header follows the
    decision of its caller."""

    @model_validator(mode="after")
    def _has_exporter(self) -> TracesArgs:
        if self.otlp_endpoint is not None and not _has_module(OTLP_EXPORTER.partition(":")[0]):
            raise ValueError(
                f"otlp_endpoint is {self.otlp_endpoint!r}, but OpenTelemetry's exporter is not "
                "installed; install loraplex[otel]"
            )
        return self


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is missing
        return False


class CanaryArgs(Args):
    """The margins beyond which a canary is rolled back automatically.

    A canary must be worse than the stable version by more than these margins, and the counts must
    make that certain: within the margins it is rolled back in less than 1 % of hours (see
    `canary/verdict.py`). A canary that is far worse goes after `min_requests`; little more than the
    margin takes much longer to detect. If the stable version has had hardly a request, the canary
    goes only if most of its own fail; a canary that had all the traffic from the start is compared
    with rates of 0.
    """

    min_requests: int = Field(default=50, ge=1)
    """The fewest requests of the canary before it is judged; of both versions for the latency."""
    max_error_rate_increase: float = Field(default=0.02, ge=0, le=1)
    """The margin of the share of requests that fail."""
    max_empty_rate_increase: float = Field(default=0.05, ge=0, le=1)
    """The margin of the share of answers without visible text."""
    max_non_finite: int = Field(default=0, ge=0)
    """The most non-finite outputs; does not wait for `min_requests`."""
    max_left_rate_increase: float = Field(default=0.2, ge=0, le=1)
    """The margin of the share of clients that leave before the end."""
    max_latency_ratio: float = Field(default=2.0, ge=1)
    """The highest ratio of the p95 times to first token, of requests that found their adapter on
    the device."""
    window_s: float = Field(default=600.0, gt=0)
    """A canary is judged since its trial began and since several later moments, the last ones a
    quarter of this apart: a good past does not hide a bad present for long."""


class PlatformArgs(Args):
    """All of `args`."""

    models: tuple[ModelArgs, ...] = ()
    registry: RegistryArgs = RegistryArgs()
    ingress: IngressArgs = IngressArgs()
    canary: CanaryArgs = CanaryArgs()
    fairness: FairnessArgs = FairnessArgs()
    tenancy: TenancyArgs = TenancyArgs()
    metrics: MetricsArgs = MetricsArgs()
    logging: LoggingArgs = LoggingArgs()
    traces: TracesArgs = TracesArgs()

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
    """Constructs every router policy of a configuration file once, `module:Class` ones included.

    Raises PolicyError, which names the model. Only for a file that its operator starts: this
    imports the modules that the file names.
    """
    for model in args.models:
        try:
            make_policy(model.router.policy, model.router.options)
        except PolicyError as error:
            raise PolicyError(f"models: {model.name}: router: {error}") from error
