"""langchain: its own integration tests on ChatOpenAI, and the paths of users beside them."""

from __future__ import annotations

import os
from typing import Literal

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pydantic import BaseModel, Field


def fields(**changes):
    return {
        "model": os.environ["CONFORMANCE_MODEL"],
        "base_url": f"{os.environ['CONFORMANCE_URL']}/v1",
        "api_key": "none",
        "max_tokens": 128,
        "temperature": 0,
        "max_retries": 0,
        "stream_usage": True,  # off by default if `base_url` is another than OpenAI's
        **changes,
    }


class TestChatOpenAI(ChatModelIntegrationTests):
    """ChatOpenAI as langchain tests it for each provider."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        # A model of this size repeats a phrase or a call until its tokens end, if it may.
        return fields(frequency_penalty=1.0, extra_body={"parallel_tool_calls": False})

    @property
    def has_tool_choice(self):
        return True

    @property
    def supports_json_mode(self):
        return True

    @property
    def supports_anthropic_inputs(self):
        return True

    @property
    def supports_model_override(self):
        return True

    @property
    def model_override_value(self):
        return "pirate"


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    country: str = Field(max_length=12)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(method):
    model = ChatOpenAI(**fields()).with_structured_output(City, method=method, include_raw=True)
    answer = model.invoke('Answer with JSON: {"name": "Paris", "country": "France"}')
    if method == "json_mode":  # no schema is sent: the model decides which keys it writes
        assert answer["raw"].content.lstrip().startswith("{")
    else:
        assert isinstance(answer["parsed"], City)


def test_agent_turn():
    model = ChatOpenAI(**fields()).bind_tools([get_weather], tool_choice="any")
    question = HumanMessage("What is the weather in Paris?")
    call = model.invoke([question])
    result = get_weather.invoke(call.tool_calls[0])
    last = ChatOpenAI(**fields()).invoke([question, call, result])
    assert last.content


def test_responses_api():
    model = ChatOpenAI(**fields(use_responses_api=True, store=False))
    assert model.invoke("Hello").text
