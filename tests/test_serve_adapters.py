"""Adapters in the memory of running engines, over HTTP and by command, with the paced engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from registry.entities import AdapterVersion
from serve_app.cli import main as cli
from serve_app.config import ADMIN_TOKEN
from tests.fakes_engine import REFUSED
from tests.serve_rig import (
    RIG_ADAPTER,
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    held,
    metric,
    rig_args,
    wait_ready,
)
from tests.waiting import eventually

pytestmark = pytest.mark.serve

RATE = 200.0
LONG = 1200  # tokens: ended by the test


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("registry")
    args = rig_args(RATE, RIG_BASE)
    ingress = args.ingress.model_copy(update={"allow_runtime_lora_updating": True})
    running = deploy(serve_port, args.model_copy(update={"ingress": ingress}), folder)
    wait_ready(running)
    return running


@pytest.fixture
def client(rig: Rig) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    with httpx.Client(base_url=rig.url, timeout=120, headers=headers) as connection:
        yield connection


def add(rig: Rig, name: str, *, has_files: bool = True) -> AdapterVersion:
    known = rig.registry.snapshot()
    added = rig.registry.add_adapter(name, known.bases[0], has_files=has_files)
    rig.registry.write(replace(known, adapters=(*known.adapters, added)))
    return added


def add_version(rig: Rig, name: str, version: int) -> AdapterVersion:
    """Adds a version that is not the default: the champion stays."""
    known = rig.registry.snapshot()
    added = rig.registry.add_adapter(f"{name}{version}", known.bases[0])
    added = replace(added, name=name, version=version)
    rig.registry.write(replace(known, adapters=(*known.adapters, added)))
    return added


def ask(client: httpx.Client, model: str, **fields: object) -> httpx.Response:
    body = {"model": model, "prompt": "abc", "max_tokens": 3} | fields
    return client.post("/v1/completions", json=body)


def lines(client: httpx.Client) -> dict[str, dict[str, object]]:
    answer = client.get("/admin/adapters").json()["adapters"]
    return {f"{line['name']}@{line['version']}": line for line in answer}


def place(client: httpx.Client, version: str) -> dict[str, object]:
    """Asks again while no engine is listed: one that does not answer within two seconds is left
    out."""
    found: list[dict[str, object]] = []

    def is_listed() -> bool:
        found[:] = lines(client)[version]["engines"]  # type: ignore[call-overload]
        return bool(found)

    eventually(is_listed)
    (engine,) = found
    return engine


def tier(client: httpx.Client, version: str) -> object:
    return place(client, version)["tier"] if version in lines(client) else None


def words(response: httpx.Response) -> str:
    return str(response.json()["error"]["message"])


def param(response: httpx.Response) -> object:
    return response.json()["error"]["param"]


def order(client: httpx.Client, name: str, what: str) -> httpx.Response:
    return client.post(f"/admin/adapters/{name}/{what}")


def run(*arguments: str) -> int:
    """Returns the exit code of the command line."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_an_old_version_leaves_memory_after_its_last_stream_while_the_new_one_serves(
    rig: Rig, client: httpx.Client
) -> None:
    rig.registry.set_alias(RIG_ADAPTER, "champion", 1)
    add_version(rig, RIG_ADAPTER, 2)
    old, new = f"{RIG_ADAPTER}@1", f"{RIG_ADAPTER}@2"
    eventually(lambda: new in lines(client))
    body = {"model": RIG_ADAPTER, "prompt": "abc", "max_tokens": 4000, "stream": True}
    hold = ExitStack()
    hold.enter_context(held(rig))
    with hold, client.stream("POST", "/v1/completions", json=body) as stream:
        chunks = stream.iter_lines()
        next(chunks)
        rig.registry.set_alias(RIG_ADAPTER, "champion", 2)
        eventually(lambda: bool(lines(client)[new]["is_default"]))
        assert ask(client, RIG_ADAPTER).status_code == 200
        eventually(lambda: tier(client, new) == "device")
        eventually(lambda: place(client, old).get("is_leaving") is True)
        assert place(client, old)["references"] == 1
        assert ask(client, RIG_ADAPTER).status_code == 200
        hold.close()
        for _ in range(20):
            next(chunks)  # it still streams
    eventually(lambda: tier(client, old) == "disk")
    eventually(lambda: tier(client, new) == "device")
    # A retired version is loaded again when a request names it, and stays.
    assert ask(client, old).status_code == 200
    eventually(lambda: tier(client, old) == "device")


