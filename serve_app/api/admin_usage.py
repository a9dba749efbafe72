"""/admin/usage and /key/usage: the recorded use of the server, and that of the caller's key, as
JSON or CSV.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any, cast

from fastapi import APIRouter, Depends, Request, Response

from engine.errors import InvalidRequestError
from serve_app.admin_api import UsageLine, UsageLines, usage_csv
from serve_app.api.admin_auth import caller_of, refuse_unknown, require_admin
from serve_app.api.state import state_of
from serve_app.errors import shown
from serve_app.http.asgi import json_response
from serve_app.ray_calls import ask_manager
from serve_app.tenancy.authentication import ADMIN
from serve_app.tenancy.orders import HOUR_S, Group, UsageGroup, UsageQuery, check_groups

router = APIRouter(dependencies=[Depends(require_admin)], include_in_schema=False)

_OFFSET = re.compile(r" (\d\d(:?\d\d)?)$")
_PARAMETERS = frozenset({"by", "from", "to", "format"})


@router.get("/admin/usage")
async def usage(request: Request) -> Response:
    """Returns the sums of requests, tokens, engine time and cost. `by`: comma-separated, of key,
    tenant, base, model, arm, hour and day; `from`, `to`: dates or times, UTC unless they have an
    offset, by default this month until now; `format`: json or csv."""
    return await _answer(request, None)


@router.get("/key/usage")
async def own_usage(request: Request) -> Response:
    """Returns the same of the caller's key alone."""
    return await _answer(request, (caller_of(request) or ADMIN).key_id)


async def _answer(request: Request, key_id: str | None) -> Response:
    given = request.query_params
    refuse_unknown(request, _PARAMETERS)
    kind = given.get("format", "json")
    if kind not in ("json", "csv"):
        raise _bad("format", f"must be json or csv, got {shown(kind)}")
    query = _query(given.get("by", "key"), given.get("from"), given.get("to"), key_id)
    manager = state_of(request).gateway.manager
    groups = cast("list[UsageGroup]", await ask_manager(manager.usage, query))
    lines = [_line(query.by, group) for group in groups]
    if kind == "csv":
        return Response(usage_csv(query.by, lines), media_type="text/csv")
    return json_response(UsageLines(_shown(query.from_s), _shown(query.to_s), lines))


def _query(by: str, from_: str | None, to: str | None, key_id: str | None) -> UsageQuery:
    try:
        names = check_groups([name.strip() for name in by.split(",")])
    except ValueError as error:
        raise _bad("by", str(error)) from None
    now = datetime.now(UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    from_s = month.timestamp() if from_ is None else _seconds("from", from_)
    # Whole hours: the present hour counts from its beginning.
    to_s = (time.time() // HOUR_S + 1) * HOUR_S if to is None else _seconds("to", to)
    if from_s >= to_s:
        raise _bad("from", f"must be before to, got {_shown(from_s)} and {_shown(to_s)}")
    return UsageQuery(names, from_s, to_s, key_id)


def _seconds(name: str, text: str) -> float:
    try:
        # A plus of an offset that was not escaped arrives as a space.
        time_ = datetime.fromisoformat(_OFFSET.sub(r"+\1", text) if "T" in text else text)
    except ValueError:
        raise _bad(
            name, f"must be a date or a time such as 2026-11-01T12:00Z, got {shown(text)}"
        ) from None
    try:
        seconds = (time_ if time_.tzinfo else time_.replace(tzinfo=UTC)).timestamp()
        _shown(seconds)  # in UTC, which may be another year
        return seconds
    except (OverflowError, ValueError):
        raise _bad(name, f"is too far away: {shown(text)}") from None


def _line(by: tuple[Group, ...], group: UsageGroup) -> UsageLine:
    sums = group.usage
    named: dict[str, Any] = {
        name: _shown(float(value)) if name in ("hour", "day") else str(value)
        for name, value in zip(by, group.values, strict=True)
    }
    return UsageLine(
        *(sums.requests, sums.prompt_tokens, sums.cached_tokens, sums.output_tokens),
        *(round(sums.engine_ms, 3), round(group.cost, 6)),
        **named,
    )


def _shown(time_s: float) -> str:
    # Not `strftime`, whose years before 1000 have fewer than the four digits that readers expect.
    time_ = datetime.fromtimestamp(time_s, UTC).replace(tzinfo=None)
    return time_.isoformat(timespec="seconds") + "Z"


def _bad(name: str, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name}: {words}.", name)
