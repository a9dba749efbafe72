"""Other configuration files for a running Serve, while clients stream from every engine: nobody
fails, waits for an ingress or sees the server unready."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import httpx
import openai
import pytest
from ray import serve

from registry.catalog import Catalog
from serve_app.app import build_with
from serve_app.config import ModelArgs, PlatformArgs, RouterArgs
from serve_app.control.base_status import read_status
from tests.fakes_registry import FolderRegistry
from tests.serve_rig import (
    INGRESS,
    RIG_ADAPTER,
    RIG_BASE,
    RIG_TOKEN,
    Rig,
    deploy,
    held,
    metric,
    num_connected,
    processes,
    rig_args,
    rig_sources,
    scrape,
    wait_ready,
)
from tests.waiting import eventually

pytestmark = pytest.mark.serve

SECOND = "second"
RATE = 200.0
NUM_STREAMS = 12
TOKENS = 60
DRAIN_S = 600  # as by default; the rig's own streams are short
ENGINE, MANAGER = "ray::EngineActor", "api:manager"
PROBES = ("/live", "/health", "/ready")
PATHS = (*PROBES, "/v1/completions")


def args_of(*bases: str, replicas: int, **ingress: object) -> PlatformArgs:
    # In turn, so that every engine has streams: draws between equal ones may leave one without.
    router = RouterArgs(policy="round_robin")
    args = rig_args(RATE, *bases, replicas=replicas, router=router)
    drain = {"graceful_shutdown_timeout_s": DRAIN_S}
    return args.model_copy(
        update={
            "models": tuple(one.model_copy(update=drain) for one in args.models),
            "ingress": args.ingress.model_copy(update=drain | ingress),
        }
    )


FIRST = args_of(RIG_BASE, replicas=2)
SCALED_UP, SCALED_DOWN = args_of(RIG_BASE, replicas=3), args_of(RIG_BASE, replicas=1)


def with_other_engine(model: ModelArgs) -> ModelArgs:
    engine = model.engine.model_copy(update={"max_num_seqs": 33})
    return model.model_copy(update={"engine": engine}) if model.name == RIG_BASE else model


def changed_everywhere() -> PlatformArgs:
    """Returns another engine setting, another base and another limit of the ingress."""
    args = args_of(RIG_BASE, SECOND, replicas=1, max_body_bytes=2 * 1024**2)
    models = tuple(with_other_engine(one) for one in args.models)
    return args.model_copy(update={"models": models})


@pytest.fixture(scope="module")
def rig(serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("registry")
    registry = FolderRegistry(folder)
    bases = registry.add_base(RIG_BASE), registry.add_base(SECOND)
    catalog = Catalog(bases, (registry.add_adapter(RIG_ADAPTER, bases[0]),))
    running = deploy(serve_port, FIRST, folder, catalog)
    wait_ready(running)
    # Those of the tests before may still drain.
    eventually(lambda: [len(processes(one)) for one in (ENGINE, INGRESS, MANAGER)] == [2, 1, 1])
    return running


def redeploy(rig: Rig, args: PlatformArgs) -> None:
    """Returns at once: to Serve the application is not deployed before the last stream of an old
    ingress has ended."""
    target = build_with(args, rig_sources(rig.registry.folder))
    run = serve.RunTarget(target=target, name="api", route_prefix="/")
    serve.run_many([run], wait_for_applications_running=False)


def chat(rig: Rig, number: int) -> tuple[str, str | None]:
    """Streams as any client does. Returns the text and the reason of its end."""
    client = openai.OpenAI(base_url=f"{rig.url}/v1", api_key="none", max_retries=0, timeout=180)
    text, reason = "", None
    with client.chat.completions.create(
        model=(RIG_BASE, RIG_ADAPTER)[number % 2],
        messages=[{"role": "user", "content": f"stream {number} abcdefghijklmnopqrstuvwxyz"}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
    ) as chunks:
        for chunk in chunks:
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
    return text, reason


def chat_all(rig: Rig) -> list[tuple[str, str | None]]:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        return list(pool.map(lambda number: chat(rig, number), range(NUM_STREAMS)))


@contextmanager
def watched(rig: Rig) -> Iterator[set[object]]:
    """Yields what a probe, a short request and Serve's count of ingresses said meanwhile."""
    seen: set[object] = set()
    is_over = Event()

    def watch() -> None:
        with httpx.Client(base_url=rig.url, timeout=180) as client:
            while not is_over.is_set():
                ingresses = read_status().applications["api"].deployments["ingress"]
                seen.add(("an ingress runs", "RUNNING" in ingresses.replica_states))
                for path in PROBES:
                    seen.add((path, client.get(path).status_code))
                body = {"model": RIG_BASE, "prompt": "abc", "max_tokens": 2}
                seen.add(("/v1/completions", client.post("/v1/completions", json=body).status_code))

    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch)
        try:
            yield seen
        finally:
            is_over.set()
            watching.result()


