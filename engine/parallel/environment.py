"""The environment of the process that owns an engine of several ranks. Free of torch."""

from __future__ import annotations

from engine.config import EngineConfig
from kernels.exchange_environment import EXCHANGE_ENVIRONMENT


def environment_of(config: EngineConfig) -> dict[str, str]:
    """Returns the variables to be set before torch is imported, which the other ranks inherit."""
    has_exchanges = config.tensor_parallel_size > 1 and config.device != "cpu"
    return dict(EXCHANGE_ENVIRONMENT) if has_exchanges else {}
