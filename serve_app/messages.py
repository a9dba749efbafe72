"""The values that cross a process border: between the ingresses, the manager, the engine replicas
and their engines. Frozen; ignorant of HTTP, of configuration and of where files come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from engine.admission import EngineLimits
from engine.types import Request, Resident
from registry.entities import AdapterVersion
from serve_app.tally import ArmCounts, ArmKey

ENGINE, DOOR = "engine", "door"  # the deployments of a base's application
REPORT_INTERVAL_S = 1.0
PIN = "pin"

QuarantinedRequest = tuple[bytes, float]  # fingerprint, remaining seconds


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The view of a submit call that admission and routing decide on."""

    call_id: str
    num_tokens: int  # of all prompts, and of the tokens that a resumed choice recomputes
    num_sequences: int = 1
    adapter: str | None = None  # key of its adapters, see `engine.types.adapter_key`
    adapter_rank: int = 0  # of all of them
    _: KW_ONLY
    num_base_tokens: int = 0  # of `num_tokens`, before the invocation of an aLoRA
    # Registered name of the first, so that its versions share; "": the base model
    adapter_name: str = ""
    tenant: str = ""  # account that is charged, see `admission.tenants`
    priority: int = 0  # lower is earlier
    prefixes: tuple[int, ...] = ()  # `engine.prefix_digests` of its first prompt
    session: str | None = None  # requests of one session prefer the same replica
    avoid: frozenset[str] = frozenset()  # replicas that it was migrated from or that died with it
    only: str | None = None  # for a warm-up: the one replica that may be chosen
    dry_run: bool = False  # the decision is only reported: no request is sent, no state changes


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """The address at which an ingress replica listens for tokens; part of each submit call."""

    host: str
    port: int
    token: str
    ingress_id: str
    certificate: str = ""  # PEM, the only one to trust; empty: the connection is not encrypted


@dataclass(frozen=True, slots=True)
class SubmitCall:
    """The engine requests of an HTTP request (one per prompt), all with the same adapters."""

    requests: tuple[Request, ...]
    adapters: tuple[AdapterVersion, ...]
    reply_to: StreamAddress
    routing: RoutingRequest  # for the router in the caller's process; a replica gets only its id

    def __reduce__(self) -> tuple[type[SubmitCall], tuple[object, ...]]:
        """Leaves the router's part out, a tenth of the bytes of a long prompt: Serve's router has
        chosen the replica before the call is pickled for it."""
        stub = RoutingRequest(self.routing.call_id, 0)
        return SubmitCall, (self.requests, self.adapters, self.reply_to, stub)


@dataclass(frozen=True, slots=True)
class BaseDescription:
    """The properties of a base that an ingress and its text workers need: its text files, by name,
    and the limits of its engine."""

    files: dict[str, bytes]
    limits: EngineLimits
    digest: str = ""  # of the base, with the response template that its configuration names
    generation_config: str = "auto"  # or "vllm": generation_config.json sets no defaults
    # The text files that an adapter of the base brings, see `adapter_text.own_files`.
    own: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """The outcome of an order at an engine replica."""

    engine: str
    is_done: bool
    words: str


@dataclass(frozen=True, slots=True)
class ReplicaAdapters:
    """The adapters of an engine replica, in memory and on disk."""

    engine: str
    residents: tuple[Resident, ...]
    local_digests: frozenset[str]  # on its node's disk
    pin_failures: dict[str, str]  # digest -> why it is not kept in memory
    refused: dict[str, str] = field(default_factory=dict)  # digest -> why the engine refuses it


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapters that every engine replica of a base is to keep and to unload."""

    epoch: str = ""  # of the manager: numbers of different epochs cannot be compared
    pins: tuple[AdapterVersion, ...] = ()
    retired: tuple[tuple[str, int], ...] = ()  # digest, number: each is unloaded once


@dataclass(frozen=True, slots=True)
class AdapterChange:
    """An operator's order about an adapter."""

    kind: Literal["pin", "unpin", "load", "undo_load", "unload"]
    name: str
    folder: str = ""  # load: on the manager's machine
    base: str = ""  # load: a registered name, @version allowed
    may_replace: bool = False  # load, undo_load: another version of a name that is loaded
    version: int = 0  # undo_load: the version that the load registered


