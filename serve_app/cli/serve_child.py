"""The process that `launch.start` starts: `serve run` over a Ray of this machine alone.

Ray's dashboard is left out: it costs nine processes and cannot be opened, because its token is in
the server's temporary folder. `serve run` has no option for this, but it uses a Ray that is already
initialized. The process owns the server's log, so that the log is rotated and complete even if the
command that started the server is killed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from serve_app.logs import JsonStream, RotatingOutput

_LAST_LINES_S = 0.3  # until Ray has forwarded the last lines of replicas to the log


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="serve_child", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--log", type=Path, required=True, help="the file that is standard output")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    given = parser.parse_args(arguments)
    launcher = os.getppid()
    RotatingOutput(given.log).start()
    if given.log_format == "json":
        sys.stdout = JsonStream(sys.stdout)
        sys.stderr = JsonStream(sys.stderr)
    print(f"Starting Ray for {given.config}", flush=True)
    # Only now: Ray's loggers keep the standard error stream that exists at their import.
    from ray.serve._private.constants import SERVE_NAMESPACE
    from ray.serve.scripts import cli

    start_ray(namespace=SERVE_NAMESPACE)
    try:
        cli(["run", str(given.config)])
    except SystemExit as end:
        if end.code:
            raise
    if os.getppid() != launcher:  # killed: Ray itself ends its processes
        return
    # Serve has stopped. Ray would now end its own processes one after the other, in 3 s; they hold
    # nothing, and `launch.stop` ends them at once.
    time.sleep(_LAST_LINES_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def start_ray(**options: Any) -> None:
    """Starts a Ray of this machine alone, without its dashboard.

    Ray waits 30 s for its first processes, without a setting for it. A machine that has none of
    their files in memory yet can need longer; a second start then finds them. Ray ends the
    processes of the first start with this process.
    """
    import ray

    try:
        ray.init("local", include_dashboard=False, **options)
    except Exception as error:  # Ray has no type for it
        if "timed out during startup" not in str(error):
            raise
        print("Ray did not start within its limit of 30 s; starting it once more", flush=True)
        ray.init("local", include_dashboard=False, **options)


if __name__ == "__main__":
    main()
