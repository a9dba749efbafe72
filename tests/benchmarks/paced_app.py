"""The `api` application with the tests' paced engines, which cost nothing: what is measured then is
everything around the engines. For config files: `import_path: tests.benchmarks.paced_app:build`.

No `from __future__ import annotations`: see serve_app/app.py.
"""

from ray.serve import Application

from serve_app.app import build_with, sources
from serve_app.config import PlatformArgs


def build(args: PlatformArgs) -> Application:
    """An engine's `seed` is its pace: tokens a second of each row."""
    return build_with(args, sources(args, "tests.fakes_engine:open_paced_engine"))