def test_a_pin_is_kept_by_the_registry_and_follows_the_name(rig: Rig, client: httpx.Client) -> None:
    first = add(rig, "pinned")
    eventually(lambda: "pinned@1" in lines(client))
    eventually(lambda: tier(client, "pinned@1") == "disk")
    assert order(client, "pinned", "pin").json() == {"name": "pinned", "version": 1, "pin": True}
    assert rig.registry.snapshot().setting("pinned", "pin") == "true"
    eventually(lambda: place(client, "pinned@1")["pinned"] is True)
    refused = order(client, "pinned", "evict")
    assert refused.status_code == 409
    assert "'pinned'" in words(refused)
    assert f"{first.digest} is pinned: unpin it first" in words(refused)
    add_version(rig, "pinned", 2)  # the highest version, which the name means now
    eventually(lambda: "pinned@2" in lines(client) and bool(place(client, "pinned@2")["pinned"]))
    eventually(lambda: tier(client, "pinned@1") == "disk")
    assert order(client, "pinned", "unpin").status_code == 200
    eventually(lambda: place(client, "pinned@2")["pinned"] is False)
    assert order(client, "pinned", "evict").json()["engines"][0]["outcome"] == "evicted"


def test_a_pin_that_cannot_be_kept_says_why(rig: Rig, client: httpx.Client) -> None:
    add(rig, "away", has_files=False)
    eventually(lambda: "away@1" in lines(client))
    assert order(client, "away", "pin").status_code == 200
    eventually(lambda: "why_not_pinned" in place(client, "away@1"))
    assert place(client, "away@1")["tier"] == "registry"
    assert "the files of away are away" in str(place(client, "away@1")["why_not_pinned"])
    assert order(client, "away", "unpin").status_code == 200


def test_preload_brings_an_adapter_into_memory_or_says_why_not(
    rig: Rig, client: httpx.Client
) -> None:
    add(rig, "wanted")
    bad = add(rig, "bad")
    (rig.registry.folder / bad.digest / REFUSED).touch()
    eventually(lambda: "bad@1" in lines(client))
    done = order(client, f"{RIG_BASE}:wanted@1", "preload").json()
    assert done["engines"][0]["outcome"] == "disk"
    eventually(lambda: tier(client, "wanted@1") == "device")
    again = order(client, "wanted", "preload").json()
    assert again["engines"][0]["outcome"] == "memory"
    refused = order(client, "bad", "preload")
    assert refused.status_code == 503
    assert "'bad' is not loaded on 1 of 1 engines" in words(refused)
    assert "layer 3 holds NaN" in words(refused)


def test_eviction_waits_for_nobody_and_takes_nothing_that_is_used(
    rig: Rig, client: httpx.Client
) -> None:
    add(rig, "used")
    eventually(lambda: "used@1" in lines(client))
    nothing = order(client, "used", "evict").json()
    assert nothing["engines"][0]["outcome"] == "it was not in memory"
    body = {"model": "used", "prompt": "abc", "max_tokens": LONG, "stream": True}
    with held(rig), client.stream("POST", "/v1/completions", json=body) as stream:
        chunks = stream.iter_lines()  # kept: its end closes the connection
        next(chunks)
        refused = order(client, "used", "evict")
        assert refused.status_code == 409
        assert "in use by 1 requests" in words(refused)
    eventually(lambda: order(client, "used", "evict").status_code == 200)
    eventually(lambda: tier(client, "used@1") == "disk")
    assert ask(client, "used").status_code == 200


@pytest.mark.parametrize("what", ["pin", "unpin", "preload", "evict"])
def test_names_that_mean_no_adapter_are_refused(client: httpx.Client, what: str) -> None:
    unknown = order(client, "nobody", what)
    assert unknown.status_code == 404
    assert "'nobody'" in words(unknown)
    assert order(client, RIG_BASE, what).status_code == 400
    assert order(client, "no such name!", what).status_code == 400


def test_a_pin_is_of_a_name_and_not_of_a_version(client: httpx.Client) -> None:
    refused = order(client, f"{RIG_ADAPTER}@1", "pin")
    assert refused.status_code == 400
    assert f"'{RIG_ADAPTER}'" in words(refused)


def test_adapters_are_listed_and_ordered_by_command(
    rig: Rig, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN, RIG_TOKEN)
    monkeypatch.setenv("COLUMNS", "200")
    add(rig, "typed")
    eventually(lambda: "typed@1" in lines(client))
    url = ("--url", rig.url)
    assert run("adapters", "preload", "typed", *url) == 0
    assert "loaded from disk" in capsys.readouterr().out
    assert run("adapters", "pin", "typed", *url) == 0
    eventually(lambda: place(client, "typed@1")["pinned"] is True)
    capsys.readouterr()
    assert run("adapters", "list", *url) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "typed@1" in line)
    assert "device" in line
    assert "yes" in line
    assert run("adapters", "evict", "typed", *url) == 1
    assert "is pinned" in capsys.readouterr().err
    assert run("adapters", "unpin", "typed", *url) == 0
    assert run("adapters", "unpin", "nobody", *url) == 1
    assert "'nobody'" in capsys.readouterr().err


