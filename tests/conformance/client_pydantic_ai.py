"""pydantic-ai: plain and streamed text, tools and typed outputs, by chat and by responses."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import UsageLimits

SETTINGS = ModelSettings(max_tokens=96, temperature=0.0)


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel], ids=["chat", "responses"])
def served(request, model, base_url):
    return request.param(model, provider=OpenAIProvider(base_url=base_url, api_key="none"))


async def test_text(served):
    result = await Agent(served, model_settings=SETTINGS).run("What is the capital of France?")
    assert "Paris" in result.output
    assert result.usage.output_tokens > 0


async def test_streamed_text(served):
    agent = Agent(served, model_settings=SETTINGS)
    async with agent.run_stream("What is the capital of France?") as result:
        parts = [part async for part in result.stream_text(delta=True)]
    assert "Paris" in "".join(parts)


@pytest.mark.parametrize("kind", [ToolOutput, NativeOutput])
async def test_typed_output(served, kind):
    agent = Agent(served, output_type=kind(City), model_settings=SETTINGS)
    result = await agent.run("Where is the Eiffel Tower?")
    assert isinstance(result.output, City)


async def test_tools_are_offered(served):
    """A model of this size may answer in words or call without end; both are proper exchanges."""
    calls: list[str] = []
    agent = Agent(served, model_settings=SETTINGS)

    @agent.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Get the weather of a city."""
        calls.append(city)
        return "sunny"

    result = await agent.run(
        "What is the weather in Paris?", usage_limits=UsageLimits(request_limit=4)
    )
    assert result.output
    assert set(calls) <= {"Paris", "Rome"}
