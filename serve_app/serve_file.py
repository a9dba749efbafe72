"""Checks a Serve config file before anything starts, and returns where it will listen.

`serve run` itself stays up and serves no model if an application's `args` are wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.runtime_env import RuntimeEnv, RuntimeEnvConfig
from ray.serve.schema import ServeDeploySchema

from serve_app.config import (
    IngressArgs,
    PlatformArgs,
    check_routers,
    close_match,
    in_words,
    schemas_of,
)
from serve_app.network import is_loopback
from serve_app.routing.policies import PolicyError

IMPORT_PATH = "serve_app.app:build"


class ServeFileError(Exception):
    """The file cannot be served; the message has the place and the reason."""


@dataclass(frozen=True, slots=True)
class ServeFile:
    path: Path
    host: str  # as configured; 0.0.0.0 is every interface
    port: int
    args: PlatformArgs

    @property
    def url(self) -> str:
        """The URL for a client on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}"


def read_serve_file(path: Path) -> ServeFile:
    """Returns the checked file. Raises ServeFileError, which names the wrong key."""
    try:
        content = yaml.load(path.read_text(), _StrictLoader)
    except OSError as error:
        raise ServeFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ServeFileError(f"{path} cannot be read: {error}") from error
    except RecursionError as error:
        raise ServeFileError(f"{path} cannot be read: it is nested too deeply") from error
    except yaml.YAMLError as error:
        raise ServeFileError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ServeFileError(f"{path} holds no mapping; see configs/quickstart.yaml")
    _check_keys(path, content)
    try:
        schema = ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        raise ServeFileError(f"{path}: {in_words(error)}") from error
    ours = [app for app in schema.applications if app.import_path == IMPORT_PATH]
    if len(ours) != 1:
        found = ", ".join(repr(app.import_path) for app in schema.applications) or "none"
        raise ServeFileError(
            f"{path} must have exactly one application with import_path {IMPORT_PATH}, "
            f"but it has {len(ours)} (import_path: {found})"
        )
    try:
        args = PlatformArgs.model_validate(ours[0].args)
    except ValidationError as error:
        raise ServeFileError(f"{path}: {in_words(error, 'args.', PlatformArgs)}") from error
    try:
        check_routers(args)
    except PolicyError as error:
        raise ServeFileError(f"{path}: args.{error}") from error
    if not args.models:
        raise ServeFileError(f"{path}: args.models names no base model to serve")
    port = schema.http_options.port
    if not 1 <= port <= 65535:
        raise ServeFileError(f"{path}: http_options.port is {port}, and must be from 1 to 65535")
    host = schema.http_options.host or "0.0.0.0"
    if (why := refusal(host, args)) is not None:
        raise ServeFileError(f"{path}: {why}")
    return ServeFile(path, host, port, args)


def _check_keys(path: Path, content: dict[str, object]) -> None:
    """Refuses keys that Ray Serve would leave unread: with `http_option` for `http_options` it
    would listen on another host than the file's."""
    for place, key, known in _unread_keys("", content, ServeDeploySchema):
        public = sorted(name for name in known if not name.startswith("_"))
        raise ServeFileError(
            f"{path}: {place}{key} is no key of Ray Serve's; known are {', '.join(public)}"
            f"{close_match(str(key), public)}"
        )


def _unread_keys(
    place: str, mapping: dict[Any, Any], schema: type[BaseModel]
) -> Iterator[tuple[str, object, Collection[str]]]:
    """Yields each key that Ray reads nowhere, with its place and the keys that are known there.

    Every mapping for which Ray has a schema is checked; all others are free.
    """
    yield from _unknown(place, mapping, schema.model_fields)
    for name, field in schema.model_fields.items():
        value, here = mapping.get(name), f"{place}{name}"
        if name == "runtime_env" and isinstance(value, dict):
            yield from _unknown(f"{here}.", value, RuntimeEnv.known_fields)
            if isinstance(config := value.get("config"), dict):
                yield from _unknown(f"{here}.config.", config, RuntimeEnvConfig.known_fields)
        for inner in schemas_of(field.annotation):
            if isinstance(value, dict):
                yield from _unread_keys(f"{here}.", value, inner)
            for index, item in enumerate(value if isinstance(value, list) else ()):
                if isinstance(item, dict):
                    yield from _unread_keys(f"{here}.{index}.", item, inner)


def _unknown(
    place: str, mapping: dict[Any, Any], known: Collection[str]
) -> Iterator[tuple[str, object, Collection[str]]]:
    yield from ((place, key, known) for key in mapping if key not in known)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, of which YAML's own loader takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Not in `construct_mapping`: keys that are merged by << are in the nodes there.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value} stands there twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


def refusal(host: str, args: PlatformArgs) -> str | None:
    """Returns the reason why the server must not listen on `host`, in one sentence, or None.

    Keys, or a gateway, have to authenticate clients beyond this machine.
    """
    if is_loopback(host) or args.tenancy.enabled or args.ingress.trusted_gateway is not None:
        return None
    return (
        f"http_options.host is {host!r}, which other machines reach, and no client needs a key: "
        "set it to 127.0.0.1, set args.tenancy.enabled, or name the gateway in front that "
        "authenticates clients in args.ingress.trusted_gateway"
    )


def called_by(ingress: IngressArgs, host: str) -> IngressArgs:
    """Returns `ingress` with the address that the server listens on added to its allowed hosts.

    Unchanged if there is no list of them, or if the server listens on every interface.
    """
    if not ingress.allowed_hosts or host in ("0.0.0.0", "::"):
        return ingress
    name = f"[{host}]" if ":" in host else host.lower()
    return ingress.model_copy(update={"allowed_hosts": (*ingress.allowed_hosts, name)})
