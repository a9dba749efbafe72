"""One Ray and one Serve for the whole session, apart from any other on this machine: own folder,
free ports, loopback, authentication switched off in words (its default depends on what ran before).
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest
import ray
from ray import serve
from ray.serve.config import HTTPOptions


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def serve_port() -> Iterator[int]:
    """Serve runs; nothing is deployed. The port of its HTTP proxy on 127.0.0.1."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    # Short, and not pytest's own: the path of a unix socket must stay below 108 characters.
    folder = tempfile.mkdtemp(prefix="lpx-", dir="/tmp")
    port = free_port()
    ray.init(
        "local",
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 * 1024**2,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    try:
        serve.start(
            proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port)
        )
        yield port
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
