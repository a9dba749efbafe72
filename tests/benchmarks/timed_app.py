"""The `api` application with engines that note what their start took. For config files:
`import_path: tests.benchmarks.timed_app:build`.

No `from __future__ import annotations`: see serve_app/app.py.
"""

from ray.serve import Application

from serve_app.app import build_with, sources
from serve_app.config import PlatformArgs


def build(args: PlatformArgs) -> Application:
    return build_with(args, sources(args, "tests.benchmarks.engine_start:open_timed_engine"))
