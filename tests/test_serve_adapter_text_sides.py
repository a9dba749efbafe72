"""The text sides of adapters in an ingress: fetched once, awaited, refused, used in requests."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from engine.admission import EngineLimits
from engine.types import TokenOutput
from registry.catalog import Resolution
from registry.entities import AdapterVersion, BaseVersion, WeightedVersion
from registry.errors import RegistryUnavailableError
from serve_app.dispatch.adapter_texts import TextSides
from serve_app.dispatch.base_handle import BaseHandle, Route
from serve_app.errors import AdapterUnsupportedError, ServiceUnavailableError
from serve_app.messages import BaseDescription
from serve_app.openai.chat import ChatRequest
from serve_app.openai.choice import ChoiceRules
from serve_app.openai.engine_params import Prompt, engine_requests
from serve_app.text.base_text import BaseText, read_files
from serve_app.text.generation_defaults import GenerationDefaults
from serve_app.text.tokenizer import TextTokenizer
from serve_app.text_workers.worker import Job, Worker
from tests.text_factory import byte_level_tokenizer, write_folder

LIMITS = EngineLimits(64, 64, 436)
BASE = BaseVersion("base", 1, "b", "")
ADAPTER = AdapterVersion("a", 1, "d1", "base", "b", 8, (), "", text="unknown")
TEMPLATE = {"chat_template.jinja": b"own:{{ messages[0].content }}"}
BODY = {"model": "a", "messages": [{"role": "user", "content": "hi"}]}


class Replica:
    """Answers `adapter_text` with the next of `answers`, once `may_answer` is set."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.num_calls = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.adapter_text = self

    async def remote(self, adapter: AdapterVersion) -> object:
        self.num_calls += 1
        await self.may_answer.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception) and not isinstance(answer, AdapterUnsupportedError):
            raise answer
        return answer


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> BaseText:
    return BaseText.from_folder(write_folder(tmp_path_factory.mktemp("base")))


def handle_of(replica: Replica, text: BaseText, generation_config: str = "auto") -> BaseHandle:
    description = BaseDescription({}, LIMITS, "b", generation_config)
    handle = cast("DeploymentHandle[object]", replica)
    defaults = GenerationDefaults.model_validate({"temperature": 0.6, "top_k": 20})
    return BaseHandle(BASE, "app", handle, description, text, 0.0, defaults)


def route(handle: BaseHandle, adapter: AdapterVersion | None = ADAPTER) -> Route:
    return Route(handle, Resolution(BASE, (WeightedVersion(adapter),)))


