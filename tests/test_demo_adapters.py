"""The adapters that ship: our reader takes them, they are small, and they name the demo's base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.model_config import lora_sites, parse_model_config
from lora.adapter import Adapter, read_adapter
from notebooks.demo_adapters import tools as tools_data
from serve_app.cli.demo.prepare import ADAPTER_NAMES, ADAPTERS_DIR, BASE_NAME

# SmolLM2-135M's shape; the weights themselves are not needed to read an adapter.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def read(name: str) -> Adapter:
    sites = lora_sites(parse_model_config(SMOLLM2, {}))
    return read_adapter(ADAPTERS_DIR / name, name, sites, max_rank=64)


def kinds(adapter: Adapter) -> set[str]:
    return {module.rsplit(".", 1)[1] for module in adapter.modules}


@pytest.mark.parametrize("name", ADAPTER_NAMES)
def test_our_reader_takes_it_and_it_changes_the_base(name: str) -> None:
    assert not read(name).is_noop


def test_ranks_targets_and_layers_differ() -> None:
    pirate, sql, extract, tools = (read(name) for name in ADAPTER_NAMES)
    assert (pirate.rank, sql.rank, extract.rank, tools.rank) == (8, 8, 16, 8)
    assert kinds(pirate) == kinds(extract) == {"q_proj", "v_proj"}
    assert len(kinds(sql)) == len(kinds(tools)) == 7
    assert (len(pirate.modules), len(sql.modules), len(extract.modules)) == (60, 7 * 18, 60)
    assert len(tools.modules) == 7 * 30


def test_all_four_take_11_megabytes_at_most() -> None:
    sizes = [path.stat().st_size for path in ADAPTERS_DIR.rglob("*") if path.is_file()]
    assert sum(sizes) <= 11_000_000


@pytest.mark.parametrize("name", ADAPTER_NAMES)
def test_its_configuration_names_the_base_and_no_local_path(name: str) -> None:
    text = (ADAPTERS_DIR / name / "adapter_config.json").read_text(encoding="utf-8")
    config = json.loads(text)
    assert config["base_model_name_or_path"] == BASE_NAME
    assert config["inference_mode"] is True
    assert str(Path.home()) not in text
    assert "/tmp" not in text


@pytest.mark.parametrize("name", ADAPTER_NAMES)
def test_its_card_tells_data_settings_and_effect(name: str) -> None:
    card = (ADAPTERS_DIR / name / "README.md").read_text(encoding="utf-8")
    for heading in ("## Data", "## Training", "## Effect", "## Limits"):
        assert heading in card


def test_tools_brings_the_chat_template_that_it_was_trained_with() -> None:
    shipped = ADAPTERS_DIR / "tools" / "chat_template.jinja"
    assert shipped.read_bytes() == tools_data.CHAT_TEMPLATE.read_bytes()
