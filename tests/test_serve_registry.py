"""A running server and a real `mlflow server`: changes by webhook, by polling, and while the
registry is down. The engine is the paced engine; the tests read which version a name means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
from mlflow import MlflowClient
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from registry.client import Registry
from registry.errors import RegistryError
from serve_app.api.webhook import PATH
from serve_app.app import build_with
from serve_app.config import IngressArgs, ModelArgs, PlatformArgs, RegistryArgs
from serve_app.control.cached_registry import CachedRegistry
from serve_app.platform_view import Sources
from tests import waiting
from tests.fakes_registry import write_text_files
from tests.mlflow_server import WEBHOOK_SETTINGS, MlflowServer, running_server
from tests.registry_helpers import (
    BASE_FACTS,
    embedded,
    register_adapter,
    write_safetensors,
)
from tests.serve_rig import scrape

pytestmark = pytest.mark.serve

NEVER_S = 3600.0  # a change that is read within such an interval came by webhook


@dataclass(frozen=True)
class Front:
    client: httpx.Client
    port: int
    cache: Path
    server: MlflowServer
    registry: Registry

    def deploy(self, poll_interval_s: float, webhook_url: str | None) -> None:
        args = PlatformArgs(
            models=(ModelArgs(name="tiny", graceful_shutdown_timeout_s=1),),
            registry=RegistryArgs(poll_interval_s=poll_interval_s, webhook_url=webhook_url),
            ingress=IngressArgs(graceful_shutdown_timeout_s=1, metrics_max_age_s=0),
        )
        opened = partial(CachedRegistry, self.server.uri, self.cache)
        sources = Sources(opened, "tests.fakes_engine:open_paced_engine")
        serve.run(build_with(args, sources), name="api", route_prefix="/")
        eventually(lambda: self.client.get("/ready").status_code == 200)

    @property
    def webhook_url(self) -> str:
        return f"http://127.0.0.1:{self.port}{PATH}"

    def version_of(self, name: str) -> str:
        """The meaning of a bare name as `name@version`; "" if it is unknown."""
        lines = self.client.get("/v1/models").json()["data"]
        return next((str(line["root"]) for line in lines if line["id"] == name), "")

    def answers(self, model: str) -> int:
        body = {"model": model, "prompt": "abc", "max_tokens": 3}
        return self.client.post("/v1/completions", json=body).status_code

    def metric(self, name: str, **labels: str) -> float:
        """The one sample with these labels; not a number as long as the manager reports none."""
        text = scrape(self.client)
        values = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(values) <= 1
        return values[0] if values else math.nan


eventually = partial(waiting.eventually, timeout_s=120.0)


@pytest.fixture(scope="module")
def front(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    with (
        running_server(folder / "server", settings=WEBHOOK_SETTINGS) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{serve_port}", timeout=120) as client,
    ):
        registry = Registry(server.uri)
        write_text_files(folder / "base")
        write_safetensors(folder / "base" / "model.safetensors", b"no engine reads this")
        registry.register_base(folder / "base", "tiny", facts=BASE_FACTS)
        for content in (b"one", b"two"):
            register_adapter(registry, folder, content=content)
        yield Front(client, serve_port, folder / "cache", server, registry)
        serve.delete("api")


def test_a_webhook_brings_every_change_at_once(front: Front, tmp_path: Path) -> None:
    front.deploy(NEVER_S, front.webhook_url)
    hooks = MlflowClient(front.server.uri, front.server.uri)
    eventually(lambda: len(hooks.list_webhooks()) == 1)
    assert front.version_of("pirate") == "pirate@2"
    flips = front.metric("loraplex_registry_changes_total", kind="alias_moved")
    # For a second, until the server's cache of its webhooks expires, a change may send no call.
    eventually(lambda: _is_told(front))
    front.registry.set_alias("pirate", "champion", 1)
    eventually(lambda: front.version_of("pirate") == "pirate@1")
    name = "loraplex_registry_changes_total"
    eventually(lambda: front.metric(name, kind="alias_moved") > flips)
    register_adapter(front.registry, tmp_path, "late")
    eventually(lambda: front.version_of("late") == "late@1")
    assert front.answers("late") == 200


def _is_told(front: Front) -> bool:
    """Sets a tag to a new value each time."""
    before = front.metric("loraplex_registry_changes_total", kind="tag_changed")
    value = str(time.monotonic())
    MlflowClient(front.server.uri, front.server.uri).set_model_version_tag(
        "pirate", "1", "tried", value
    )
    time.sleep(0.5)
    return front.metric("loraplex_registry_changes_total", kind="tag_changed") > before


def test_a_webhook_is_registered_once_and_renewed(front: Front) -> None:
    hooks = MlflowClient(front.server.uri, front.server.uri)
    front.registry.ensure_webhook(front.webhook_url, "another secret")
    front.registry.ensure_webhook(front.webhook_url, "of the tests")
    (mine,) = (hook for hook in hooks.list_webhooks() if hook.url == front.webhook_url)
    front.registry.ensure_webhook("http://127.0.0.1:1/elsewhere", "of another server")
    assert len(hooks.list_webhooks()) == 2
    hooks.delete_webhook(mine.webhook_id)


def test_an_embedded_store_has_no_webhooks(tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="need an MLflow server"):
        embedded(tmp_path).ensure_webhook("http://127.0.0.1:1/hook", "secret")


def test_what_is_known_is_served_while_the_server_is_away_and_changes_are_caught_up(
    front: Front, tmp_path: Path
) -> None:
    front.deploy(0.2, None)
    old = front.version_of("pirate")
    new = "pirate@2" if old == "pirate@1" else "pirate@1"
    front.registry.set_alias("pirate", "champion", int(new[-1]))
    eventually(lambda: front.version_of("pirate") == new)  # by polling
    eventually(lambda: front.metric("loraplex_registry_up") == 1)
    assert front.answers("pirate") == 200
    front.server.kill()
    eventually(lambda: front.metric("loraplex_registry_up") == 0)
    last_success_s = front.metric("loraplex_registry_last_success_timestamp_seconds")
    assert {front.answers(model) for model in ("tiny", "pirate", "tiny:pirate")} == {200}
    assert front.client.get("/ready").status_code == 200
    eventually(lambda: front.answers("unknown") == 503)
    front.server.start()
    front.registry.set_alias("pirate", "champion", int(old[-1]))
    eventually(lambda: front.version_of("pirate") == old)
    eventually(lambda: front.metric("loraplex_registry_up") == 1)
    name = "loraplex_registry_last_success_timestamp_seconds"
    eventually(lambda: front.metric(name) > last_success_s)
    eventually(lambda: front.answers("unknown") == 404)


def test_a_server_starts_without_its_registry_from_what_its_node_has(front: Front) -> None:
    """All applications end, including the manager, while the MLflow server is down."""
    front.deploy(0.2, None)
    known = front.version_of("pirate")
    assert front.answers("pirate") == 200
    stored = front.cache / "catalog.json"
    eventually(lambda: stored.exists() and known.partition("@")[0] in stored.read_text())
    front.server.kill()
    for name in tuple(serve.status().applications):
        serve.delete(name)
    front.deploy(0.2, None)
    assert front.version_of("pirate") == known
    eventually(lambda: front.metric("loraplex_registry_up") == 0)
    assert front.answers("pirate") == 200
    eventually(lambda: front.answers("unknown") == 503)
    front.server.start()
    eventually(lambda: front.metric("loraplex_registry_up") == 1)
    new = "pirate@2" if known == "pirate@1" else "pirate@1"
    front.registry.set_alias("pirate", "champion", int(new[-1]))
    eventually(lambda: front.version_of("pirate") == new)
    eventually(lambda: front.metric("loraplex_reconcile_age_seconds") < 30)
