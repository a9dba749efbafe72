"""Adapters of one base with text files of their own, over HTTP, on the CPU engine with real
weights."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import pytest

from registry.catalog import Catalog
from registry.entities import AdapterVersion, Setting
from tests.fakes_registry import FolderRegistry
from tests.serve_folders import make_adapter_folder, make_base_folder
from tests.serve_rig import Rig, metric, rig_args, run_on_cpu
from tests.waiting import eventually, wait_settled

BASE = "own-text-base"
TEMPLATES = {
    "tools": "tools:{{ messages[0].content }}",
    "thinks": "{{ messages[0].content }}<think>",
    "split-1": "one:{{ messages[0].content }}",
    "split-2": "the second:{{ messages[0].content }}",
}
DEEP = "{% set ns.x = " + "(" * 40 + "ns.x" + ",)" * 40 + " %}"
# By the message: only requests show what it does.
HOSTILE = {
    "digits": "{{ 1 | round(300000000, 'floor') }}",
    "crash": "{% set ns = namespace(x=1) %}{% for i in range(20000) %}" + DEEP + "{% endfor %}"
    "{{ {ns.x: 1} }}",
    "memory": "{{ ('a' | center(1000000000)) | length }}",
    "name": "{{ messages.missing.name }}",
    "surrogate": "{{ '\\ud800' }}",
    "raises": "{{ raise_exception('\\ud800') }}",
    "nothing": "",
}
TEMPLATES["hostile"] = (
    "{% set name = messages[0].content %}"
    + "".join(
        f"{{% if name == '{name}' %}}{source}{{% endif %}}" for name, source in HOSTILE.items()
    )
    + "{% if name == 'hello' %}hello{% endif %}"
)
BAD = '{"model": {"type": "BPE", "vocab": {"zz": 0}, "merges": []}}'


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("own-text")
    registry = FolderRegistry(folder)
    base = registry.add_base(BASE, has_files=False)
    base_folder = make_base_folder(folder / base.digest)
    config = json.loads((base_folder / "config.json").read_text()) | {"vocab_size": 256}
    (base_folder / "config.json").write_text(json.dumps(config))
    (base_folder / "generation_config.json").write_text('{"temperature": 0.7}')

    def add(
        name: str, version: int, text: str, files: dict[str, str], alias: str = "champion"
    ) -> AdapterVersion:
        one = registry.add_adapter(name, base, version, aliases=(alias,), has_files=False)
        target = make_adapter_folder(folder / one.digest, rank=2, b_scale=0.02 * version)
        for file, content in files.items():
            (target / file).write_text(content)
        return replace(one, text=text)

    def template(name: str) -> dict[str, str]:
        return {"chat_template.jinja": TEMPLATES[name]}

    def greedy(max_tokens: int) -> dict[str, str]:
        values = {"temperature": 0.0, "max_new_tokens": max_tokens}
        return {"generation_config.json": json.dumps(values)}

    adapters = (
        add("plain", 1, "", {}),
        add("unchecked", 1, "unknown", {}),
        add("tools", 1, "chat template, generation defaults", template("tools") | greedy(7)),
        add("thinks", 1, "unknown", template("thinks") | greedy(5)),
        add("hostile", 1, "chat template", template("hostile")),
        add("split", 1, "chat template", template("split-1")),
        add("split", 2, "chat template", template("split-2"), "canary"),
        add("copied", 1, "", {}),
        add("copied", 2, "chat template", template("split-2"), "shadow"),
        add("bad", 1, "unknown", {"tokenizer.json": BAD}),
    )
    settings = (
        Setting("split", "canary_weight", "0.5"),
        Setting("copied", "shadow_weight", "1"),
    )
    registry.write(Catalog((base,), adapters, settings=settings))
    args = rig_args(200, BASE)
    ingress = args.ingress.model_copy(update={"max_shadow_requests": 8})
    model = args.models[0].model_copy(update={"response_template": "chatml-json"})
    args = args.model_copy(update={"ingress": ingress, "models": (model,)})
    return run_on_cpu(serve_port, registry, args, kv_cache_bytes=4 * 1024**2)


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.url, timeout=180) as connection:
        yield connection


def chat(client: httpx.Client, model: str, **fields: object) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return {**answer.json(), "version": answer.headers["x-loraplex-version"]}


def words(answer: dict[str, Any]) -> tuple[str, int, int]:
    usage = answer["usage"]
    return (
        answer["choices"][0]["message"]["content"],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def rendered(client: httpx.Client, model: str) -> str:
    """The chat as /tokenize reads it for the model."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    ids = client.post("/tokenize", json=body).json()["tokens"]
    prompt: str = client.post("/detokenize", json={"model": model, "tokens": ids}).json()["prompt"]
    return prompt


@pytest.mark.parametrize("model", [BASE, "plain", "tools"])
def test_a_base_has_the_response_template_that_its_configuration_names(
    client: httpx.Client, model: str
) -> None:
    """No chat template here tells a family, and without one no call can be demanded."""
    info = client.get("/tokenizer_info", params={"model": model}).json()
    assert info["response_template"] == "chatml-json"
    tool = {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}
    answer = chat(
        client,
        model,
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
    )
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": "{}"}


