"""schemathesis: generated requests to the routes of /openapi.json."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_openapi(url, tmp_path):
    """Answers of 5xx, or ones that the description does not name, fail."""
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json"]
    command += ["--checks", "not_a_server_error,status_code_conformance,content_type_conformance"]
    command += ["--checks", "response_schema_conformance"]
    command += ["--max-examples", "20", "--seed", "1", "--workers", "2", "--max-time", "180"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
