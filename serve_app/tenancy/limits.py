"""The limits of keys at an ingress: requests are admitted against the leases that the manager
grants, without I/O.

A lease that runs dry is claimed again at once, in one call for all dry keys; the requests wait for
its answer. A key that the answer leaves dry is refused, without a call, until there may be more.
Tokens are charged at the door, prompt and expected output, and settled when the request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from serve_app.errors import RateLimitError, ServiceUnavailableError
from serve_app.metrics.exposition import as_text, counter, gauge
from serve_app.tasks import check_running, keep
from serve_app.tenancy.caller import Caller
from serve_app.tenancy.leases import (
    BUDGETS,
    CLAIM_INTERVAL_S,
    Grants,
    LeaseRequest,
    LimitName,
    limits_of,
)
from serve_app.tenancy.local_leases import KeyLease
from serve_app.tenancy.usage import Record, UsageMeter

logger = logging.getLogger(__name__)

_CALL_S = 0.5  # without an answer the manager counts as away
_MAX_WAIT_S = 0.5  # of a request for the answer of a claim
_IDLE_S = 60.0  # after which a key is no longer active here

# None: the manager does not know the recorded use. Serve would log an error with its traceback.
Claim = Callable[[LeaseRequest], Awaitable[dict[str, Grants] | None]]

_CODES: Mapping[LimitName, tuple[str, str]] = {
    "requests": ("requests", "Rate limit reached: {limit} requests per minute."),
    "tokens": ("tokens", "Rate limit reached: {limit} tokens per minute."),
    "parallel": ("requests", "Rate limit reached: {limit} requests at the same time."),
    "day": ("insufficient_quota", "The key has used its {limit} tokens of this day."),
    "month": ("insufficient_quota", "The key has used its {limit} tokens of this month."),
}
# A budget that refuses for no longer is not used up: its rest is held elsewhere, or the manager is
# away. Clients repeat such a request.
_SOON_S = 5.0
_HELD = "The rest of the key's {limit} tokens of this {name} is held for other requests."


class Charge:
    """The amounts that an admitted request holds. `settle` it with its real use and `close` it; a
    charge that is closed without use is refunded. Both are idempotent."""

    __slots__ = ("_is_open", "_lease", "_rates", "_tokens")

    def __init__(self, lease: KeyLease | None, tokens: float) -> None:
        """`lease`: that the tokens are taken from; None for a key without limits."""
        self._lease = lease
        self._tokens = tokens
        self._rates = () if lease is None else lease.take(tokens)
        self._is_open = True

    def settle(self, num_tokens: int) -> None:
        """`num_tokens`: prompt and output that were computed for it; 0: none, as if it had never
        come."""
        if self._is_open:
            self._is_open = False
            if self._lease is not None:
                self._lease.settle(self._rates, self._tokens, num_tokens)

    def close(self) -> None:
        self.settle(0)


class Limits:
    """The leases of an ingress. All methods belong to its event loop."""

    def __init__(
        self,
        ingress_id: str,
        claim: Claim,
        num_ingresses: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`claim` calls the manager; `num_ingresses` share a key whose claim was never answered."""
        self.num_refused: dict[LimitName, int] = dict.fromkeys(_CODES, 0)
        self._ingress_id = ingress_id
        self._claim = claim
        self._num_ingresses = num_ingresses
        self._clock = clock
        self._leases: dict[str, KeyLease] = {}
        self._closed: list[str] = []
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}  # by key id
        self._asked = asyncio.Event()
        self._answered = asyncio.Event()  # set at the end of the call that is under way
        self._is_away = False  # the last call of the manager failed

    def start(self) -> asyncio.Task[None]:
        """Returns the task that claims leases from now on."""
        return keep(self._run, "claim-leases")

    def __len__(self) -> int:
        """The number of active keys."""
        return len(self._leases)

    def check(self, caller: Caller) -> None:
        """Refuses a request early, before its body is read, if its key is known to be dry. Raises
        RateLimitError."""
        if caller.key_id in self._leases and (lease := self._lease(caller)) is not None:
            now_s = self._clock()
            name = lease.lacking(1.0, now_s, is_away=self._is_away)
            if name is None or (lease.offers_slots and not self._is_away):
                return
            if self._is_away or lease.is_dry(name, now_s):
                lease.note_offer(lease.mean_tokens)
                raise self._refusal(lease, name, now_s)

    async def admit(self, caller: Caller, num_tokens: int) -> Charge:
        """Admits a request that is expected to use `num_tokens`, prompt and output. Raises
        RateLimitError."""
        lease = self._lease(caller)
        if lease is None:
            return Charge(None, 0)
        tokens = float(num_tokens)
        lease.note_offer(tokens)
        if lease.offers_slots and not self._is_away:
            with suppress(TimeoutError):
                async with asyncio.timeout(_MAX_WAIT_S):
                    await self._answered.wait()
        now_s = self._clock()
        name = lease.lacking(tokens, now_s, is_away=self._is_away)
        if name is not None and not self._is_away and not lease.is_dry(name, now_s):
            await self._wait_for_grant(caller.key_id, lease, tokens)
            now_s = self._clock()
            name = lease.lacking(tokens, now_s, is_away=self._is_away)
        if name is not None:
            raise self._refusal(lease, name, now_s)
        return Charge(lease, tokens)

    def headers(self, caller: Caller, *, for_anthropic: bool = False) -> dict[str, str]:
        """Returns the headers of an answer, as OpenAI's API has them, and as Anthropic's too if
        the answer is in its shape; {} without such limits."""
        lease = self._leases.get(caller.key_id)
        if lease is None:
            return {}
        now_s = self._clock()
        own = lease.anthropic_headers(now_s, time.time()) if for_anthropic else {}
        return lease.headers(now_s) | own

    def text(self) -> bytes:
        """Returns the counts in Prometheus' text format."""
        own = {"ingress": self._ingress_id}
        return as_text(
            counter("loraplex_limit_refusals", self.num_refused, own, "limit"),
            gauge("loraplex_active_limited_keys", len(self._leases), own),
        )

    def recorded(self, key_id: str, num_tokens: int) -> None:
        """Notes that the manager has recorded this use, which counts there from now on."""
        lease = self._leases.get(key_id)
        if lease is not None:
            lease.recorded(num_tokens)

    def _lease(self, caller: Caller) -> KeyLease | None:
        lease = self._leases.get(caller.key_id)
        if lease is None:
            if not limits_of(caller.policy):
                return None
            lease = KeyLease(caller.policy, self._clock(), self._num_ingresses())
            self._leases[caller.key_id] = lease
        elif lease.policy is not caller.policy and lease.policy != caller.policy:
            lease.change(caller.policy, self._num_ingresses())
        return lease

    def _refusal(self, lease: KeyLease, name: LimitName, now_s: float) -> RateLimitError:
        self.num_refused[name] += 1
        limit, wait_s = lease.refuse(name, now_s, is_away=self._is_away)
        kind, words = _CODES[name]
        if name in BUDGETS and wait_s <= _SOON_S:
            kind, words = "tokens", _HELD
        return RateLimitError(words.format(limit=limit, name=name), kind, wait_s)

    async def _wait_for_grant(self, key_id: str, lease: KeyLease, tokens: float) -> None:
        """Waits for the next answer to this key's claims, or until it is late."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key_id, []).append(answered)
        self._asked.set()
        with lease.waiting(tokens), suppress(TimeoutError):
            async with asyncio.timeout(_MAX_WAIT_S):
                await answered

    async def _run(self) -> None:
        loop, due_s = asyncio.get_running_loop(), self._clock()
        while True:
            timer = loop.call_later(max(0.0, due_s - self._clock()), self._asked.set)
            await self._asked.wait()
            timer.cancel()
            self._asked.clear()
            is_due = self._clock() >= due_s
            if is_due:
                due_s = self._clock() + CLAIM_INTERVAL_S
                self._forget_idle()
            await self._call(tuple(self._leases) if is_due else tuple(self._waiting))

    async def _call(self, key_ids: tuple[str, ...]) -> None:
        """Claims for these keys. One call at a time: an answer replaces the one before."""
        now_s = self._clock()
        keys = {
            key_id: lease.claims(now_s)
            for key_id in key_ids
            if (lease := self._leases.get(key_id)) is not None
        }
        if not keys and not self._closed:
            return
        waiting = {key_id: self._waiting.pop(key_id, []) for key_id in keys}
        request = LeaseRequest(self._ingress_id, keys, tuple(self._closed))
        self._answered.clear()
        try:
            async with asyncio.timeout(_CALL_S):
                grants = await self._claim(request)
            if grants is None:
                raise ServiceUnavailableError("It does not know the recorded use yet.")
        except Exception as error:  # claimed again by the next call
            if not self._is_away:
                logger.warning("could not claim leases from the manager: %r", error)
            self._is_away = True
        else:
            self._is_away = False
            del self._closed[: len(request.closed)]
            for key_id, granted in grants.items():
                if (lease := self._leases.get(key_id)) is not None:
                    lease.apply(granted, self._clock())
        finally:
            self._answered.set()
            for futures in waiting.values():
                for answered in futures:
                    if not answered.done():
                        answered.set_result(None)
        await asyncio.sleep(0)  # these requests take their grants before they are claimed again

    def _forget_idle(self) -> None:
        now_s = self._clock()
        for key_id, lease in tuple(self._leases.items()):
            if lease.is_idle and now_s - lease.used_s > _IDLE_S:
                del self._leases[key_id]
                self._closed.append(key_id)


class Accounts:
    """The accounts of callers at an ingress: their limits, and their use."""

    def __init__(
        self, ingress_id: str, lease: Claim, record: Record, num_ingresses: Callable[[], int]
    ) -> None:
        """`lease` and `record` call the manager."""
        self.limits = Limits(ingress_id, lease, num_ingresses)
        self.meter = UsageMeter(ingress_id, record, self.limits.recorded)
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    def start(self) -> None:
        self._tasks = self.limits.start(), self.meter.start()

    async def close(self) -> None:
        """Sends the use that is left; the leases expire."""
        await self.meter.close()

    def check_tasks(self) -> None:
        """Raises RuntimeError if leases are no longer claimed, or usage is no longer sent."""
        check_running(*self._tasks)