def test_each_adapter_has_its_own_template(client: httpx.Client) -> None:
    assert rendered(client, BASE) == rendered(client, "plain") == "hello"
    assert rendered(client, "unchecked") == "hello"
    assert rendered(client, "tools") == "tools:hello"
    assert rendered(client, f"{BASE}:thinks") == "hello<think>"
    info = client.get("/tokenizer_info", params={"model": "tools"}).json()
    assert info["chat_template"] == TEMPLATES["tools"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_fails_its_request_alone(client: httpx.Client, name: str) -> None:
    body = {"model": "hostile", "messages": [{"role": "user", "content": name}]}
    with ThreadPoolExecutor() as threads:
        failed = threads.submit(client.post, "/v1/chat/completions", json=body)
        assert words(chat(client, "plain", max_tokens=3))[2] == 3
        answer = failed.result()
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert words(chat(client, "hostile", max_tokens=3))[1] == len("hello")


def test_two_adapters_in_one_batch_answer_as_each_alone(client: httpx.Client) -> None:
    names = ("tools", "thinks")
    alone = {name: words(chat(client, name)) for name in names}
    lengths = {name: (prompt, output) for name, (_, prompt, output) in alone.items()}
    # Prompts of the templates' lengths, and outputs of the adapters' own max_new_tokens.
    assert lengths == {"tools": (len("tools:hello"), 7), "thinks": (len("hello<think>"), 5)}
    assert words(chat(client, "tools", max_tokens=3))[2] == 3
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda i: words(chat(client, names[i % 2])), range(16)))
    assert together == [alone[names[i % 2]] for i in range(16)]


def test_a_long_chat_is_read_by_a_worker_with_the_adapters_template(client: httpx.Client) -> None:
    content = "x" * 20_000
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    for model, extra in ((BASE, 0), ("tools", len("tools:"))):
        answer = client.post("/tokenize", json={"model": model, **body})
        assert answer.status_code == 400
        assert f"{20_000 + extra} characters" in answer.json()["error"]["message"]


def test_a_text_is_read_for_the_adapters_of_the_field(client: httpx.Client) -> None:
    body = {"model": BASE, "messages": [{"role": "user", "content": "hello"}]}
    answer = client.post("/tokenize", json={**body, "adapters": [{"name": "tools"}]})
    assert answer.json()["count"] == len("tools:hello")
    unknown = client.post("/tokenize", json={**body, "adapters": [{"name": "nope"}]})
    assert unknown.status_code == 404
    beside = {"model": f"{BASE}:tools", "adapters": [{"name": "plain"}], "tokens": []}
    refused = client.post("/detokenize", json=beside)
    assert refused.status_code == 400
    assert "model must name a base alone" in refused.json()["error"]["message"]
    for wrong in (5, True, [{"nom": "tools"}]):
        refused = client.post("/detokenize", json={"model": BASE, "tokens": [], "adapters": wrong})
        assert (refused.status_code, refused.json()["error"]["param"][:8]) == (400, "adapters")


def test_both_arms_of_a_canary_use_the_templates_of_their_versions(client: httpx.Client) -> None:
    prompts = {"split@1": len("one:hello"), "split@2": len("the second:hello")}
    seen = {}
    for number in range(24):
        answer = chat(client, "split", user=f"user-{number}", max_tokens=1)
        seen[answer["version"]] = answer["usage"]["prompt_tokens"]
        assert seen[answer["version"]] == prompts[answer["version"]]
    assert seen == prompts


def test_an_alias_that_moves_brings_the_template_of_its_version(
    rig: Rig, client: httpx.Client
) -> None:
    rig.registry.set_setting("split", "canary_weight", None)
    eventually(lambda: len({chat(client, "split", max_tokens=1)["version"] for _ in range(8)}) == 1)
    assert rendered(client, "split") == "one:hello"
    rig.registry.set_alias("split", "champion", 2)
    eventually(lambda: chat(client, "split", max_tokens=1)["version"] == "split@2")
    assert rendered(client, "split") == "the second:hello"
    assert rendered(client, "split@1") == "one:hello"


def test_a_shadow_reads_the_request_with_its_own_template(client: httpx.Client) -> None:
    def num_shadows() -> float:
        return metric(client, "loraplex_arm_requests_total", adapter="copied", outcome="ok")

    def has_shadow() -> bool:  # its text side is fetched while the first requests are answered
        before = num_shadows()
        chat(client, "copied", max_tokens=2)
        return num_shadows() >= before + 2

    def num_tokens() -> float:
        return metric(client, "vllm:prompt_tokens_total")

    eventually(has_shadow)
    # Counts arrive after the answers: those of the requests before must not count below.
    wait_settled(lambda: (num_tokens(), num_shadows()))
    before, shadows = num_tokens(), num_shadows()
    assert chat(client, "copied", max_tokens=2)["usage"]["prompt_tokens"] == len("hello")
    eventually(lambda: num_shadows() == shadows + 2)
    eventually(lambda: num_tokens() == before + len("hello") + len("the second:hello"))


def test_an_adapter_whose_tokenizer_differs_is_refused_with_the_reason(
    client: httpx.Client,
) -> None:
    body = {"model": "bad", "messages": [{"role": "user", "content": "hello"}]}
    for _ in range(2):
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 422
        assert "tokenizer.json" in answer.json()["error"]["message"]
