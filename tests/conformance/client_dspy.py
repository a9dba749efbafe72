"""dspy: predictions through its adapters for chat and JSON."""

from __future__ import annotations

from typing import Literal

import dspy
import pytest
from dspy.lm15 import (
    AccessPolicy,
    EndpointSupport,
    ModelSupport,
    OpenAIChatCompat,
    ProviderDefinition,
    register_provider,
)


class Capital(dspy.Signature):
    """Name the capital of the country."""

    country: str = dspy.InputField()
    capital: Literal["Paris", "Rome"] = dspy.OutputField()


@pytest.fixture
def lm(base_url, model):
    return dspy.LM(
        f"openai/{model}",
        api_base=base_url,
        api_key="none",
        cache=False,
        max_tokens=96,
        temperature=0.0,
        num_retries=0,
    )


def test_call(lm):
    assert "Paris" in lm("What is the capital of France?")[0]


def test_several(lm):
    answers = lm("What is the capital of France?", n=2, temperature=1.0)
    assert len(answers) == 2


def test_json_adapter(lm):
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Capital)(country="France").capital in ("Paris", "Rome")


def test_json_adapter_with_a_schema(base_url, model):
    """A provider that is declared with what its models support gets a schema."""
    access = AccessPolicy(
        provider="loraplex",
        supports=EndpointSupport(complete=True, stream=True),
        auth_modes=("bearer",),
        base_url=base_url,
    )
    provider = ProviderDefinition.chat(access, compat=OpenAIChatCompat.preset("vllm"))
    register_provider(provider, supports=ModelSupport(response_schema=True))
    served = dspy.LM(f"loraplex/{model}", api_key="none", cache=False, max_tokens=96)
    with dspy.context(lm=served, adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Capital)(country="France").capital in ("Paris", "Rome")
