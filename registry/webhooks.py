"""MLflow's webhooks: the events to subscribe to, and the verification of a delivery's signature.

Pure, without MLflow: the processes that receive deliveries do not import it. A delivery only
signals a change; the change itself is read from the registry.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Mapping

# All model events of MLflow 3.17. There is none for a deleted version, a deleted model or a tag of
# a registered model: polling finds these changes.
EVENTS = (
    "registered_model.created",
    "model_version.created",
    "model_version_tag.set",
    "model_version_tag.deleted",
    "model_version_alias.created",  # also when it moves
    "model_version_alias.deleted",
)
SIGNATURE = "x-mlflow-signature"
DELIVERY_ID = "x-mlflow-delivery-id"
TIMESTAMP = "x-mlflow-timestamp"
MAX_AGE_S = 300.0

_MAX_SEEN = 10_000  # 1.5 MB; MLflow sends a few a second at most
_VERSION = "v1"
_SECONDS = re.compile(r"[0-9]{1,12}", re.ASCII)


class BadDeliveryError(Exception):
    """The delivery is not signed with the secret, or is too old; the message has the reason."""


class SeenDeliveries:
    """The ids of accepted deliveries, kept for as long as a copy would still pass `check_delivery`.
    Beyond `_MAX_SEEN` the oldest is dropped."""

    def __init__(self) -> None:
        self._seen_s: OrderedDict[str, float] = OrderedDict()  # by id, the oldest first

    def __len__(self) -> int:
        return len(self._seen_s)

    def has(self, delivery_id: str, now_s: float) -> bool:
        self._forget(now_s)
        return delivery_id in self._seen_s

    def add(self, delivery_id: str, now_s: float) -> None:
        self._forget(now_s)
        self._seen_s.setdefault(delivery_id, now_s)
        if len(self._seen_s) > _MAX_SEEN:
            self._seen_s.popitem(last=False)

    def _forget(self, now_s: float) -> None:
        # A timestamp may be as far ahead of this clock as behind it.
        while self._seen_s and next(iter(self._seen_s.values())) < now_s - 2 * MAX_AGE_S:
            self._seen_s.popitem(last=False)


def hook_name(url: str) -> str:
    """Returns a webhook name that is unique to the URL: several servers may share an MLflow."""
    return f"loraplex-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def check_delivery(secret: str, headers: Mapping[str, str], body: bytes, now_s: float) -> None:
    """Raises BadDeliveryError for a bad delivery. `headers` have lower-case names."""
    timestamp = headers.get(TIMESTAMP, "")
    expected = sign(secret, headers.get(DELIVERY_ID, ""), timestamp, body)
    given = headers.get(SIGNATURE, "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode()):
        raise BadDeliveryError("the signature is missing or wrong")
    if not _SECONDS.fullmatch(timestamp) or abs(now_s - int(timestamp)) > MAX_AGE_S:
        raise BadDeliveryError(f"it was not signed within {MAX_AGE_S:.0f} seconds of now")


def sign(secret: str, delivery_id: str, timestamp: str, body: bytes) -> str:
    content = f"{delivery_id}.{timestamp}.".encode("utf-8", "replace") + body
    digest = hmac.new(secret.encode(), content, hashlib.sha256).digest()
    return f"{_VERSION},{base64.b64encode(digest).decode()}"
