"""The environment of the process that owns an engine of several ranks. Free of torch."""

from __future__ import annotations

from engine.config import EngineConfig
from kernels.multicast import NO_MULTICAST


def environment_of(config: EngineConfig) -> dict[str, str]:
    """Returns the variables to be set before torch is imported, which the other ranks inherit."""
    has_exchanges = config.tensor_parallel_size > 1 and config.device != "cpu"
    return dict(NO_MULTICAST) if has_exchanges else {}
