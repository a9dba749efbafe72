"""Folders and stores for the tests of the registry: small content, real stores."""

import atexit
import functools
import json
import shutil
import struct
import tempfile
from pathlib import Path

import pytest

from registry.client import Registry
from registry.entities import AdapterFacts, AdapterVersion, BaseFacts, BaseVersion

BASE_FACTS = BaseFacts("LlamaForCausalLM", 1000, 64)
ADAPTER_FACTS = AdapterFacts(4, ("k_proj", "q_proj"), 32)


@functools.cache
def template_database() -> Path:
    """MLflow's migrations take seconds: run once, then copied."""
    folder = Path(tempfile.mkdtemp(prefix="loraplex-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Registry(f"sqlite:///{folder}/mlflow.db").snapshot()
    return folder / "mlflow.db"


def embedded_uri(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(template_database(), folder / "mlflow.db")
    return f"sqlite:///{folder}/mlflow.db"


def empty_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the folder the home of commands that run in this process, with an empty registry. The
    lines that they print are not folded."""
    embedded_uri(folder)
    monkeypatch.setenv("LORAPLEX_HOME", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return folder


def embedded(folder: Path) -> Registry:
    return Registry(embedded_uri(folder))


def write_safetensors(path: Path, content: bytes) -> None:
    header = {"w": {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def base_folder(path: Path, content: bytes = b"base weights") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (path / "tokenizer.json").write_text("{}")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    write_safetensors(path / "model.safetensors", content)
    return path


def adapter_folder(
    path: Path, content: bytes = b"adapter weights", base: str = "organisation/tiny", rank: int = 4
) -> Path:
    path.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "target_modules": ["q_proj", "k_proj"],
        "base_model_name_or_path": base,
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(path / "adapter_model.safetensors", content)
    return path


def register_base(
    registry: Registry, folder: Path, name: str = "tiny", content: bytes = b"base weights"
) -> BaseVersion:
    source = base_folder(folder / f"base-{name}-{content.hex()[:16]}", content)
    return registry.register_base(source, name, facts=BASE_FACTS)


def register_adapter(
    registry: Registry,
    folder: Path,
    name: str = "pirate",
    content: bytes = b"adapter weights",
    base: str = "tiny",
    alias: str | None = "champion",
) -> AdapterVersion:
    source = adapter_folder(folder / f"adapter-{name}-{content.hex()[:24]}", content)
    return registry.register_adapter(source, name, base=base, facts=ADAPTER_FACTS, alias=alias)
