"""The reach of Ray's own ports: Ray and Serve exchange pickles, which are code, over gRPC."""

from __future__ import annotations

from collections.abc import Iterable

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray.serve._private import replica

from serve_app.network import is_loopback


def keep_to_loopback() -> None:
    """Has this replica's gRPC server listen on 127.0.0.1 if Ray's node does. Serve has no setting
    for it and listens on all interfaces. Call it in a deployment's constructor: the server starts
    after that."""
    if is_loopback(ray.util.get_node_ip_address()):  # type: ignore[no-untyped-call]
        replica.add_port_to_grpc_server = _add_port_on_loopback  # type: ignore[attr-defined]


def _add_port_on_loopback(server: object, address: str) -> int:
    on_loopback = address.replace("[::]:", "127.0.0.1:")
    port: int = add_port_to_grpc_server(server, on_loopback)  # type: ignore[no-untyped-call]
    return port


def open_nodes(addresses: Iterable[str], is_authenticated: bool) -> str | None:
    """Returns a warning if Ray runs without authentication and other machines can reach it,
    otherwise None."""
    found = sorted({address for address in addresses if not is_loopback(address)})
    if is_authenticated or not found:
        return None
    return (
        f"Ray listens at {', '.join(found)} without authentication: any machine that reaches its "
        "ports can run code here. Set RAY_AUTH_MODE=token on every node (ray get-auth-token "
        "--generate), and RAY_USE_TLS=1 where others share the network"
    )


def warning_of_cluster() -> str | None:
    """Returns the warning for the Ray cluster of this process; None if it belongs to none."""
    if not ray.is_initialized():
        return None
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    alive = [str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]]
    return open_nodes(alive, is_token_auth_enabled())


def warning_of_machine() -> str | None:
    """Returns the warning for a Ray that `serve run` would start on this machine."""
    address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return open_nodes([address], is_token_auth_enabled())
