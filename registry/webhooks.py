"""MLflow's webhooks: which events are wanted, and whether a delivery is from who knows the secret.

Pure, without MLflow: the processes that take deliveries do not import it. A delivery only says
that something changed; what changed is read from the registry itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections import OrderedDict
from collections.abc import Mapping

# All that MLflow 3.17 tells of models. It says nothing of a deleted version, a deleted model or a
# tag of a registered model: polling finds those.
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
    """Not from who knows the secret, or too old; the message says which."""


class SeenDeliveries:
    """The ids of deliveries that were taken, for as long as a copy of one would still pass
    `check_delivery`. Beyond `_MAX_SEEN` the oldest is forgotten."""

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
        # A timestamp may lie as far ahead of this clock as behind it.
        while self._seen_s and next(iter(self._seen_s.values())) < now_s - 2 * MAX_AGE_S:
            self._seen_s.popitem(last=False)


def hook_name(url: str) -> str:
    """Several servers may have a webhook each in one MLflow."""
    return f"loraplex-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def check_delivery(secret: str, headers: Mapping[str, str], body: bytes, now_s: float) -> None:
    """`headers` are looked up by lower-case names."""
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
