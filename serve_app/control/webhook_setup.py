"""Asks the registry to call us when something changes. Its refusal is no failure of ours: polling
sees every change, only later.
"""

from __future__ import annotations

import asyncio
import logging

from registry.errors import RegistryError
from serve_app.config import WEBHOOK_SECRET, webhook_secret
from serve_app.platform_view import RegistryReader

logger = logging.getLogger(__name__)

_RETRY_S = 60.0


async def announce(registry: RegistryReader, url: str) -> None:
    """Until it worked once."""
    secret = webhook_secret()
    if secret is None:
        logger.error("no webhook %s: %s is not set; polling goes on", url, WEBHOOK_SECRET)
        return
    while True:
        try:
            await asyncio.to_thread(registry.ensure_webhook, url, secret)
        except RegistryError as error:
            logger.warning("no webhook %s yet, polling goes on: %s", url, error)
            await asyncio.sleep(_RETRY_S)
        except Exception:
            logger.exception("no webhook %s yet, polling goes on", url)
            await asyncio.sleep(_RETRY_S)
        else:
            logger.info("the registry calls %s when something changes", url)
            return
