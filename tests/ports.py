"""Ports that servers of tests open some seconds after they are chosen."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 20_000  # Ray's workers have those below
_HIGHEST = 49_152  # where other kernels than Linux begin
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_random = random.SystemRandom()  # processes that share the tests choose differently


def free_port() -> int:
    """Returns a port that nothing listens at now, below those that the kernel gives to connections
    and to listeners at port 0: such a port may be taken before the server opens it."""
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _HIGHEST
    end = max(end, _LOWEST + 10_000)  # where the kernel gives low ones, chance must do
    while True:
        port = _random.randrange(_LOWEST, end)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
