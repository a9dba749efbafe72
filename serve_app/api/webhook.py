"""/v1/registry/webhook: the MLflow server says that something changed. Nothing of the delivery is
believed but that it came from who knows the secret: it wakes the manager's watch, no more. A
delivery that was taken is not taken again: its copies get the same answer and do nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

from fastapi import APIRouter, Request, Response
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from registry.webhooks import DELIVERY_ID, SIGNATURE, BadDeliveryError, check_delivery
from serve_app.api.state import state_of
from serve_app.config import WEBHOOK_SECRET, webhook_secret
from serve_app.errors import ApiError, ServiceUnavailableError
from serve_app.http.asgi import read_body

logger = logging.getLogger(__name__)
router = APIRouter()

PATH = "/v1/registry/webhook"
_MAX_BODY_BYTES = 1024**2  # a version's tags may hold the list of its files
_MANAGER_TIMEOUT_S = 5.0


@router.post(PATH, include_in_schema=False)
async def webhook(request: Request) -> Response:
    secret = webhook_secret()
    if secret is None:
        raise ApiError(
            403, f"Webhooks are off: the server runs without {WEBHOOK_SECRET}.", code="webhooks_off"
        )
    body = await read_body(request, _MAX_BODY_BYTES)
    state, now_s = state_of(request), time.time()
    try:
        check_delivery(secret, request.headers, body, now_s)
    except BadDeliveryError as error:
        raise ApiError(401, f"Not taken: {error}.", code="invalid_signature") from error
    delivery_id = request.headers.get(DELIVERY_ID) or request.headers[SIGNATURE]
    if state.deliveries.has(delivery_id, now_s):  # a replay, or MLflow missed our answer
        return Response(status_code=204)
    try:
        async with asyncio.timeout(_MANAGER_TIMEOUT_S):
            await state.gateway.manager.wake.remote()
    except (RayError, RayServeException, TimeoutError) as error:
        logger.warning("a webhook could not wake the manager: %s", error)
        raise ServiceUnavailableError("The manager does not answer.", 1) from error
    # Only now: MLflow tries a delivery that got 503 again, with the same id.
    state.deliveries.add(delivery_id, now_s)
    return Response(status_code=204)