async def test_requests_for_a_version_share_one_fetch_and_wait_for_it(text: BaseText) -> None:
    replica, sides = Replica(TEMPLATE), TextSides()
    replica.may_answer.clear()
    asked = route(handle_of(replica, text))
    waiting = [asyncio.ensure_future(sides.with_text(asked)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert not any(one.done() for one in waiting)
    waiting[0].cancel()  # a client that leaves takes nothing from the others
    replica.may_answer.set()
    found = [await one for one in waiting[1:]]
    assert {one.handle.text.render_chat(BODY["messages"]) for one in found} == {"own:hi"}  # type: ignore[arg-type]
    assert found[0].handle.text is found[1].handle.text
    assert found[0].handle.description.own == TEMPLATE
    await sides.with_text(asked)
    assert replica.num_calls == 1
    assert asked.handle.text is text


@pytest.mark.parametrize("adapter", [None, replace(ADAPTER, text="")])
async def test_a_model_without_own_files_asks_nobody(
    text: BaseText, adapter: AdapterVersion | None
) -> None:
    replica = Replica()
    asked = route(handle_of(replica, text), adapter)
    assert await TextSides().with_text(asked) is asked
    assert replica.num_calls == 0


async def test_a_version_whose_files_equal_its_bases_is_served_as_its_base(text: BaseText) -> None:
    replica, sides = Replica({}), TextSides()
    asked = route(handle_of(replica, text))
    for _ in range(2):
        assert (await sides.with_text(asked)).handle is asked.handle
    assert replica.num_calls == 1


async def test_versions_of_a_name_have_their_own_text_sides(text: BaseText) -> None:
    replica, sides = Replica(TEMPLATE, {"chat_template.jinja": b"second"}), TextSides()
    handle = handle_of(replica, text)
    first = await sides.with_text(route(handle))
    second = await sides.with_text(route(handle, replace(ADAPTER, version=2, digest="d2")))
    chats = [
        one.handle.text.render_chat([{"role": "user", "content": "x"}]) for one in (first, second)
    ]
    assert chats == ["own:x", "second"]


async def test_a_refusal_is_kept(text: BaseText) -> None:
    replica, sides = Replica(AdapterUnsupportedError("cannot be served: why")), TextSides()
    asked = route(handle_of(replica, text))
    for _ in range(2):
        with pytest.raises(AdapterUnsupportedError, match="cannot be served: why"):
            await sides.with_text(asked)
    assert replica.num_calls == 1


async def test_a_template_that_cannot_be_compiled_refuses_its_version_alone(text: BaseText) -> None:
    replica, sides = Replica({"chat_template.jinja": b"{% if %}"}, TEMPLATE), TextSides()
    handle = handle_of(replica, text)
    for _ in range(2):
        with pytest.raises(AdapterUnsupportedError, match="cannot be served: chat template"):
            await sides.with_text(route(handle))
    await sides.with_text(route(handle, replace(ADAPTER, digest="d2")))
    assert replica.num_calls == 2


async def test_a_failed_fetch_is_tried_again_by_the_next_request(text: BaseText) -> None:
    cause = RegistryUnavailableError("the registry is down")
    failures = (RayTaskError("f", "tb", cause), RayTaskError("f", "tb", None))  # type: ignore[no-untyped-call]
    replica, sides = Replica(*failures, TEMPLATE), TextSides()
    asked = route(handle_of(replica, text))
    with pytest.raises(RegistryUnavailableError, match="the registry is down"):
        await sides.with_text(asked)
    with pytest.raises(ServiceUnavailableError, match="cannot be fetched"):
        await sides.with_text(asked)
    found = await sides.with_text(asked)
    assert found.handle.text is not text


@pytest.mark.parametrize(("generation_config", "temperature"), [("auto", 0.1), ("vllm", 0.6)])
async def test_the_adapters_defaults_come_before_its_bases(
    text: BaseText, generation_config: str, temperature: float
) -> None:
    own = {"generation_config.json": json.dumps({"temperature": 0.1, "eos_token_id": [7]}).encode()}
    handle = handle_of(Replica(own), text, generation_config)
    found = (await TextSides().with_text(route(handle))).handle
    expected = {"temperature": temperature, "top_k": 20}
    assert found.defaults == GenerationDefaults.model_validate(expected)

    def params(**fields: object):  # type: ignore[no-untyped-def]
        body = ChatRequest.model_validate({**BODY, **fields})
        (request,) = engine_requests(
            body,
            (Prompt((1,), None),),
            (WeightedVersion(ADAPTER),),
            LIMITS,
            defaults=found.defaults,
            own_eos_token_ids=found.text.own_eos_token_ids,
            cache_salt="",
        )
        return request.params

    assert params().temperature == temperature
    assert params(temperature=0.9).temperature == 0.9
    assert params(stop_token_ids=[5]).stop_token_ids == (5, 7)
    assert params(ignore_eos=True).stop_token_ids == ()


def test_an_adapters_end_of_text_is_no_stop_reason() -> None:
    tokenizer = TextTokenizer(byte_level_tokenizer())
    for eos, reason in ((frozenset({70}), None), (frozenset(), 70)):
        choice = ChoiceRules(None, False, 0, eos).new_state(tokenizer.detokenizer())
        delta = choice.feed(TokenOutput("r", 0, 0, (70,), finish_reason="stop", stop_token_id=70))
        assert delta is not None
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", reason)


def test_a_worker_reads_a_chat_with_the_adapters_own_files(tmp_path: Path) -> None:
    worker = Worker()
    files = read_files(write_folder(tmp_path))
    worker._texts["b"] = BaseText.from_files(files)
    raw = json.dumps({**BODY, "return_token_strs": True}).encode()
    added = json.dumps([{"id": 428, "content": "own:", "special": True}]).encode()

    def strings(own: dict[str, bytes]) -> str:
        ids_texts = worker._run(Job("tokenize_request", "TokenizeRequest", "b", LIMITS, own), raw)
        assert isinstance(ids_texts, tuple)
        return "|".join(ids_texts[1])

    assert strings({}).startswith("<|im_start|>|")
    assert strings(TEMPLATE).replace("|", "") == "own:hi"
    assert strings(TEMPLATE | {"added_tokens.json": added}).startswith("own:|")
    assert strings({}).startswith("<|im_start|>|")
    assert len(worker._adapter_texts) == 2
