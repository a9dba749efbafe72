"""The account of a request: what an engine computed is charged and recorded, a failure is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from engine.errors import EngineError
from serve_app.api.accounting import RequestAccount
from serve_app.dispatch.completion import Completion
from serve_app.errors import ClientGoneError
from serve_app.openai.engine_params import Prompt
from serve_app.tenancy.caller import Caller, KeyPolicy
from serve_app.tenancy.leases import Grants, LeaseRequest, Leases
from serve_app.tenancy.limits import Accounts
from serve_app.tenancy.usage import UsageBatch, UsageKey
from tests.answer_factory import completion
from tests.fakes_replicas import Fleet, make_request, running_fleet
from tests.text_factory import base_text
from tests.waiting import until

PROMPT = (11, 12, 13, 14)
PAUSED_AT = 5  # tokens
CHARGED = 100  # at the door
KEY = UsageKey("k", "acme", "base", "base@1")


class Account:
    """The accounts of an ingress with one open request, whose manager records everything."""

    def __init__(self) -> None:
        leases = Leases(burst_s=60.0)
        self.batches: list[UsageBatch] = []

        async def lease(request: LeaseRequest) -> Mapping[str, Grants]:
            now_s = asyncio.get_running_loop().time()
            return leases.grant(request, {}, {"day": 7200.0}, now_s)

        async def record(batch: UsageBatch) -> bool:
            self.batches.append(batch)
            return True

        self.accounts = Accounts("i0", lease, record, lambda: 1)  # type: ignore[arg-type]
        self.caller = Caller("k", KeyPolicy(max_parallel_requests=1, tokens_per_day=1000))

    async def open(self) -> RequestAccount:
        self.accounts.limits.start()
        charge = await self.accounts.limits.admit(self.caller, CHARGED)
        return RequestAccount(self.accounts, charge, KEY)

    async def sums(self) -> tuple[int, int, int]:
        """Returns the requests, the prompt tokens and the output tokens that were recorded."""
        await self.accounts.meter.send()
        rows = [usage for batch in self.batches for _, usage in batch.rows]
        return (
            sum(one.requests for one in rows),
            sum(one.prompt_tokens for one in rows),
            sum(one.output_tokens for one in rows),
        )

    @property
    def in_use(self) -> dict[str, float]:
        totals = self.accounts.limits._leases["k"]._totals
        return {name: total.in_use for name, total in totals.items()}


def make_completion(fleet: Fleet, folder: Path, **fields: object) -> Completion:
    builder = completion(base_text(folder), [Prompt(PROMPT, "x")], max_tokens=40, **fields)
    return Completion(fleet.generate(make_request(PROMPT)), builder)


async def answer(made: Completion, is_stream: bool) -> None:
    if is_stream:
        while True:
            await made.read()
    await made.whole()


async def end(made: Completion, whole: asyncio.Task[None], how: str) -> None:
    if how == "left":  # as `RequestScope.watch_client` has it
        made.client_left()
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(whole, 20)
    elif how == "cancelled":  # as Serve does when a client left
        whole.cancel()
        with suppress(asyncio.CancelledError):
            await whole
    else:
        made._generation.fail(EngineError("of the test"))
        with pytest.raises(EngineError):
            await asyncio.wait_for(whole, 20)


@pytest.mark.parametrize("form", ["whole", "stream", "stream whose text is held back"])
@pytest.mark.parametrize("how", ["left", "cancelled", "failed"])
async def test_tokens_until_a_client_leaves_are_charged_and_a_failure_is_not(
    tmp_path: Path, how: str, form: str
) -> None:
    is_stream = form != "whole"
    # The text may go on as the stop string until the end of the test.
    fields = {"stop": "()*+()*+()*+"} if form.endswith("held back") else {}
    account = Account()
    async with running_fleet(1) as fleet:
        fleet.replicas["e0"].engine.pause_at = PAUSED_AT
        made = make_completion(fleet, tmp_path, stream=is_stream, **fields)
        opened = await account.open()
        opened.completion = made
        whole = asyncio.create_task(answer(made, is_stream))
        await until(lambda: made.usage().completion_tokens == PAUSED_AT)
        assert account.in_use == {"parallel": 1, "day": CHARGED}
        await end(made, whole, how)
        made.close()
        opened.close()
        opened.close()  # counts once
    assert made.has_failed == (how == "failed")
    used = len(PROMPT) + PAUSED_AT
    if how == "failed" and form != "stream":  # the client received nothing but the error
        assert account.in_use == {"parallel": 0, "day": 0}
        assert await account.sums() == (0, 0, 0)
    else:
        assert account.in_use == {"parallel": 0, "day": used}  # until it is recorded
        assert await account.sums() == (1, len(PROMPT), PAUSED_AT)
        assert account.in_use == {"parallel": 0, "day": 0}


async def test_a_request_that_ends_before_its_turn_costs_nothing(tmp_path: Path) -> None:
    account = Account()
    opened = await account.open()
    opened.close()
    assert account.in_use == {"parallel": 0, "day": 0}
    assert await account.sums() == (0, 0, 0)
    async with running_fleet(1) as fleet:
        fleet.replicas["e0"].engine.pause_at = 0
        opened = await account.open()
        opened.completion = made = make_completion(fleet, tmp_path)
        whole = asyncio.create_task(made.whole())
        await asyncio.sleep(0)  # no engine has accepted it
        made.client_left()
        with pytest.raises(ClientGoneError):
            await asyncio.wait_for(whole, 20)
        made.close()
        opened.close()
    assert account.in_use == {"parallel": 0, "day": 0}
    assert await account.sums() == (0, 0, 0)
