"""openai-agents: runs, streams, tools and typed outputs, by chat and by responses."""

from __future__ import annotations

from typing import Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


@pytest.fixture(
    params=[OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"]
)
def agent(request, base_url, model):
    client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    served = request.param(model=model, openai_client=client)

    def make(tool_choice=None, **fields):
        settings = ModelSettings(
            max_tokens=96, temperature=0.0, store=False, tool_choice=tool_choice
        )
        return Agent(name="helper", model=served, model_settings=settings, **fields)

    return make


async def test_run(agent):
    assert "Paris" in (await Runner.run(agent(), QUESTION)).final_output


async def test_instructions(agent):
    helper = agent(instructions="You answer in one sentence.")
    assert (await Runner.run(helper, QUESTION)).final_output


async def test_streamed_run(agent):
    result = Runner.run_streamed(agent(), QUESTION)
    kinds = {event.type async for event in result.stream_events()}
    assert "raw_response_event" in kinds
    assert "Paris" in result.final_output


async def test_typed_output(agent):
    result = await Runner.run(agent(output_type=City), "Where is the Eiffel Tower?")
    assert isinstance(result.final_output, City)


async def test_required_tool_and_its_result(agent):
    """The runner sets the choice back to auto after the call, so the second turn may be words."""
    helper = agent(tool_choice="required", tools=[get_weather])
    result = await Runner.run(helper, "What is the weather in Paris?", max_turns=4)
    kinds = [type(item).__name__ for item in result.new_items]
    # A small model may call several times at once.
    calls = kinds.count("ToolCallItem")
    assert kinds[: 2 * calls] == ["ToolCallItem"] * calls + ["ToolCallOutputItem"] * calls
    assert calls >= 1
