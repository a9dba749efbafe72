"""The prefix cache between tenants: the prompts that share KV blocks, the router's and explain's
views of them, and the storage of the key."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.admission import EngineLimits
from engine.prefix_digests import prefix_digests
from engine.types import Request, TokenOutput
from registry.catalog import Catalog
from registry.entities import AdapterVersion
from serve_app.admission.tenants import Tenants
from serve_app.cache_salt import KEY_FILE, cache_salt, kept_key
from serve_app.config import FairnessArgs, PlatformArgs
from serve_app.control.manager import Manager
from serve_app.dispatch.progress import Progress
from serve_app.dispatch.shadow import _copy_request
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.engine_params import Prompt, engine_requests
from serve_app.openai.json_body import parse_body
from serve_app.platform_view import PlatformView, Sources
from serve_app.routing.request import make_routing_request
from serve_app.routing.score import expected_ttft
from tests.fakes import make_scheduler, run_step
from tests.fakes_registry import FolderRegistry
from tests.routing_factory import make_view

KEY = bytes(range(32))
PROMPT = tuple(range(1, 65))  # two chunks of 32
LIMITS = EngineLimits(4096, 1000, 65536, prefix_chunk=32)
NAMES = st.text(max_size=8)
ADAPTER = AdapterVersion("pirate", 2, "d" * 64, "base", "b" * 64, 8, (), "")


def ask_for(
    tenant: str, client_salt: str = "", isolate: str = "tenant", key: bytes = KEY
) -> Request:
    fields: dict[str, object] = {"model": "m", "prompt": "x", "max_tokens": 1}
    body = parse_body(CompletionRequest, json.dumps(fields).encode())
    fairness = FairnessArgs.model_validate({"isolate_prefix_cache": isolate})
    salt = Tenants(fairness, is_proven=False).cache_salt(key, tenant, client_salt)
    prompts = [Prompt(PROMPT, None)]
    return engine_requests(body, prompts, (), LIMITS, cache_salt=salt)[0]


def cached_tokens(first: Request, second: Request) -> int:
    """Returns the cached tokens of the second request, by the engine's own scheduler."""
    scheduler, _ = make_scheduler(40, max_num_batched_tokens=256)
    outputs: list[TokenOutput] = []
    for request in (first, second):
        scheduler.add(request, 0)
        outputs = run_step(scheduler)[1]
    assert outputs[0].request_id == second.request_id
    return outputs[0].num_cached_tokens


def test_another_tenants_prompt_is_never_in_the_cache_and_the_same_tenants_is() -> None:
    assert cached_tokens(ask_for("hospital"), ask_for("attacker")) == 0
    assert cached_tokens(ask_for("hospital"), ask_for("")) == 0
    assert cached_tokens(ask_for("hospital"), ask_for("hospital")) > 0


def test_requests_without_a_tenant_share_as_one() -> None:
    assert cached_tokens(ask_for(""), ask_for("")) > 0


def test_a_clients_salt_separates_within_its_tenant() -> None:
    assert cached_tokens(ask_for("hospital", "ward 1"), ask_for("hospital", "ward 2")) == 0
    assert cached_tokens(ask_for("hospital", "ward 1"), ask_for("hospital")) == 0
    assert cached_tokens(ask_for("hospital", "ward 1"), ask_for("hospital", "ward 1")) > 0
    assert cached_tokens(ask_for("hospital", "ward 1"), ask_for("clinic", "ward 1")) == 0


def test_without_isolation_only_the_clients_salt_separates() -> None:
    one, other = ask_for("hospital", isolate="none"), ask_for("clinic", isolate="none")
    assert cached_tokens(one, other) > 0
    assert cached_tokens(one, ask_for("clinic", "own", isolate="none")) == 0


