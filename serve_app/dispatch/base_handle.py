"""What an ingress has of a base that can be called, and where one request goes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import ceil

from ray import serve
from ray.serve.handle import DeploymentHandle

from registry.catalog import Resolution
from registry.entities import AdapterVersion, BaseVersion
from serve_app.errors import AdapterUnsupportedError, ServiceUnavailableError
from serve_app.messages import ENGINE, BaseDescription
from serve_app.openai.generation_defaults import (
    NO_DEFAULTS,
    GenerationDefaults,
    read_generation_defaults,
)
from serve_app.platform_view import ServedBase
from serve_app.tally import ArmKey
from serve_app.text.base_text import BaseText
from serve_app.text_workers.pool import TextPool, open_text

_UNKNOWN_START_S = 10.0  # of a base that this manager has not started yet


@dataclass(frozen=True, slots=True)
class BaseHandle:
    """One base that can be called."""

    base: BaseVersion
    app_name: str
    handle: DeploymentHandle[object]
    description: BaseDescription
    text: BaseText
    deployed_s: float
    defaults: GenerationDefaults = NO_DEFAULTS
    max_waiting: int = 256  # requests in its admission queue

    def is_of(self, base: ServedBase) -> bool:
        return (self.app_name, self.deployed_s) == (base.app_name, base.deployed_s)


class BaseAsleepError(ServiceUnavailableError):
    """The base sleeps or is being woken: who may wait for it waits."""

    def __init__(self, base: ServedBase, retry_after_s: int) -> None:
        super().__init__(f"The base model {base.base.name!r} is being started.", retry_after_s)
        self.base = base


@dataclass(frozen=True, slots=True)
class Route:
    """Where one request goes."""

    front: BaseHandle
    resolution: Resolution
    arm: ArmKey | None = None  # None: the adapter is not split
    shadow: AdapterVersion | None = None  # gets a copy
    # The base of the canary that the request was drawn for, where that sleeps: stable answers.
    asleep: ServedBase | None = None

    @property
    def headers(self) -> dict[str, str]:
        version = self.resolution.adapter or self.resolution.base
        told = {"x-loraplex-version": f"{version.name}@{version.version}"}
        return told if self.arm is None else told | {"x-loraplex-arm": self.arm.arm}


async def open_front(base: ServedBase, texts: TextPool | None) -> BaseHandle:
    handle = await asyncio.to_thread(serve.get_deployment_handle, ENGINE, base.app_name)
    description: BaseDescription = await handle.describe.remote()
    text = await open_text(description.files, base.base.digest, texts)
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
        base.cold_start.max_waiting,
    )


def not_yet(base: ServedBase) -> ServiceUnavailableError:
    name = base.base.name
    if base.state == "failed":
        why = f": {base.message}" if base.message else ""
        return ServiceUnavailableError(f"The base model {name!r} does not start{why}.", 30)
    # Running: its replica is up, our end of it opens this moment.
    if base.state == "asleep" or base.is_waking or base.is_running:
        return BaseAsleepError(base, ceil(base.start_s or _UNKNOWN_START_S))
    return ServiceUnavailableError(f"The base model {name!r} is loading.", 2)


def check_supported(resolution: Resolution) -> None:
    """Raises AdapterUnsupportedError with the reason that the registry holds."""
    adapter = resolution.adapter
    if adapter is not None and adapter.refused:
        raise AdapterUnsupportedError(
            f"The adapter {adapter.name!r} version {adapter.version} cannot be served: "
            f"{adapter.refused}"
        )
