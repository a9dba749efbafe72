"""The promises that every fleet must have kept after it has quieted down.

Each function yields the violations in words.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from serve_app.tally import ArmKey
from serve_app.tenancy.usage import Usage
from tests.fleet_clients import Client
from tests.fleet_ingress import FleetIngress
from tests.fleet_node import EngineNode
from tests.fleet_plan import BROKEN, DEATHS, DIGESTS, LOST, UNKNOWN, Plan
from tests.virtual_loop import VirtualLoop

_LASTING = (
    "Gateway._follow",
    "Gateway._report",
    "EngineConnections._",
    "Migrations._watch_engines",
    "EngineHost._beat",
    "EngineNode._exit_with_the_engine",
    "Manager.",
    "Event.wait",
    "_run",
    "_keep",  # see `serve_app.tasks`
    "RouterMetricsManager._report_cached_metrics_forever",
)
_OF_LOSSES = (
    "engine_unavailable",
    "engine_out_of_memory",
    "overloaded",
    "adapter_not_loaded",
    "unavailable",
)
# Faults that cost a request its engine, though the engine does not die.
_SOFT = ("freeze", "hang", "cut", "cut at once")
_OF_REQUESTS = ("Generation", "TokenStream", "AdmissionQueue", "Attempt", "Timeout")


def wrong_answers(
    clients: Sequence[Client],
    seeds: dict[str, set[int]],
    plan: Plan,
    happened: Mapping[str, int],
    died_s: Sequence[float],
) -> Iterator[str]:
    """Checks that every request ended once, with its own tokens, and failed only for a reason.
    `happened`: how often each kind of fault; `died_s`: when each engine died."""
    for client in clients:
        name = f"request {client.number} ({client.wish})"
        for fault in client.faults(seeds, DIGESTS):
            yield f"{name}: {fault}"
        if client.has_left or not client.task.done() or client.has_ended_well:
            continue
        code = client.code or "?"
        num_deaths = sum(client.began_s < one <= client.ended_s for one in died_s)
        is_soft = any(happened[one] for one in _SOFT)
        most = num_deaths if plan.migration.limit and not is_soft else 99
        if code == "request_quarantined" and most < 2:
            yield f"{name}: {code}, though {num_deaths} engines died meanwhile"
        if not _is_excused(client, code, plan, happened, most):
            yield f"{name}: {code} without a reason: {client.body[-200:]!r}"


def _is_excused(
    client: Client, code: str, plan: Plan, happened: Mapping[str, int], most: int
) -> bool:
    """Returns True if a fault of this fleet justifies this error code. `most`: so many engines may
    have been lost under the request."""
    wish, limit = client.wish, plan.migration.limit
    deaths = min(most, sum(happened[one] for one in DEATHS) + 9 * bool(plan.poison))
    if code == "model_not_found":
        return wish.model == UNKNOWN
    if code == "adapter_unsupported":
        return wish.model == BROKEN
    if code in ("unavailable", "bad_artifact", "quarantined"):
        return wish.model == LOST
    if code == "overloaded":
        return not plan.is_roomy or plan.max_open < plan.num_requests or bool(wish.padding)
    if code == "request_quarantined":  # no proof for a request that was alone at two dying engines
        return wish.is_poison or deaths >= 2
    if code == "body_timeout":
        return bool(wish.body_s)
    if code == "engine_out_of_memory":
        return happened["no memory"] > 0 and happened["no memory"] + deaths > limit
    if code == "engine_unavailable":
        # A silence is detected later than the time limit of such a migration.
        is_silent = happened["hang"] + happened["freeze"] > 0
        is_late = plan.migration.timeout_s < 10 and (is_silent or not plan.is_roomy)
        return deaths + happened["cancel"] > limit or is_late
    return False


def wrong_counts(ingress: FleetIngress, clients: Sequence[Client]) -> Iterator[str]:
    """Checks that the metrics agree with the clients of this ingress, each counted once."""
    name, metrics = ingress.name, ingress.state.metrics
    own = [client for client in clients if client.ingress is ingress and client.task.done()]
    stayed = [client for client in own if not client.has_left]
    left = len(own) - len(stayed)
    answers = Counter(client.status for client in own if client.status is not None)
    counted: Counter[int | None] = Counter()
    for (_, status, _), count in metrics._answers.items():
        counted[int(status)] += count
    if counted != answers:
        yield f"{name}: answers are {dict(counted)}, not {dict(answers)}"
    gone = sum(one.has_begun and (not one.is_whole or one.status == 499) for one in own)
    if metrics.num_disconnects != gone:
        yield f"{name}: {metrics.num_disconnects} disconnects, not {gone}"
    yield from _wrong_outcomes(ingress, own)
    codes = Counter(client.code for client in stayed)
    lost = sum(ingress.gateway.migrations.metrics.lost.values())
    # A request that leaves its engine may be refused by all others.
    most = sum(codes[code] for code in _OF_LOSSES) + left
    if not codes["engine_unavailable"] <= lost <= most:
        yield f"{name}: {lost} requests are lost, but at most {most} clients were answered so"
    stats = ingress.state.queues.stats
    shed = stats.num_turned_away + sum(one.sheds.total() for one in stats._bases.values())
    if shed > codes["overloaded"] + left:
        yield f"{name}: {shed} refusals are counted, but {codes['overloaded']} were sent"


def wrong_usage(recorded: Mapping[str, Usage], clients: Sequence[Client]) -> Iterator[str]:
    """Checks that each request is recorded once, with the tokens that its client received, however
    often it moved; a request that was refused is not recorded. Each client has its own key."""
    for client in clients:
        name, used = f"request {client.number} ({client.wish})", recorded.get(client.request_id)
        most = client.wish.max_tokens * client.wish.n * len(client.wish.engine_prompts)
        if client.has_left or (client.status == 200 and not client.has_ended_well):
            if used is not None and (used.requests > 1 or used.output_tokens > most):
                yield f"{name}: {used} is recorded of a part"
        elif client.has_ended_well:
            usage = client.usage or {}
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            wanted = 1, usage["prompt_tokens"], cached, usage["completion_tokens"]
            if used is None or wanted != (
                *(used.requests, used.prompt_tokens, used.cached_tokens, used.output_tokens),
            ):
                yield f"{name}: {used} is recorded, not {wanted}"
        elif used is not None:
            yield f"{name}: {used} is recorded though it was refused with {client.status}"


def _wrong_outcomes(ingress: FleetIngress, clients: Sequence[Client]) -> Iterator[str]:
    """Checks that each arm counts each of its requests once, with its own outcome."""
    by_id = {client.request_id: client for client in clients}
    wanted: defaultdict[ArmKey, Counter[str]] = defaultdict(Counter)
    outcomes = ingress.outcomes
    num_watched = Counter(key for key, _ in ingress.watched)
    for key, request_id in ingress.watched:
        client = by_id.get(request_id)
        if client is not None and (outcome := client.outcome) is not None:
            wanted[key][outcome] += 1
    for key, number in num_watched.items():
        arm = f"{ingress.name}: the arm {key.adapter}@{key.version} ({key.arm})"
        if outcomes[key].total() != number:
            yield f"{arm} counts {outcomes[key].total()} of {number} watched requests"
        if lacking := wanted[key] - outcomes[key]:
            yield f"{arm} counts {dict(outcomes[key])}, which lacks {dict(lacking)}"


def leftovers(
    loop: VirtualLoop, ingresses: Sequence[FleetIngress], nodes: Sequence[EngineNode]
) -> Iterator[str]:
    """Checks that no request leaves anything behind and that every view is right again. `nodes`:
    the nodes that serve."""
    for node in nodes:
        yield from node.leftovers()
    for ingress in ingresses:
        yield from ingress.leftovers()
        yield from ingress.misjudged(nodes)
    for task in asyncio.all_tasks(loop):
        name = getattr(task.get_coro(), "__qualname__", "?")
        if not name.startswith(_LASTING):
            yield f"a task is left: {name}"
    for timer in loop._scheduled:  # type: ignore[attr-defined]
        name = getattr(timer._callback, "__qualname__", "?")
        if not timer.cancelled() and name.startswith(_OF_REQUESTS):
            yield f"a timer is left: {name}"
