"""The home of a benchmark's server, and its Serve file: one application on loopback, no access log.

The contents of the home and the application's arguments are each benchmark's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import yaml


@contextmanager
def open_home(kept: Path | None, prefix: str) -> Iterator[Path]:
    """Yields `kept`, made where it is not there; without it, a temporary folder."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


def write_serve_file(
    folder: Path,
    port: int,
    arguments: Mapping[str, object],
    *,
    import_path: str = "serve_app.app:build",
) -> Path:
    """Writes the file and returns it. `arguments`: the application's, as under `configs`."""
    application = {
        "name": "api",
        "route_prefix": "/",
        "import_path": import_path,
        "args": arguments,
    }
    content = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"enable_access_log": False},
        "applications": [application],
    }
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