@pytest.mark.parametrize(
    ("args", "num_engines", "num_new"),
    [
        pytest.param(SCALED_UP, 3, 1, id="more replicas"),
        pytest.param(SCALED_DOWN, 1, 0, id="fewer replicas"),
        pytest.param(changed_everywhere(), 2, 2, id="all"),
    ],
)
def test_streams_and_probes_notice_nothing_of_another_file(
    rig: Rig, args: PlatformArgs, num_engines: int, num_new: int
) -> None:
    """`num_engines` run then, of which `num_new` are other ones than before."""
    with httpx.Client(base_url=rig.url, timeout=180) as client:
        eventually(lambda: num_connected(client) == len(processes(ENGINE)))
    undisturbed = chat_all(rig)
    assert {reason for _, reason in undisturbed} == {"length"}
    old = {*processes(ENGINE), *processes(INGRESS), *processes(MANAGER)}
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=rig.url, timeout=180) as client:
        with held(rig):
            running = pool.submit(chat_all, rig)
            eventually(lambda: metric(client, "vllm:num_requests_running") == NUM_STREAMS)
            assert all(busy_engines(client))
            with watched(rig) as seen:
                redeploy(rig, args)
                eventually(lambda: is_followed(client, num_engines, num_new, old))
            assert not running.done()
        assert running.result() == undisturbed
        assert seen == {("an ingress runs", True), *((path, 200) for path in PATHS)}
        eventually(lambda: old.isdisjoint(processes(INGRESS)))
        eventually(lambda: len(processes(ENGINE)) == num_engines)
        assert len(set(processes(ENGINE)) - old) == num_new
        eventually(lambda: len(processes(INGRESS)) == len(processes(MANAGER)) == 1)
        assert metric(client, "loraplex_requests_lost_total") == 0
        eventually(lambda: metric(client, "loraplex_open_engine_requests") == 0)
        assert chat_all(rig) == undisturbed


def busy_engines(client: httpx.Client) -> list[bool]:
    """Returns of each engine whether it has requests."""
    lines = scrape(client).splitlines()
    loads = [one for one in lines if one.startswith("vllm:num_requests_running{")]
    return [float(one.rpartition(" ")[2]) > 0 for one in loads if f'"{RIG_BASE}"' in one]


def is_followed(client: httpx.Client, num_engines: int, num_new: int, old: set[int]) -> bool:
    """Returns whether all that the file asks for runs; streams may hold what ran before."""
    if old.issuperset(processes(INGRESS)) or old.issuperset(processes(MANAGER)):
        return False
    headers = {"authorization": f"Bearer {RIG_TOKEN}"}
    lines = client.get("/admin/bases", headers=headers).json()["bases"]
    kept = [one for one in lines if one["state"] != "draining"]
    run, wanted = (sum(one[key] for one in kept) for key in ("replicas", "wanted_replicas"))
    is_scaled = run == wanted == num_engines
    return is_scaled and len(set(processes(ENGINE)) - old) == num_new
