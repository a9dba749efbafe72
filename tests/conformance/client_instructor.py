"""instructor: each way in which it asks an OpenAI server for a typed answer."""

from __future__ import annotations

from typing import Literal

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_typed_answer(base_url, model, mode):
    plain = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    answer = client.chat.completions.create(
        model=model,
        response_model=City,
        max_retries=0,
        max_tokens=96,
        temperature=0,
        messages=[{"role": "user", "content": "Where is the Eiffel Tower?"}],
    )
    assert isinstance(answer, City)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_partial_answers(base_url, model, mode):
    plain = OpenAI(base_url=base_url, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=instructor.Mode[mode])
    parts = client.chat.completions.create_partial(
        model=model,
        response_model=City,
        max_tokens=96,
        temperature=0,
        messages=[{"role": "user", "content": "Where is the Eiffel Tower?"}],
    )
    assert list(parts)[-1].name in ("Paris", "Rome")
