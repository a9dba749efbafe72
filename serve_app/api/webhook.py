"""/v1/registry/webhook: the MLflow server reports that its registry changed. Only the signature of
a delivery is used: a valid one makes the manager read the registry at once. A delivery is accepted
once; copies of it get the same response and have no effect.
"""

from __future__ import annotations

import asyncio
import logging
import time

from fastapi import APIRouter, Request, Response

from registry.webhooks import DELIVERY_ID, SIGNATURE, BadDeliveryError, check_delivery
from serve_app.api.state import state_of
from serve_app.config import WEBHOOK_SECRET, secret
from serve_app.errors import ApiError, ServiceUnavailableError
from serve_app.http.asgi import read_body
from serve_app.ray_calls import RAY_ERRORS

logger = logging.getLogger(__name__)
router = APIRouter()

PATH = "/v1/registry/webhook"
_MAX_BODY_BYTES = 1024**2  # a version's tags may hold the list of its files
_MANAGER_TIMEOUT_S = 5.0


@router.post(PATH, include_in_schema=False)
async def webhook(request: Request) -> Response:
    key = secret(WEBHOOK_SECRET)
    if key is None:
        raise ApiError(
            403, f"Webhooks are off: set {WEBHOOK_SECRET} for the server.", code="webhooks_off"
        )
    body = await read_body(request, _MAX_BODY_BYTES)
    state, now_s = state_of(request), time.time()
    try:
        check_delivery(key, request.headers, body, now_s)
    except BadDeliveryError as error:
        raise ApiError(
            401, f"The delivery was refused: {error}.", code="invalid_signature"
        ) from error
    delivery_id = request.headers.get(DELIVERY_ID) or request.headers[SIGNATURE]
    if state.deliveries.has(delivery_id, now_s):  # a replay, or MLflow missed our response
        return Response(status_code=204)
    try:
        async with asyncio.timeout(_MANAGER_TIMEOUT_S):
            await state.gateway.manager.wake.remote()
    except (*RAY_ERRORS, TimeoutError) as error:
        logger.warning("a webhook could not wake the manager: %s", error)
        raise ServiceUnavailableError("The manager does not respond.", 1) from error
    # Recorded only now: after a 503, MLflow sends the delivery again with the same id.
    state.deliveries.add(delivery_id, now_s)
    return Response(status_code=204)
