"""The ports of servers that tests start."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import ports
from tests.ports import free_port


def test_the_kernel_gives_a_chosen_port_to_nobody_else() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    if first < 30_000:
        pytest.skip("this kernel gives low ports away")
    assert not any(first <= free_port() <= last for _ in range(100))


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy: int = taken.getsockname()[1]
        free = free_port()
        draws = iter([busy, busy, free])
        monkeypatch.setattr(ports, "_random", SimpleNamespace(randrange=lambda *_: next(draws)))
        assert free_port() == free
