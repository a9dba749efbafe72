"""Several adapters of one request over HTTP, on the CPU engine with real weights, against PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from registry.catalog import Catalog
from registry.entities import AdapterVersion, Setting
from tests.engine_helpers import hf_greedy
from tests.fakes_registry import FolderRegistry
from tests.serve_folders import make_adapter_folder, make_base_folder
from tests.serve_rig import RIG_TOKEN, Rig, metric, rig_args, run_on_cpu

BASE = "sum-base"
PROMPT = [5, 90, 33, 71, 12]
Answer = tuple[list[int], str]  # token ids, versions


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("sum")
    registry = FolderRegistry(folder)
    base = registry.add_base(BASE, has_files=False)
    make_base_folder(folder / base.digest)

    def add(name: str, version: int, scale: float, alias: str = "champion") -> AdapterVersion:
        one = registry.add_adapter(name, base, version, aliases=(alias,), has_files=False)
        rank = 2 + len(name)
        make_adapter_folder(folder / one.digest, rank=rank, b_scale=scale)
        return one

    adapters = (
        add("a", 1, 0.3),
        add("bb", 1, -0.2),
        add("split", 1, 0.1),
        add("split", 2, 0.4, "canary"),
        registry.add_adapter("copy", base, 1, has_files=False),
    )
    biased = add("biased", 1, 0.1)
    add_biases(folder / biased.digest)
    adapters = (*adapters, biased)
    settings = (Setting("split", "canary_weight", "1"),)
    registry.write(Catalog((base,), adapters, settings=settings))
    args = rig_args(200, BASE)
    return run_on_cpu(serve_port, registry, args, kv_cache_bytes=4 * 1024**2, dtype="float32")


def add_biases(folder: Path) -> None:
    """Makes an adapter one with lora_bias."""
    path, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_bias": True}))
    tensors = load_file(weights)
    biases = {
        key.replace("lora_B.weight", "lora_B.bias"): torch.ones(len(tensor))
        for key, tensor in tensors.items()
        if "lora_B" in key
    }
    save_file(tensors | biases, weights)


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=rig.url, timeout=180) as connection:
        yield connection


def post(client: httpx.Client, model: str, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    return client.post("/v1/completions", json=body)


def complete(client: httpx.Client, model: str, **fields: object) -> Answer:
    answer = post(client, model, return_token_ids=True, ignore_eos=True, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"], answer.headers["x-loraplex-version"]


def expected(rig: Rig, *parts: tuple[str, int, float]) -> list[int]:
    """Returns the tokens of PEFT for some adapters, by name, version and weight."""
    catalog = rig.registry.snapshot()
    folder = rig.registry.folder
    (base,) = catalog.bases
    folders = {(one.name, one.version): str(folder / one.digest) for one in catalog.adapters}
    hf = AutoModelForCausalLM.from_pretrained(folder / base.digest, dtype=torch.float32)
    names = [f"adapter{number}" for number in range(len(parts))]
    model = PeftModel.from_pretrained(hf, folders[parts[0][:2]], names[0])
    for name, part in zip(names[1:], parts[1:], strict=True):
        model.load_adapter(folders[part[:2]], name)
    weights = [weight for *_, weight in parts]
    model.add_weighted_adapter(names, weights, "sum", combination_type="cat")
    model.set_adapter("sum")
    return hf_greedy(model.eval(), PROMPT, 8)


def test_the_model_s_name_and_the_field_name_the_same_adapters(
    rig: Rig, client: httpx.Client
) -> None:
    found = complete(client, f"{BASE}:a+0.5*bb")
    assert found == (expected(rig, ("a", 1, 1.0), ("bb", 1, 0.5)), "a@1+0.5*bb@1")
    assert found[0] != complete(client, f"{BASE}:a")[0]
    field = [{"name": "a"}, {"name": "bb", "weight": 0.5}]
    assert complete(client, BASE, adapters=field) == found
    assert complete(client, "a+0.5*bb") == found
    assert complete(client, f"{BASE}:a@1+0.50*bb@champion") == found
    halved = complete(client, BASE, adapters=[{"name": "a", "weight": -0.5}])
    assert halved == (expected(rig, ("a", 1, -0.5)), "-0.5*a@1")
    assert complete(client, f"{BASE}:1*a") == complete(client, f"{BASE}:a")


def test_the_answer_names_the_adapters(client: httpx.Client) -> None:
    field = [{"name": "a"}, {"name": "bb", "weight": 0.25}]
    assert post(client, BASE, adapters=field).json()["model"] == f"{BASE}:a+0.25*bb"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
    ],
)
def test_every_shape_of_a_chat_takes_the_field(
    client: httpx.Client, path: str, fields: dict[str, object]
) -> None:
    adapters = [{"name": "a"}, {"name": "bb", "weight": 0.25}]
    body = {"model": BASE, "temperature": 0, "adapters": adapters, **fields}
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == f"{BASE}:a+0.25*bb"
    assert answer.headers["x-loraplex-version"] == "a@1+0.25*bb@1"
    bad = client.post(path, json={**body, "model": f"{BASE}:a"})
    assert bad.status_code == 400
    assert "model must name a base alone" in bad.json()["error"]["message"]


def test_a_count_of_tokens_means_the_adapters_of_the_field(client: httpx.Client) -> None:
    def count(*names: str) -> httpx.Response:
        adapters = [{"name": name} for name in names]
        messages = [{"role": "user", "content": "hi"}]
        body = {"model": BASE, "messages": messages, "adapters": adapters}
        return client.post("/v1/messages/count_tokens", json=body)

    assert count("a", "bb").json()["input_tokens"] > 0
    answer = count("a", "none")
    assert answer.status_code == 404, answer.text
    assert "no adapter is named 'none'" in answer.json()["error"]["message"]


def test_adapters_that_cannot_be_together_are_refused_by_name(client: httpx.Client) -> None:
    assert complete(client, f"{BASE}:biased")[1] == "biased@1"
    for is_stream in (False, True):
        answer = post(client, f"{BASE}:a+biased", stream=is_stream)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == (
            "adapter 'biased' uses DoRA or has trained biases, and can neither have a weight nor "
            "be together with others"
        )


def test_a_canary_has_no_share_of_combinations(rig: Rig, client: httpx.Client) -> None:
    assert complete(client, f"{BASE}:split")[1] == "split@2"
    tokens, versions = complete(client, f"{BASE}:split+a")
    assert versions == "split@1+a@1"
    assert tokens == expected(rig, ("split", 1, 1.0), ("a", 1, 1.0))


@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        (f"{BASE}:a+none", 404, "no adapter is named 'none'"),
        (f"{BASE}:a+a", 400, "'a' is twice in"),
        (f"{BASE}:a+0*bb", 400, "weight of an adapter must be between 0.000001 and 100"),
        (f"{BASE}:a+1e9*bb", 400, "the weight '1e9' in"),
        (f"{BASE}:a+101*bb", 400, "got 101"),
        (f"{BASE}:a+100.0001*bb", 400, "got 100.0001"),
        (f"{BASE}:a+nan*bb", 400, "the weight 'nan' in"),
        (f"{BASE}:a+", 400, "a name is missing in"),
        (f"{BASE}:a+bb+split+copy+e", 400, "names 5 adapters; at most 4"),
        (f"{BASE}+a", 400, "is a base, not an adapter"),
        (f"0.5*{BASE}", 400, "is a base, not an adapter"),
    ],
)
def test_a_bad_name_is_refused(client: httpx.Client, model: str, status: int, words: str) -> None:
    answer = post(client, model)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["param"] == "model"
    assert words in error["message"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a", "adapters: must be a list such as"),
        (["a"], "adapters: must be a list such as"),
        ([{"name": "a"}] * 5, "adapters: at most 4 are allowed, got 5"),
        ([{"name": "a"}, {"name": "a"}], "adapters.1.name: 'a' is there twice"),
        ([{"weight": 1}], "adapters.0.name: must be a string, got None"),
        ([{"name": "a+b"}], "adapters.0.name: 'a+b' is not a legal name"),
        ([{"name": "a", "weight": "1"}], "adapters.0.weight: must be a number, got '1'"),
        ([{"name": "a", "weight": True}], "adapters.0.weight: must be a number, got True"),
        ([{"name": "a", "weight": 0}], "adapters.0.weight: the weight of an adapter must be"),
        ([{"name": "a", "weight": -1e300}], "adapters.0.weight: the weight of an adapter must be"),
        ([{"name": "a", "scale": 2}], "adapters.0: must have name and weight only, got 'scale'"),
    ],
)
def test_a_bad_field_is_refused(client: httpx.Client, value: object, words: str) -> None:
    answer = post(client, BASE, adapters=value)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"].startswith("adapters")
    assert words in error["message"].replace('"', "'")


@pytest.mark.parametrize(
    ("model", "names", "status", "param", "words"),
    [
        (BASE, ("a", "none"), 404, "adapters", "no adapter is named 'none'"),
        (BASE, ("a@9",), 404, "adapters", "has no version or alias"),
        (BASE, ("a@no",), 404, "adapters", "has no version or alias"),
        ("none", ("a",), 404, "model", "no base model"),
        (f"{BASE}@9", ("a",), 404, "model", "has no version or alias"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_an_adapter_that_is_not_there_is_refused_by_its_field(
    client: httpx.Client,
    path: str,
    model: str,
    names: tuple[str, ...],
    status: int,
    param: str,
    words: str,
) -> None:
    body: dict[str, object] = {"model": model, "adapters": [{"name": name} for name in names]}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    body |= chat if "chat" in path else {"prompt": "hi"}
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_the_field_needs_a_base(client: httpx.Client) -> None:
    answer = post(client, f"{BASE}:a", adapters=[{"name": "bb"}])
    assert answer.status_code == 400
    assert "adapters: model must name a base alone then" in answer.json()["error"]["message"]
    raw = json.dumps({"model": BASE, "prompt": PROMPT, "adapters": [{"name": "a"}]})
    infinite = raw.replace('"a"', '"a", "weight": Infinity')
    headers = {"content-type": "application/json"}
    answer = client.post("/v1/completions", content=infinite, headers=headers)
    assert answer.status_code == 400
    assert "Infinity" in answer.json()["error"]["message"]


def test_metrics_count_a_combination_under_its_first_adapter(client: httpx.Client) -> None:
    def count(adapter: str) -> float:
        return metric(client, "loraplex_adapter_requests_total", adapter=adapter, outcome="ok")

    first, second = count("a"), count("bb")
    complete(client, f"{BASE}:a+2*bb")
    assert (count("a"), count("bb")) == (first + 1, second)


def test_an_order_about_a_combination_is_refused(client: httpx.Client) -> None:
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    answer = client.post("/admin/adapters/a+bb/preload", headers=headers)
    assert answer.status_code == 400, answer.text
    assert "names adapters of one request" in answer.json()["error"]["message"]
