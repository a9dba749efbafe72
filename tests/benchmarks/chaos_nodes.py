"""A Ray cluster of three nodes on this machine, whose nodes are lost: with all their processes at
once, or silently.

Ray's own `cluster_utils`, which its tests use. A node that comes in place of a lost one is empty
until replicas are started anew; the node with the ingress stays, for who asks it would lose it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions

from serve_app.app import build
from serve_app.cli.launch import SERVE_SETTINGS
from serve_app.config import PlatformArgs
from tests.benchmarks.chaos_faults import ENGINE, INGRESS, Faults, num_engines, wait
from tests.benchmarks.report import Report
from tests.serve_rig import processes

NODES = ("node", "silent_node")
NUM_NODES = 3
_ADDRESS = "127.0.0.1"
_NODE = {"num_cpus": 2, "object_store_memory": 128 * 1024**2}
_GIVEN_UP_LIMIT_S = 120.0  # five checks of 13 s that fail


class NodeFaults(Faults):
    def __init__(
        self, cluster: Any, url: str, args: argparse.Namespace, report: Report
    ) -> None:  # Ray's Cluster has no types
        super().__init__(url, args, report)
        self._cluster = cluster

    def _strike(self) -> dict[str, object]:
        victim = self._draw.choice(self._victims())
        lost = len(processes(ENGINE, _raylet(victim)))
        all_of_it = [_raylet(victim), *processes("", _raylet(victim))]
        silent_s = 0.0
        if self._args.target == "silent_node":
            _send(all_of_it, signal.SIGSTOP)
            silent_s = self._wait_until_given_up()
        _send(all_of_it, signal.SIGKILL)
        self._cluster.remove_node(victim, allow_graceful=False)
        wait(lambda: num_engines(self._url) >= self._args.replicas)
        self._cluster.add_node(**_NODE)
        return {"engines_lost": lost, "silent_s": round(silent_s, 2)}

    def _victims(self) -> list[Any]:
        """Returns the nodes with engines and without the ingress."""
        nodes = [
            node for node in self._cluster.worker_nodes if not processes(INGRESS, _raylet(node))
        ]
        found = [node for node in nodes if processes(ENGINE, _raylet(node))]
        if not found:
            raise RuntimeError("all engines are on the head and on the ingress's node")
        return sorted(found, key=_raylet)

    def _wait_until_given_up(self) -> float:
        began_s = time.monotonic()
        while sum(bool(node["Alive"]) for node in ray.nodes()) == NUM_NODES:
            if time.monotonic() - began_s > _GIVEN_UP_LIMIT_S:
                raise TimeoutError("Ray does not give up a node that says nothing")
            time.sleep(0.1)
        return time.monotonic() - began_s


@contextmanager
def node_platform(
    args: argparse.Namespace,
    arguments: Mapping[str, object],
    home: Path,
    port: int,
    report: Report,
) -> Iterator[Faults]:
    """Runs the server as `serve run` on a cluster. `arguments`: of its application."""
    # Short: the path of a unix socket must stay below 108 characters.
    folder = tempfile.mkdtemp(prefix="lpx-", dir="/tmp")
    os.environ |= SERVE_SETTINGS | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    os.environ["LORAPLEX_HOME"] = str(home)  # all of Ray's processes inherit it
    cluster = Cluster(True, head_node_args={**_NODE, "temp_dir": folder})
    try:
        for _ in range(NUM_NODES - 1):
            cluster.add_node(**_NODE)
        ray.init(cluster.address, log_to_driver=False)
        options = HTTPOptions(host=_ADDRESS, port=port)
        serve.start(proxy_location="HeadOnly", http_options=options)
        serve.run(build(PlatformArgs.model_validate(arguments)), name="api", route_prefix="/")
        yield NodeFaults(cluster, f"http://{_ADDRESS}:{port}", args, report)
    finally:
        with suppress(Exception):
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _send(process_ids: Sequence[int], number: signal.Signals) -> None:
    for process_id in process_ids:
        with suppress(psutil.Error, ProcessLookupError):
            os.kill(process_id, number)
