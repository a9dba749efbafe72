"""The values that cross a process: between the ingresses, the manager, the engine replicas and
their engines. Frozen; ignorant of HTTP, of configuration and of where files come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from engine.admission import EngineLimits
from engine.types import Request, Resident
from registry.entities import AdapterVersion
from serve_app.tally import ArmCounts, ArmKey

ENGINE, DOOR = "engine", "door"  # names of deployments in a base's application
REPORT_INTERVAL_S = 1.0
PIN = "pin"

QuarantinedRequest = tuple[bytes, float]  # fingerprint, seconds that are left


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """The view of a submit call that admission and routing decide on."""

    call_id: str
    num_tokens: int  # of all prompts, and of the tokens that a resumed choice recomputes
    num_sequences: int = 1
    adapter: str | None = None  # content digest
    adapter_rank: int = 0
    _: KW_ONLY
    adapter_name: str = ""  # registered name, so that its versions share; "": the base model
    tenant: str = ""  # account that is charged, see `admission.tenants`
    priority: int = 0  # lower is earlier
    prefixes: tuple[int, ...] = ()  # `engine.prefix_digests` of its first prompt
    session: str | None = None  # requests of one session prefer the same replica
    avoid: frozenset[str] = frozenset()  # replicas that it was migrated from or that died with it
    only: str | None = None  # for a warm-up: the one replica that may be chosen
    dry_run: bool = False  # the decision is only reported: no request is sent, no state changes


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """Where an ingress replica listens; travels inside the submit call."""

    host: str
    port: int
    token: str
    ingress_id: str
    certificate: str = ""  # PEM, the only one to trust; empty: the connection is plain


@dataclass(frozen=True, slots=True)
class SubmitCall:
    """One HTTP request's engine requests (one a prompt), all with the same adapter."""

    requests: tuple[Request, ...]
    adapter: AdapterVersion | None
    reply_to: StreamAddress
    ask: RoutingRequest  # for the router


@dataclass(frozen=True, slots=True)
class BaseDescription:
    """What a front needs of a base: its text files, by name, and the limits of its engine."""

    files: dict[str, bytes]
    limits: EngineLimits
    generation_config: str = "auto"  # or "vllm": generation_config.json sets no defaults


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """What became of an order at one engine replica."""

    engine: str
    is_done: bool
    words: str


@dataclass(frozen=True, slots=True)
class ReplicaAdapters:
    """What one engine replica has of adapters, and where."""

    engine: str
    residents: tuple[Resident, ...]
    local_digests: frozenset[str]  # on its node's disk
    pin_failures: dict[str, str]  # digest -> why it is not kept in memory
    refused: dict[str, str] = field(default_factory=dict)  # digest -> why the engine refuses it


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """For every engine replica of one base."""

    incarnation: str = ""  # of the manager: numbers of another one say nothing
    pins: tuple[AdapterVersion, ...] = ()
    retired: tuple[tuple[str, int], ...] = ()  # digest, number: once each


@dataclass(frozen=True, slots=True)
class AdapterChange:
    kind: Literal["pin", "unpin", "load", "undo_load", "unload"]
    name: str
    folder: str = ""  # load: on the manager's machine
    base: str = ""  # load: a registered name, @version allowed
    may_replace: bool = False  # load, undo_load: another version of a name that is loaded
    version: int = 0  # undo_load: the one that the load made


@dataclass(frozen=True, slots=True)
class BaseChange:
    kind: Literal["add", "remove", "sleep", "wake"]
    name: str  # of the registered model
    setting: str = "{}"  # for add: JSON of a ModelArgs without its name


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that wait in an ingress until an engine may have them."""

    num_requests: int = 0
    num_tokens: int = 0  # of their prompts
    sent_per_s: float = 0.0  # requests that went to engines, of late
    refused_per_s: float = 0.0  # and those that found no place

    @property
    def is_nothing(self) -> bool:
        """Whoever is told nothing of it knows the same."""
        return not self.num_requests and not self.refused_per_s


def total(backlogs: Sequence[Backlog]) -> Backlog:
    return Backlog(
        sum(one.num_requests for one in backlogs),
        sum(one.num_tokens for one in backlogs),
        sum(one.sent_per_s for one in backlogs),
        sum(one.refused_per_s for one in backlogs),
    )


@dataclass(frozen=True, slots=True)
class BaseActivity:
    """Of one base at one ingress."""

    digest: str
    num_open: int  # HTTP requests for it that have not ended, those that wait for it included
    idle_s: float  # since the last one ended; 0 while one is open
    backlog: Backlog = Backlog()


@dataclass(frozen=True, slots=True)
class IngressCounts:
    """The counts of an ingress since it started, in Prometheus' text format."""

    serial: int  # a later one is higher
    text: bytes
    was_taken: bool  # a manager has had some of this ingress's counts before


@dataclass(frozen=True, slots=True)
class IngressReport:
    ingress_id: str
    bases: tuple[BaseActivity, ...] = ()
    fronts: tuple[str, ...] = ()  # applications that it sends requests to
    # (digest, rest_id) of the bases that it sends nothing to any more
    asleep: tuple[tuple[str, float], ...] = ()
    arms: tuple[tuple[ArmKey, ArmCounts], ...] = ()  # since this ingress started
    quarantined: tuple[QuarantinedRequest, ...] = ()
    is_draining: bool = False  # it takes no new requests
    counts: IngressCounts | None = None


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What an ingress learns of the others."""

    num_ingresses: int  # itself included: what they share, each of them sees a part of
    quarantined: tuple[QuarantinedRequest, ...] = ()
