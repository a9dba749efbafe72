"""Our room `kernels` beside Hugging Face's package of that name: transformers must not mistake one
for the other. It takes any distribution that offers the import name for the real package, so the
folder has no `__init__.py` and our version lies outside every window that transformers accepts."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent

TINY_LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import is_kernels_available
LlamaForCausalLM(LlamaConfig(
    hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, vocab_size=32,
))
assert not is_kernels_available(), "transformers takes our room for Hugging Face's kernels package"
"""


def test_kernels_room_is_a_namespace_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_version_is_a_calendar_version() -> None:
    assert int(metadata.version("loraplex").split(".")[0]) >= 2026


def test_transformers_builds_a_model_from_the_repository_root() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TINY_LLAMA], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


# Libraries that take a process seconds and hundreds of megabytes, and that only some of them use:
# engines, registries and databases.
HEAVY = {"torch", "triton", "transformers", "mlflow", "sqlalchemy", "alembic", "jwt"}
LIGHT_MODULES = (
    "serve_app.api.ingress",
    "serve_app.app",
    "serve_app.control.manager",
    "serve_app.cli.main",
    "engine.service",
)


def test_processes_without_an_engine_import_no_heavy_library() -> None:
    code = f"import sys, {', '.join(LIGHT_MODULES)}\nprint(*{HEAVY!r} & sys.modules.keys())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout.split(), done.stderr, done.returncode) == ([], "", 0)
