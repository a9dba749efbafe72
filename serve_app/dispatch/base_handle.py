"""The handle of a base that can be called, and the route of a request to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from ray import serve
from ray.serve.handle import DeploymentHandle

from registry.catalog import Resolution
from registry.entities import AdapterVersion, BaseVersion
from serve_app.config import MigrationArgs
from serve_app.errors import AdapterUnsupportedError, ServiceUnavailableError
from serve_app.messages import ENGINE, BaseDescription
from serve_app.platform_view import ServedBase
from serve_app.ray_calls import first_result_of
from serve_app.tally import ArmKey
from serve_app.text.adapter_text import GENERATION
from serve_app.text.base_text import BaseText
from serve_app.text.generation_defaults import (
    NO_DEFAULTS,
    GenerationDefaults,
    read_generation_defaults,
)
from serve_app.text_workers.pool import TextPool, open_text

NO_MIGRATION = MigrationArgs(limit=0)
_DESCRIBE_S = 30.0
_UNKNOWN_START_S = 10.0  # the start of a base that this manager has not started yet


@dataclass(frozen=True, slots=True)
class BaseHandle:
    """A running base: its deployment handle, its settings, its limits and its text files."""

    base: BaseVersion
    app_name: str
    handle: DeploymentHandle[object]
    description: BaseDescription
    text: BaseText
    deployed_s: float
    defaults: GenerationDefaults = NO_DEFAULTS
    max_waiting: int = 256  # requests in its admission queue
    migration: MigrationArgs = NO_MIGRATION  # as in the newest view

    def serves(self, base: ServedBase) -> bool:
        """True unless the base was deployed again since."""
        return (self.app_name, self.deployed_s) == (base.app_name, base.deployed_s)

    def with_adapter(self, text: BaseText, own: Mapping[str, bytes]) -> BaseHandle:
        """Returns this handle with an adapter's `text` side and defaults. `own`: its files."""
        defaults = self.defaults
        if GENERATION in own and self.description.generation_config != "vllm":
            defaults = read_generation_defaults(own, self.base.name).over(defaults)
        description = replace(self.description, own=own)
        return replace(self, text=text, description=description, defaults=defaults)


class BaseAsleepError(ServiceUnavailableError):
    """The base sleeps or is being woken; `ColdStarts` lets requests wait for it."""

    def __init__(self, base: ServedBase, retry_after_s: int) -> None:
        super().__init__(f"The base model {base.base.name!r} is being started.", retry_after_s)
        self.base = base


@dataclass(frozen=True, slots=True)
class Route:
    """The destination of a request."""

    handle: BaseHandle
    resolution: Resolution
    arm: ArmKey | None = None  # None: the adapter is not split
    shadow: AdapterVersion | None = None  # gets a copy of the request
    # The sleeping base of the canary that the request was drawn for; the stable version answers.
    asleep: ServedBase | None = None

    @property
    def brings_text(self) -> bool:
        """True if the adapter may have a text side of its own."""
        adapter = self.resolution.adapter
        return adapter is not None and bool(adapter.text)

    @property
    def arm_name(self) -> str:
        return "" if self.arm is None else self.arm.arm

    @property
    def headers(self) -> dict[str, str]:
        headers = {"x-loraplex-version": self.resolution.versions}
        return headers if self.arm is None else headers | {"x-loraplex-arm": self.arm.arm}


async def open_base(base: ServedBase, texts: TextPool | None) -> BaseHandle:
    handle = await asyncio.to_thread(serve.get_deployment_handle, ENGINE, base.app_name)
    # A call to one replica would wait for the end of a request while all are full, and an ingress
    # that starts then would serve nothing.
    description: BaseDescription = await first_result_of(handle.broadcast("describe"), _DESCRIBE_S)
    text = await open_text(description, texts)
    is_off = description.generation_config == "vllm"
    defaults = read_generation_defaults({} if is_off else description.files, base.base.name)
    return BaseHandle(
        base.base,
        base.app_name,
        handle,
        description,
        text,
        base.deployed_s,
        defaults,
        base.model.max_queued_requests,
    )


def unavailable(base: ServedBase) -> ServiceUnavailableError:
    """Returns the error for a base that cannot be called yet, with the time to come back."""
    name = base.base.name
    if base.state == "failed":
        why = f": {base.message}" if base.message else ""
        return ServiceUnavailableError(f"The base model {name!r} does not start{why}.", 30)
    # If it is running, its replica is up and this ingress is about to open its handle.
    if base.state == "asleep" or base.is_waking or base.is_running:
        return BaseAsleepError(base, ceil(base.start_s or _UNKNOWN_START_S))
    return ServiceUnavailableError(f"The base model {name!r} is loading.", 2)


def check_supported(resolution: Resolution) -> None:
    """Raises AdapterUnsupportedError with the registry's reason if an adapter is refused."""
    for one in resolution.adapters:
        adapter = one.version
        if adapter.refused:
            raise AdapterUnsupportedError.of(adapter.name, adapter.version, adapter.refused)
