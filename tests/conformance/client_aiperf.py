"""aiperf: a short profile of streamed chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_profile(url, model, tmp_path):
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", model]
    command += ["--url", url, "--endpoint-type", "chat", "--streaming"]
    command += ["--tokenizer", os.environ["CONFORMANCE_TOKENIZER"]]
    command += ["--request-count", "8", "--concurrency", "2", "--isl", "32", "--osl", "8"]
    command += ["--ui", "none", "--artifact-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(next(tmp_path.rglob("profile_export_aiperf.json")).read_text())
    assert report["request_count"]["avg"] == 8
    assert report["time_to_first_token"]["avg"] > 0
    assert not report.get("error_summary")
