"""The account of one request: admitted against the limits of its key, settled with its real use.

A request counts once, however often it was migrated. The work of an engine is paid for, also if
the client left; a request that was refused, or that failed without an answer, is free.
"""

from __future__ import annotations

from dataclasses import dataclass

from serve_app.admission.queue import AdmissionQueue
from serve_app.api.state import IngressState
from serve_app.dialects.messages import PATH as MESSAGES_PATH
from serve_app.dispatch.base_handle import Route
from serve_app.dispatch.completion import Completion, PreparedRequest
from serve_app.tenancy.caller import Caller
from serve_app.tenancy.limits import Accounts, Charge
from serve_app.tenancy.usage import Usage, UsageKey


@dataclass(slots=True, eq=False)
class RequestAccount:
    """Made by `admit`. `close` ends it at the end of the answer; a second call has no effect."""

    _accounts: Accounts
    _charge: Charge
    _key: UsageKey
    completion: Completion | None = None  # None until its turn for an engine has come

    def close(self) -> None:
        completion, self.completion = self.completion, None
        if completion is None or not completion.has_computed:
            self._charge.close()
            return
        if completion.has_failed and not completion.has_begun:  # the client received an error alone
            self._charge.close()
            return
        counts = completion.usage()
        usage = Usage(
            *(1, counts.prompt_tokens, counts.prompt_tokens_details.cached_tokens),
            *(counts.completion_tokens, 1000 * completion.engine_s),
        )
        self._charge.settle(usage.num_tokens)
        self._accounts.meter.add(self._key, usage)


def check(state: IngressState, caller: Caller | None) -> None:
    """Refuses a request of a key that has reached a limit, before its body is read. Raises
    RateLimitError."""
    if state.accounts is not None and caller is not None:
        state.accounts.limits.check(caller)


async def admit(
    state: IngressState,
    caller: Caller | None,
    route: Route,
    queue: AdmissionQueue,
    prepared: PreparedRequest,
    max_tokens: int,
) -> RequestAccount | None:
    """Charges the prompts and the expected output, at most `max_tokens`, to the caller's key.
    Returns None where requests need no key. Raises RateLimitError."""
    if state.accounts is None or caller is None:
        return None
    routing, resolution = prepared.routing, route.resolution
    num_output = queue.expected_output(routing.num_sequences, max_tokens)
    charge = await state.accounts.limits.admit(caller, routing.num_tokens + num_output)
    version = resolution.adapter or resolution.base
    key = UsageKey(
        caller.key_id,
        caller.policy.tenant,
        resolution.base.name,
        f"{version.name}@{version.version}",
        routing.adapter_rank,
        route.arm_name,
    )
    return RequestAccount(state.accounts, charge, key)


def headers(state: IngressState, caller: Caller | None, path: str) -> dict[str, str]:
    """Returns the headers about the limits of the caller's key, in the shape of the path's API."""
    if state.accounts is None or caller is None:
        return {}
    return state.accounts.limits.headers(caller, for_anthropic=path.startswith(MESSAGES_PATH))
