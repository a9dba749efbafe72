"""The judge of a fuzzed folder: a process of its own that reads it, and PEFT as the oracle.

The process can hang, grow or die without harm; it measures its own time and memory. The oracle
compares factors exactly, not answers: an adapter is right if it is what PEFT has loaded.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer

from engine.checkpoint import Checkpoint
from engine.checks.validation import MAX_RANK, check_adapter
from engine.model_config import lora_sites, read_model_config
from lora.adapter import Adapter, read_adapter
from lora.errors import AdapterError
from tests.engine_helpers import hf_greedy, hf_logits, load_hf

KILL_AFTER_S = 8.0
_CLEAR_PEAK = "5"  # of VmHWM, see proc(5)


@dataclass(frozen=True, slots=True)
class Finding:
    kind: Literal["accepted", "refused", "crash", "hang"]
    reason: str = ""
    seconds: float = 0.0
    grown_bytes: int = 0


class Judge(Protocol):
    def judge(self, folder: Path) -> Finding: ...
    def close(self) -> None: ...


class Reader:
    """The child process; a new one after each that was killed or died."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._child: subprocess.Popen[str] | None = None

    def judge(self, folder: Path) -> Finding:
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(str(folder)) + "\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], KILL_AFTER_S)
        line = child.stdout.readline() if ready else ""
        if line:
            return Finding(**json.loads(line))
        self.close()
        if ready:
            return Finding("crash", f"the process ended with {child.returncode}")
        return Finding("hang", "", KILL_AFTER_S)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.benchmarks.fuzz_judge", str(self._base)]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self._child.stdout.readline()  # it is ready
        return self._child


class Oracle:
    """PEFT's reading of a folder."""

    def __init__(self, base: Path) -> None:
        self._base = load_hf(base)

    def load(self, folder: Path) -> PeftModel:
        """Raises what PEFT raises."""
        logging.getLogger("peft").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(copy.deepcopy(self._base), str(folder))
        model.eval()
        return model

    def greedy(self, model: PeftModel, prompt: list[int], num_tokens: int) -> list[int] | None:
        """Returns None without a clear answer: numbers overflow, or two tokens are nearly equal."""
        tokens = hf_greedy(model, prompt, num_tokens)
        logits = hf_logits(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        best = logits.topk(2).values
        is_clear = bool(logits.isfinite().all()) and bool((best[:, 0] - best[:, 1] > 1e-2).all())
        return tokens if is_clear and float(logits.abs().max()) < 1e4 else None


def factors(model: PeftModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module -> A [r, in] and scaled B [r, out], of each module that PEFT has adapted."""
    found = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if "default" in layer.lora_A:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        else:
            a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
        scale = layer.scaling["default"]
        assert isinstance(a, torch.Tensor)
        assert isinstance(b, torch.Tensor)
        found[name.removeprefix("base_model.model.")] = (
            a.detach().float(),
            b.detach().float().T * scale,
        )
    return found


def read(folder: Path, base: Path) -> Adapter:
    """Ours."""
    config = read_model_config(base)
    return read_adapter(folder, "", lora_sites(config), MAX_RANK, Checkpoint(base, config).read)


def difference(
    ours: Adapter, wanted: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
) -> str | None:
    """Returns None for the same modules with the same numbers."""
    if set(ours.modules) != set(wanted):
        return f"modules differ: {sorted(set(ours.modules) ^ set(wanted))}"
    for module, (a, b) in wanted.items():
        weights = ours.modules[module]
        for half, mine, theirs in (("A", weights.a, a), ("B", weights.b, b)):
            if mine.shape != theirs.shape or not torch.equal(mine, theirs):
                return f"lora_{half} of {module} differs"
    return None


def find(folder: Path, base: Path) -> Finding:
    """Reads a folder as registration does, and measures."""
    Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK)
    before = _status_bytes("VmRSS")
    started_s = time.perf_counter()
    kind: Literal["accepted", "refused", "crash"] = "accepted"
    reason = ""
    try:
        check_adapter(folder, base)
    except AdapterError as error:
        kind, reason = "refused", str(error)
    except BaseException as error:  # whatever it is, it is the finding
        kind, reason = "crash", f"{type(error).__name__}: {error}"[:500]
    seconds = time.perf_counter() - started_s
    return Finding(kind, reason, seconds, _status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return 1024 * int(line.split()[1])
    raise AssertionError(f"/proc/self/status has no {field}")


def main() -> None:
    base = Path(sys.argv[1])
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")  # nothing else may write there
    os.dup2(2, 1)
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(asdict(find(Path(json.loads(line)), base))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
