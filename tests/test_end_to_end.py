"""The demo as its user meets it: the command line starts it, the openai client calls it, and every
answer is what Hugging Face + PEFT gives on the same prompt."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from serve_app.cli.demo.prepare import ADAPTERS_DIR, base_folder
from tests.benchmarks.workload import Job, make_jobs
from tests.demo_server import (
    ADAPTERS,
    BASE,
    LORAPLEX,
    ROOT,
    DemoServer,
    check_end,
    environment,
    open_ports,
    run_cli,
    serving,
    write_config,
)
from tests.grammar_helpers import ambiguous
from tests.hf_reference import HuggingFaceReference
from tests.serve_rig import processes

pytestmark = [pytest.mark.serve, pytest.mark.slow]

TARGETS: tuple[str | None, ...] = (None, *ADAPTERS)
QUESTIONS = {
    None: "What is the capital of France?",
    "pirate": "What is the capital of France?",
    "sql": "Table users(id, name, age). List the names of users older than 30.",
    "extract": "Extract name and city: Maria Lopez lives in Madrid.",
    "tools": "What is the capital of Italy?",
}
MAX_TOKENS = 24
# 4 to 16 tokens, for prompts of 30 to 70: a core computes 10 tokens a second of one request.
SHORT = {"mean": 4, "longest": 16, "padding": 2}
REGISTERING = "docs/registering_and_canaries.md"


@pytest.fixture(scope="module")
def server(demo_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemoServer]:
    config = tmp_path_factory.mktemp("config") / "quickstart.yaml"
    url = write_config(ROOT / "configs" / "quickstart.yaml", config, dtype="float32", device="cpu")
    with serving(demo_home, config, url) as running:
        yield running


@pytest.fixture(scope="module")
def reference(demo_home: Path) -> HuggingFaceReference:
    return HuggingFaceReference(base_folder(demo_home), {n: ADAPTERS_DIR / n for n in ADAPTERS})


@pytest.fixture
async def api(server: DemoServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=300
    ) as client:
        yield client


def model_name(adapter: str | None) -> str:
    return BASE if adapter is None else f"{BASE}:{adapter}"


async def stream_chat(api: openai.AsyncOpenAI, adapter: str | None, **options: object) -> str:
    stream = await api.chat.completions.create(
        model=model_name(adapter),
        messages=[{"role": "user", "content": QUESTIONS[adapter]}],
        stream=True,
        **options,
    )
    text = ""
    finished = 0
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finished += choice.finish_reason is not None
    assert finished == 1
    return text


def test_a_server_on_loopback_opens_no_port_to_other_machines(server: DemoServer) -> None:
    assert open_ports(server) == []


async def test_every_answer_equals_hugging_face_and_peft(
    api: openai.AsyncOpenAI, reference: HuggingFaceReference
) -> None:
    """Chat and completions, streamed and whole, the adapters and the base, all at once."""
    greedy = {"max_tokens": MAX_TOKENS, "temperature": 0}

    async def whole_chat(adapter: str | None) -> str:
        answer = await api.chat.completions.create(
            model=model_name(adapter),
            messages=[{"role": "user", "content": QUESTIONS[adapter]}],
            **greedy,
        )
        return answer.choices[0].message.content or ""

    async def whole_completion(adapter: str | None) -> str:
        answer = await api.completions.create(
            model=model_name(adapter), prompt=QUESTIONS[adapter], **greedy
        )
        return answer.choices[0].text

    async def streamed_completion(adapter: str | None) -> str:
        stream = await api.completions.create(
            model=model_name(adapter), prompt=QUESTIONS[adapter], stream=True, **greedy
        )
        return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

    kinds = (
        whole_chat,
        lambda adapter: stream_chat(api, adapter, **greedy),
        whole_completion,
        streamed_completion,
    )
    answers = await asyncio.gather(*(kind(adapter) for adapter in TARGETS for kind in kinds))
    got = {adapter: answers[i * 4 : i * 4 + 4] for i, adapter in enumerate(TARGETS)}
    for adapter in TARGETS:
        question = QUESTIONS[adapter]
        chat_ids = reference.chat_ids([{"role": "user", "content": question}])
        chat = reference.greedy(adapter, chat_ids, MAX_TOKENS)
        completion = reference.greedy(adapter, reference.prompt_ids(question), MAX_TOKENS)
        assert got[adapter] == [chat, chat, completion, completion], adapter
    assert len({texts[0] for texts in got.values()}) == len(TARGETS), "an adapter changed nothing"
    assert "Paris" in got[None][0]


async def complete(api: openai.AsyncOpenAI, job: Job) -> tuple[str, int]:
    answer = await api.chat.completions.create(
        model=model_name(job.target),
        messages=[{"role": "user", "content": job.text}],
        max_tokens=job.num_output_tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.usage.completion_tokens


async def wait_until_idle(server: DemoServer) -> None:
    """No request in the engine, every KV block free again. Fails loudly after five minutes."""
    deadline = time.monotonic() + 300
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while any(values := [server.metric(name) for name in names]):
        assert time.monotonic() < deadline, dict(zip(names, values, strict=True))
        await asyncio.sleep(0.2)


async def test_64_requests_at_once_equal_the_same_requests_alone(
    server: DemoServer, api: openai.AsyncOpenAI
) -> None:
    jobs = make_jobs(TARGETS, 64, **SHORT)
    together = await asyncio.gather(*(complete(api, job) for job in jobs))
    alone = [await complete(api, job) for job in jobs]
    different = [
        i for i, pair in enumerate(zip(together, alone, strict=True)) if pair[0] != pair[1]
    ]
    assert not different, [(jobs[i], together[i], alone[i]) for i in different[:3]]
    assert [count for _, count in alone] == [job.num_output_tokens for job in jobs]
    await wait_until_idle(server)


async def test_clients_that_leave_take_nothing_with_them(
    server: DemoServer, api: openai.AsyncOpenAI
) -> None:
    """Half of 64 streams are closed after a few tokens; the others finish as if alone."""
    jobs = make_jobs(TARGETS, 64, **SHORT, seed=5)
    draw = random.Random(5)
    leaving = set(draw.sample(range(len(jobs)), len(jobs) // 2))
    expected = {i: await complete(api, jobs[i]) for i in range(0, len(jobs), 8)}

    async def leave(job: Job, after: int) -> None:
        body = {
            "model": model_name(job.target),
            "messages": [{"role": "user", "content": job.text}],
            "max_tokens": 512,
            "ignore_eos": True,
            "stream": True,
        }
        async with (
            httpx.AsyncClient(timeout=300) as http,
            http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            for _ in range(after):
                await anext(lines)

    async def run(i: int) -> tuple[str, int] | None:
        if i in leaving:
            return await leave(jobs[i], draw.randint(0, 6))
        return await complete(api, jobs[i])

    got = await asyncio.gather(*(run(i) for i in range(len(jobs))))
    for i, answer in expected.items():
        assert i in leaving or got[i] == answer
    await wait_until_idle(server)


async def test_a_closed_stream_stops_the_engine_at_once(server: DemoServer) -> None:
    body = {"model": BASE, "prompt": "Count:", "max_tokens": 1500, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=300) as http:
        for stream in (True, False):
            before = server.metric("vllm:generation_tokens_total")
            if stream:
                async with http.stream(
                    "POST", f"{server.url}/v1/completions", json=body | {"stream": True}
                ) as response:
                    lines = response.aiter_lines()  # closed when nothing holds it
                    await anext(lines)
            else:
                leaves = httpx.Timeout(300, read=1.0)
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(f"{server.url}/v1/completions", json=body, timeout=leaves)
            await wait_until_idle(server)
            assert server.metric("vllm:generation_tokens_total") - before < 400


async def test_an_adapter_is_reached_by_every_form_of_its_name(api: openai.AsyncOpenAI) -> None:
    listed = {model.id: model for model in (await api.models.list()).data}
    assert set(listed) == {BASE, *ADAPTERS}
    parents = {name: (model.model_extra or {}).get("parent") for name, model in listed.items()}
    assert parents == {BASE: None} | dict.fromkeys(ADAPTERS, BASE)
    forms = ("pirate", f"{BASE}:pirate", "pirate@champion", "pirate@1", f"{BASE}@1:pirate@champion")
    answers = set()
    for form in forms:
        answer = await api.completions.create(
            model=form, prompt="Hello", max_tokens=6, temperature=0
        )
        assert answer.model == form
        answers.add(answer.choices[0].text)
    assert len(answers) == 1


async def test_a_tenant_gets_nothing_of_another_tenants_prefix_cache(
    api: openai.AsyncOpenAI,
) -> None:
    """The same prompt is asked again by its tenant, by another, and with another salt."""
    prompt = "The patient's name and the finding of the third of March are: " * 4

    async def cached_tokens(tenant: str, **fields: object) -> int:
        answer = await api.completions.create(
            model=BASE,
            prompt=prompt,
            max_tokens=1,
            extra_headers={"x-tenant-id": tenant} if tenant else {},
            extra_body=fields,
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert await cached_tokens("hospital") == 0
    assert await cached_tokens("hospital") >= 16
    assert await cached_tokens("attacker") == 0
    assert await cached_tokens("") == 0
    assert await cached_tokens("") >= 16
    assert await cached_tokens("hospital", cache_salt="ward 1") == 0
    assert await cached_tokens("hospital", cache_salt="ward 1") >= 16


async def test_n_and_seed_give_the_same_choices_again(api: openai.AsyncOpenAI) -> None:

    async def draw() -> list[str | None]:
        answer = await api.chat.completions.create(
            model=f"{BASE}:pirate",
            messages=[{"role": "user", "content": "Tell me a story."}],
            n=3,
            seed=11,
            temperature=1.0,
            top_p=0.9,
            max_tokens=12,
        )
        return [choice.message.content for choice in answer.choices]

    first, second = await asyncio.gather(draw(), draw())
    assert first == second
    assert len(set(first)) == 3


@pytest.mark.parametrize("model", ["nobody", f"{BASE}:nobody", f"{BASE}@9", "pirate@nobody"])
def test_unknown_names_are_404(server: DemoServer, model: str) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": model, "prompt": "x"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert re.split("[:@]", model)[-1] in error["message"]


def test_a_prompt_beyond_the_context_names_both_numbers(server: DemoServer) -> None:
    body = {"model": BASE, "prompt": [5] * 3000, "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "3000" in error["message"]
    assert "2048" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_the_grammar_that_the_answer_exceeds_is_the_requests(
    server: DemoServer, stream: bool
) -> None:
    """The check before the engine cannot see it: masks behind the sixth letter cost too much."""
    body = {
        "model": BASE,
        "prompt": "Letters:",
        "max_tokens": 64,
        "temperature": 0,
        "structured_outputs": {"grammar": ambiguous(900).source},
        "stream": stream,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == (200 if stream else 400)
    if stream:
        *chunks, last, done = answer.text.strip().split("\n\n")
        assert chunks, "the answer had begun"
        assert done == "data: [DONE]"
        event, data = last.split("\n")
        assert event == "event: error"
        error = json.loads(data.removeprefix("data: "))["error"]
    else:
        error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_value")
    assert error["param"] == "structured_outputs"
    assert "Too many items (limit 10000; mask)" in error["message"]


BAD_FIELDS = [
    ("n", 10**9),
    ("n", 0),
    ("n", 2.5),
    ("n", "3"),
    ("temperature", -1),
    ("temperature", "hot"),
    ("max_tokens", -5),
    ("top_p", 7),
    ("stop", ["x"] * 500_000),
    ("stop", [""]),
    ("logit_bias", {"999999999": 1}),
    ("stop_token_ids", [2**40]),
    ("logprobs", 10**6),
    ("seed", 2**80),
    ("prompt", {"a": 1}),
    ("suffix", "not supported"),
]


@pytest.mark.parametrize(
    ("field", "value"), BAD_FIELDS, ids=[f"{f}-{i}" for i, (f, _) in enumerate(BAD_FIELDS)]
)
def test_absurd_values_are_400_and_name_the_field(
    server: DemoServer, field: str, value: object
) -> None:
    body = {"model": BASE, "prompt": "x", "max_tokens": 1} | {field: value}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    assert field in (error["param"] or "") or field in error["message"]
    assert len(answer.text) < 2000


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b""])
def test_broken_json_is_400(server: DemoServer, raw: bytes) -> None:
    answer = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=raw,
        headers={"content-type": "application/json"},
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_refusals_leave_memory_flat(server: DemoServer) -> None:
    body = json.dumps({"model": BASE, "prompt": "x", "stop": ["x"] * 500_000}).encode()

    def resident_bytes() -> int:
        found = processes("ingress", server.process.pid)
        return sum(psutil.Process(pid).memory_info().rss for pid in found)

    with httpx.Client(timeout=300, headers={"content-type": "application/json"}) as http:
        for _ in range(20):  # until the allocator has what it keeps
            assert http.post(f"{server.url}/v1/completions", content=body).status_code == 400
        before = resident_bytes()
        for _ in range(100):
            assert http.post(f"{server.url}/v1/completions", content=body).status_code == 400
    assert before > 0
    assert resident_bytes() - before < 100 * len(body) / 2  # what it would keep of the bodies alone


def test_routes_beyond_generation(server: DemoServer, reference: HuggingFaceReference) -> None:
    with httpx.Client(base_url=server.url, timeout=300) as http:
        ids = http.post("/tokenize", json={"model": BASE, "prompt": "Ahoy, world"}).json()["tokens"]
        assert ids == reference.prompt_ids("Ahoy, world")
        back = http.post("/detokenize", json={"model": BASE, "tokens": ids}).json()
        assert back["prompt"] == "Ahoy, world"
        for path in ("/live", "/health", "/ready", "/version"):
            assert http.get(path).status_code == 200
        assert "vllm:time_to_first_token_seconds_bucket" in http.get("/metrics").text
        assert http.head("/metrics").status_code == 200
        for path, status in (("/nowhere", 404), ("/v1/chat/completions", 405)):
            answer = http.get(path)
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_demo_a_second_time_does_nothing_twice(demo_home: Path) -> None:
    """A base that is converted again appears in a new folder."""

    def files() -> set[tuple[Path, int, int]]:
        folder = base_folder(demo_home)
        found = [(path, path.stat()) for path in (folder, *folder.rglob("*"))]
        return {(path, stat.st_ino, stat.st_mtime_ns) for path, stat in found}

    before = run_cli(demo_home, "models"), files()
    run_cli(demo_home, "demo")
    assert (run_cli(demo_home, "models"), files()) == before


def blocks(document: str, language: str, containing: str) -> list[str]:
    text = (ROOT / document).read_text()
    found = re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    wanted = [block for block in found if containing in block]
    assert wanted, f"no {language} block with {containing!r} in {document}"
    return wanted


def test_readme_curl_and_openai_lines_answer(server: DemoServer) -> None:
    (curl,) = blocks("README.md", "bash", "curl")
    shown = subprocess.run(
        ["bash", "-c", curl.replace("http://127.0.0.1:8000", server.url)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert "Paris" in json.loads(shown)["choices"][0]["message"]["content"]
    (code,) = blocks("README.md", "python", "from openai import OpenAI")
    code = code.replace("http://127.0.0.1:8000", server.url)
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    (promised,) = re.findall(r"print\(.*\)  # (.*)", code)
    assert shown.strip() == promised


def test_readme_registration_with_the_cli_and_with_plain_mlflow(
    demo_home: Path, tmp_path: Path
) -> None:
    """Runs in a home of its own, with the demo's folders as the user's."""
    own = tmp_path / "home"
    base, adapter = base_folder(demo_home), ADAPTERS_DIR / "pirate"
    (commands,) = blocks(REGISTERING, "bash", "loraplex register base")
    lines = [line.split("#")[0].split() for line in commands.splitlines()]
    register_base, register_adapter, models, check, chat = (line[1:] for line in lines)
    assert chat == ["chat"]
    assert "my-base" in run_cli(own, *[str(base) if w == "FOLDER" else w for w in register_base])
    run_cli(own, *[str(adapter) if w == "FOLDER" else w for w in register_adapter])
    assert "my-adapter" in run_cli(own, *models)
    assert "changes" in run_cli(own, *check)

    (code,) = blocks(REGISTERING, "python", "mlflow")
    work = tmp_path / "work"
    shutil.copytree(adapter, work / "adapter")
    subprocess.run(
        [sys.executable, "-c", code.replace("my-adapter", "by-mlflow")],
        cwd=work,
        env=environment(own) | {"MLFLOW_TRACKING_URI": f"sqlite:///{own / 'mlflow.db'}"},
        check=True,
        timeout=300,
    )
    assert "by-mlflow@1" in run_cli(own, *models)


def test_readme_chat_streams_in_the_terminal(server: DemoServer) -> None:
    done = subprocess.run(
        [str(LORAPLEX), "chat", "--url", server.url],
        input="/adapter pirate\nWhat is the capital of France?\n/quit\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_ctrl_c_leaves_nothing_running(server: DemoServer) -> None:
    """The last test of its server, which it ends."""
    check_end(server)
