"""llama-index: OpenAILike's completions, chats, streams, tools and typed answers."""

from typing import Literal

import pytest
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = [ChatMessage(role="user", content="What is the capital of France?")]


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    is_capital: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def llm(base_url, model):
    def make(**fields):
        settings = {"is_chat_model": True, "is_function_calling_model": True, **fields}
        return OpenAILike(
            model=model,
            api_base=base_url,
            api_key="none",
            max_tokens=96,
            temperature=0.0,
            max_retries=0,
            context_window=2048,
            **settings,
        )

    return make


def test_chat(llm):
    assert "Paris" in llm().chat(QUESTION).message.content


def test_complete(llm):
    assert "Paris" in llm(is_chat_model=False).complete("The capital of France is").text


def test_stream_equals_the_whole_answer(llm):
    parts = "".join(one.delta or "" for one in llm().stream_chat(QUESTION))
    assert parts == llm().chat(QUESTION).message.content


async def test_async_stream(llm):
    parts = [one.delta or "" async for one in await llm().astream_chat(QUESTION)]
    assert "Paris" in "".join(parts)


def test_tool_call(llm):
    tool = FunctionTool.from_defaults(get_weather)
    answer = llm().chat_with_tools([tool], "What is the weather in Paris?", tool_required=True)
    calls = llm().get_tool_calls_from_response(answer)
    assert calls[0].tool_name == "get_weather"
    assert calls[0].tool_kwargs["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("native", [True, False], ids=["json_schema", "tools"])
def test_structured_predict(llm, native):
    program = llm(should_use_structured_outputs=native).as_structured_llm(City)
    assert isinstance(program.chat(QUESTION).raw, City)