def test_requests_are_counted_by_the_tier_that_held_their_adapter(
    rig: Rig, client: httpx.Client
) -> None:
    def hits(name: str) -> float:
        return metric(client, "loraplex_adapter_tier_hits_total", tier=name)

    add(rig, "counted")
    eventually(lambda: "counted@1" in lines(client))
    disk, device = hits("disk"), hits("device")
    for _ in range(3):
        assert ask(client, "counted").status_code == 200
    eventually(lambda: (hits("disk") - disk, hits("device") - device) == (1, 2))
    ask(client, RIG_BASE)
    assert hits("device") - device == 2


# As vLLM has it


def load(client: httpx.Client, name: str, path: object = "", **fields: object) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path)} | fields
    return client.post("/v1/load_lora_adapter", json=body)


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": 7})


def make_folder(root: Path, name: str) -> Path:
    (root / name).mkdir()
    (root / name / "adapter_config.json").write_text("{}")
    return root / name


def test_a_script_written_for_vllm_loads_and_unloads(
    rig: Rig, client: httpx.Client, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, "first")
    done = load(client, "scripted", folder, lora_int_id=7)
    assert (done.status_code, done.text) == (
        200,
        "Success: LoRA adapter 'scripted' added successfully.",
    )
    assert ask(client, "scripted").status_code == 200
    eventually(lambda: tier(client, "scripted@1") == "device")
    again = load(client, "scripted", folder)
    assert again.status_code == 400
    assert "has already been loaded" in words(again)
    assert param(again) == "lora_name"
    second = make_folder(tmp_path, "second")
    assert load(client, "scripted", second, load_inplace=True).status_code == 200
    assert bool(lines(client)["scripted@2"]["is_default"])
    gone = unload(client, "scripted")
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'scripted' removed successfully.",
    )
    assert ask(client, "scripted").status_code == 404
    missing = unload(client, "scripted")
    assert missing.status_code == 404
    assert words(missing) == "The lora adapter 'scripted' cannot be found."
    assert param(missing) == "lora_name"
    assert load(client, "scripted", folder, base_model_name=RIG_BASE).status_code == 200
    assert ask(client, "scripted").status_code == 200


def test_an_adapter_of_the_registry_is_preloaded_evicted_and_comes_back(
    rig: Rig, client: httpx.Client, tmp_path: Path
) -> None:
    add(rig, "registered")
    eventually(lambda: "registered@1" in lines(client))
    assert load(client, "registered").status_code == 200
    eventually(lambda: tier(client, "registered@1") == "device")
    folder = make_folder(tmp_path, "folder")
    refused = load(client, "registered", folder, load_inplace=True)
    assert refused.status_code == 400
    assert "register its next version there" in words(refused)
    assert unload(client, "registered").status_code == 200
    eventually(lambda: tier(client, "registered@1") == "disk")
    assert ask(client, "registered").status_code == 200


def test_what_cannot_be_loaded_is_told_as_vllm_tells_it(
    client: httpx.Client, tmp_path: Path
) -> None:
    no_path = load(client, "nobody")
    assert no_path.status_code == 400
    assert words(no_path) == "Both 'lora_name' and 'lora_path' must be provided."
    assert param(no_path) == "lora_path"
    assert param(load(client, "", tmp_path)) == "lora_name"
    assert param(unload(client, "")) == "lora_name"
    assert param(load(client, "nobody", is_3d_lora_weight=True)) == "is_3d_lora_weight"
    missing = load(client, "nobody", tmp_path / "missing")
    assert missing.status_code == 404
    assert "No adapter found for" in words(missing)
    assert load(client, "nobody", "org/name").status_code == 404
    assert load(client, "nobody", "/" + "a" * 5000).status_code == 404
    named_as_base = load(client, RIG_BASE, make_folder(tmp_path, "a"))
    assert (named_as_base.status_code, param(named_as_base)) == (400, "lora_name")
    no_name = load(client, "no such name!", tmp_path / "a")
    assert (no_name.status_code, param(no_name)) == (400, "lora_name")
    refused = load(client, "nobody", make_folder(tmp_path, "refused"))
    assert (refused.status_code, param(refused)) == (400, "lora_path")
    assert words(refused) == "adapter 'nobody' is refused: lora_A of x is missing"
    assert client.post("/v1/load_lora_adapter", content=b"{").status_code == 400
    assert unload(client, "").status_code == 400


def test_only_an_operator_loads_from_folders(client: httpx.Client, tmp_path: Path) -> None:
    client.headers["authorization"] = "Bearer wrong"
    assert load(client, "x", make_folder(tmp_path, "a")).status_code == 401
    assert client.get("/admin/adapters").status_code == 401
