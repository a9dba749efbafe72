"""The Serve config file of a benchmark's server: one application on loopback, no access log.

What the application is told is each benchmark's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import yaml


def write_serve_file(
    folder: Path,
    port: int,
    arguments: Mapping[str, object],
    *,
    import_path: str = "serve_app.app:build",
) -> Path:
    """`arguments`: the application's, as in the files under `configs`. The new file."""
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
