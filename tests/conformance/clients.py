"""The clients: what each installs, its module of tests, and the settings that keep it offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Client:
    """`packages` are names of requirements.txt, with extras where the client needs them; the first
    one's version is reported. `extra` are further requirements that the tests need."""

    name: str
    packages: tuple[str, ...]
    extra: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 1800.0  # the slowest needs 300 s on two idle cores, 600 s on loaded ones

    @property
    def module(self) -> str:
        return f"client_{self.name.replace('-', '_')}.py"


# Settings for all clients; the guard in loopback/ catches what they leave open.
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

CLIENTS = (
    Client("openai", ("openai",)),
    Client("anthropic", ("anthropic",)),
    Client(
        "langchain",
        ("langchain-openai", "langchain-tests", "langchain-anthropic"),
        environment={"LANGSMITH_TRACING": "false", "LANGCHAIN_TRACING_V2": "false"},
    ),
    Client("pydantic-ai", ("pydantic-ai-slim[openai,anthropic]",)),
    Client("instructor", ("instructor",)),
    Client("schemathesis", ("schemathesis",)),
    Client(
        "openai-agents",
        ("openai-agents",),
        environment={"OPENAI_AGENTS_DISABLE_TRACING": "1"},  # traces go to api.openai.com
    ),
    Client("llama-index", ("llama-index-llms-openai-like",)),
    Client(
        "litellm",
        ("litellm[proxy]",),
        # Prices come from GitHub otherwise, at each import.
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"},
    ),
    Client(
        "dspy",
        ("dspy",),
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"},
    ),
    Client("lm-eval", ("lm-eval[api]",), extra=("transformers==5.23.0",)),  # reads the tokenizer
    # The wheel of torch that the project has: guidellm's own choice is 5 GB larger.
    Client("guidellm", ("guidellm",), extra=("torch==2.13.0",)),
    # In Hugging Face's offline mode it looks for a tokenizer's folder in the hub's cache.
    Client("aiperf", ("aiperf",), environment={"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}),
    Client("inspect-ai", ("inspect-ai",), extra=("openai",)),
)