@settings(max_examples=60, deadline=None)
@given(NAMES, NAMES, NAMES, NAMES)
def test_no_two_pairs_of_tenant_and_salt_are_the_same(
    tenant: str, salt: str, other_tenant: str, other_salt: str
) -> None:
    is_same = (tenant, salt) == (other_tenant, other_salt)
    salts = cache_salt(KEY, tenant, salt), cache_salt(KEY, other_tenant, other_salt)
    assert (salts[0] == salts[1]) == is_same
    if tenant and salt:  # equal by plain concatenation
        moved = cache_salt(KEY, tenant + salt[0], salt[1:])
        assert moved != salts[0]
    assert cache_salt(bytes(32), tenant, salt) != salts[0]


def test_the_router_finds_a_tenants_own_prefixes_and_explains_nothing_of_others() -> None:
    """`expected-prefill` is the term of the score."""
    mine = ask_for("hospital")
    engine_side = prefix_digests(PROMPT, None, mine.cache_salt, LIMITS.prefix_chunk)
    holder, empty = make_view(prefixes=engine_side), make_view()
    own_ask = make_routing_request([mine], (), LIMITS)
    assert holder.num_cached_tokens(own_ask.prefixes) == len(PROMPT)
    assert expected_ttft(own_ask, holder).prefill_s < expected_ttft(own_ask, empty).prefill_s
    foreign_ask = make_routing_request([ask_for("attacker")], (), LIMITS)
    assert holder.num_cached_tokens(foreign_ask.prefixes) == 0
    assert expected_ttft(foreign_ask, holder) == expected_ttft(foreign_ask, empty)


def test_a_shadow_and_a_migrated_request_keep_the_salt() -> None:
    request = ask_for("hospital")
    assert _copy_request(request, ADAPTER).cache_salt == request.cache_salt
    assert Progress((request,)).resume()[0].cache_salt == request.cache_salt


def test_the_key_is_made_once_in_a_home_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    key = kept_key(home)
    assert len(key) == 32
    assert kept_key(home) == key
    assert stat.S_IMODE((home / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in home.iterdir()] == [KEY_FILE]
    assert kept_key(tmp_path / "other") != key
    assert kept_key(None) != kept_key(None)


@pytest.mark.parametrize("content", ["", "no hex", "abcd"])
def test_a_file_that_holds_no_key_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / KEY_FILE).write_text(content)
    key = kept_key(tmp_path)
    assert len(key) == 32
    assert kept_key(tmp_path) == key


def test_a_home_that_cannot_hold_a_key_costs_only_the_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "file" / "home"
    home.parent.write_text("no folder")
    assert len(kept_key(home)) == 32
    assert str(home.parent) in caplog.text


async def test_a_restarted_manager_sends_the_same_key_and_never_shows_it(tmp_path: Path) -> None:
    def opened() -> FolderRegistry:
        return FolderRegistry(tmp_path / "registry")

    async def view_of_a_new_manager() -> PlatformView:
        manager = Manager.__new__(Manager)
        sources = Sources(opened, "tests.fakes_engine:open_paced_engine", tmp_path / "home")
        await manager.__init__(PlatformArgs(), sources)  # type: ignore[misc]
        await manager._publish(PlatformView("", Catalog(()), (), (), True, None))
        manager._reconciling.cancel()
        view = await manager.view("", 5)
        assert view is not None
        return view

    first, second = [await view_of_a_new_manager() for _ in range(2)]
    assert first.cache_salt_key == second.cache_salt_key == kept_key(tmp_path / "home")
    assert "cache_salt_key" not in repr(first)
    assert replace(first, revision="another").cache_salt_key == first.cache_salt_key


def test_a_key_that_stays_unreadable_is_temporary(tmp_path: Path) -> None:
    """A link whose target is away, as of an unmounted volume."""
    (tmp_path / KEY_FILE).symlink_to(tmp_path / "away" / "key")
    assert len(kept_key(tmp_path)) == 32
    assert kept_key(tmp_path) != kept_key(tmp_path)