@dataclass(frozen=True, slots=True)
class BaseChange:
    """An operator's order about a base."""

    kind: Literal["add", "remove", "sleep", "wake"]
    name: str  # of the registered model
    setting: str = "{}"  # for add: JSON of a ModelArgs without its name


@dataclass(frozen=True, slots=True)
class CanaryChange:
    kind: Literal["start", "promote", "abort"]
    name: str  # of the adapter
    # start: a number or an alias, None: the version that has the alias `canary` (or `shadow`);
    # promote: the expected canary, None: any
    version: int | str | None = None
    weight: float | None = None  # start: share of the requests for the canary, None: no canary
    shadow: float | None = None  # start: share of the requests to copy, None: no shadow


@dataclass(frozen=True, slots=True)
class Backlog:
    """The requests that wait in an ingress until an engine has capacity for them."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts
    sent_per_s: float = 0.0  # recent rate of requests that went to engines
    refused_per_s: float = 0.0  # recent rate of requests that were refused for lack of space

    @property
    def is_empty(self) -> bool:
        """True if the backlog need not be sent: an engine replica without a backlog assumes it."""
        return not self.num_requests and not self.refused_per_s


def total(backlogs: Sequence[Backlog]) -> Backlog:
    return Backlog(
        sum(backlog.num_requests for backlog in backlogs),
        sum(backlog.num_tokens for backlog in backlogs),
        sum(backlog.sent_per_s for backlog in backlogs),
        sum(backlog.refused_per_s for backlog in backlogs),
    )


@dataclass(frozen=True, slots=True)
class BaseActivity:
    """The requests of a base at an ingress."""

    digest: str
    num_open: int  # HTTP requests that have not ended, including those that wait for its start
    idle_s: float  # since the last request ended; 0 while any is open
    backlog: Backlog = Backlog()


@dataclass(frozen=True, slots=True)
class IngressCounts:
    """The counts of an ingress since it started, in Prometheus' text format."""

    serial: int  # increases with each
    text: bytes
    was_taken: bool  # a manager has received some of this ingress's counts before


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The load of an engine replica, as an ingress sees it."""

    engine: str
    num_running: int
    num_waiting: int
    kv_usage: float  # 0 to 1


@dataclass(frozen=True, slots=True)
class BaseFigures:
    """The figures of a base for the console's charts. Counts of finished requests are since the
    ingress started."""

    name: str
    num_requests: int = 0
    num_errors: int = 0  # the server failed
    num_refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: tuple[int, ...] = ()  # a count per bucket of SECONDS, and of longer times
    num_queued: int = 0  # wait in this ingress
    engines: tuple[EngineFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class IngressReport:
    """The state of an ingress: complete, so that a lost report does no harm."""

    ingress_id: str
    bases: tuple[BaseActivity, ...] = ()
    applications: tuple[str, ...] = ()  # receive requests from it
    # (digest, sleep_epoch) of the bases that no longer receive anything from it
    asleep: tuple[tuple[str, float], ...] = ()
    arms: tuple[tuple[ArmKey, ArmCounts], ...] = ()  # since this ingress started
    quarantined: tuple[QuarantinedRequest, ...] = ()
    is_draining: bool = False  # it accepts no new requests
    counts: IngressCounts | None = None
    figures: tuple[BaseFigures, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """The manager's answer to a report: the state of the other ingresses."""

    num_ingresses: int  # including itself: each sees its share of limits that hold for all
    quarantined: tuple[QuarantinedRequest, ...] = ()
