"""Fields of chats in the bodies of /v1/responses and /v1/messages, and the log of what is left."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.dialects import fields
from serve_app.dialects.fields import left_out
from serve_app.openai.fields import UnknownFields
from tests.test_serve_dialects import messages, refusal, responses


@pytest.mark.parametrize("make", [responses, messages])
@pytest.mark.parametrize("effort", ["high", 5])
def test_the_effort_of_a_chat_is_refused_as_its_other_fields(make: Any, effort: object) -> None:
    error = refusal(make, reasoning_effort=effort)
    assert error.message.startswith("reasoning_effort: is a field of /v1/chat/completions, got ")
    assert error.param == "reasoning_effort"


def test_the_effort_has_its_own_field_in_each_dialect() -> None:
    assert responses(reasoning={"effort": "high"}, reasoning_effort=None).reasoning_effort == "high"
    request = messages(output_config={"effort": "high"}, reasoning_effort=None)
    assert request.template_variables["reasoning_effort"] == "high"


def test_what_is_left_out_is_not_called_a_field(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fields, "unknown_fields", UnknownFields())
    left_out("the tool web_search", "/v1/responses")
    left_out("the tool web_search", "/v1/responses")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["a part of a request is left out: '/v1/responses: the tool web_search'"]
