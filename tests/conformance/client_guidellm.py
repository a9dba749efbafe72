"""guidellm: a short benchmark with synthetic prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_benchmark(url, model, tmp_path):
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url},model={model}"]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=4"]
    command += ["--tokenizer", f"kind=hf_auto,model={os.environ['CONFORMANCE_TOKENIZER']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    command += ["--output", f"kind=json,path={tmp_path / 'report.json'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 4
    assert totals["errored"] == 0
