"""Screenshots of the console for the documents, over the demo with keys on and real answers.

    python -m tests.console_screenshots docs/images [--home HOME] [--minutes 2]

HOME keeps the demo for the next time. Needs playwright and Debian's chromium.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from serve_app.cli.demo import EXAMPLES
from serve_app.cli.demo.prepare import ADAPTERS_DIR
from serve_app.home import ensure_token
from tests.console_rig import go, log_in, open_browser, open_page
from tests.demo_server import BASE, ROOT, DemoServer, run_cli, serving, write_config

CLIENTS = 4  # at once
WIDTH = 1280  # pixels
WAIT_MS = 90_000  # a slow machine answers some tokens a second
PIRATE = f"{BASE}:pirate"
QUESTION = EXAMPLES["pirate"]
QUESTIONS = (
    *((model, text) for model, text in EXAMPLES.items()),
    *((PIRATE, f"What is the capital of {country}?") for country in ("Italy", "Spain", "Japan")),
    (BASE, "Why is the sky blue?"),
    (BASE, QUESTION),
)
KEYS: tuple[dict[str, object], ...] = (
    {"key_alias": "web-shop", "team_id": "shop", "models": [BASE, f"{BASE}:*"], "rpm_limit": 600},
    {"key_alias": "analysts", "team_id": "data", "models": ["sql", "extract"], "duration": "90d"},
    {"key_alias": "evals", "team_id": "research", "tokens_per_day": 2_000_000},
    {"key_alias": "dashboard", "team_id": "operations", "scopes": ["admin:read"]},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--home", type=Path)
    parser.add_argument("--minutes", type=float, default=2.0, help="of traffic before the pictures")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        home = given.home or Path(scratch) / "home"
        prepare(home, Path(scratch))
        with serving_with_keys(home, Path(scratch)) as server:
            admin = {"authorization": f"Bearer {ensure_token(home)}"}
            with httpx.Client(base_url=server.url, headers=admin, timeout=60) as client:
                keys = make_keys(client)
                post(client, "/admin/canaries/pirate", {"version": 2, "weight": 0.3})
            with open_browser() as browser, open_page(browser, color_scheme="light") as page:
                page.set_default_timeout(WAIT_MS)
                log_in(page, server, ensure_token(home))
                with traffic(server, keys):
                    time.sleep(60 * given.minutes)
                    take_overview(page, given.folder)
                take_the_others(page, given.folder)


def prepare(home: Path, scratch: Path) -> None:
    """Makes the demo, and a second version of the pirate, which is a milder one."""
    run_cli(home, "demo")
    if (home / "demo" / "milder").exists():
        return
    folder = Path(shutil.copytree(ADAPTERS_DIR / "pirate", scratch / "milder"))
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] * 0.75}))
    names = ("--name", "pirate", "--base", BASE, "--alias", "candidate")
    run_cli(home, "register", "adapter", str(folder), *names)
    (home / "demo" / "milder").touch()


@contextmanager
def serving_with_keys(home: Path, scratch: Path) -> Iterator[DemoServer]:
    file = scratch / "serve.yaml"
    url = write_config(ROOT / "configs" / "quickstart.yaml", file)
    content = yaml.safe_load(file.read_text())
    database = {"database_url": f"sqlite:///{scratch / 'keys.db'}"}
    prices = {"prices": {"*": {"prompt": 0.2, "cached": 0.05, "output": 0.8}}}
    content["applications"][0]["args"]["tenancy"] = {"enabled": True} | database | prices
    file.write_text(yaml.safe_dump(content))
    with serving(home, file, url) as server:
        yield server


def make_keys(client: httpx.Client) -> list[str]:
    """Returns the keys that may ask models."""
    made = [post(client, "/key/generate", fields)["key"] for fields in KEYS]
    return made[:-1]


@contextmanager
def traffic(server: DemoServer, keys: list[str]) -> Iterator[None]:
    """Asks questions until the end, each client another one, each user one arm of the canary."""
    ended = threading.Event()

    def ask(number: int) -> None:
        client = httpx.Client(base_url=server.url, timeout=120)
        for turn in itertools.count(number):
            if ended.is_set():
                return
            model, question = QUESTIONS[turn % len(QUESTIONS)]
            key = keys[1] if model in ("sql", "extract") else keys[turn % 2 * 2]
            body = {
                "model": model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 48,
                "user": f"user {turn}",
            }
            headers = {"authorization": f"Bearer {key}"}
            client.post("/v1/chat/completions", json=body, headers=headers).raise_for_status()

    with ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(ask, number) for number in range(CLIENTS)]
        try:
            yield
        finally:
            ended.set()
    for one in asked:
        one.result()


def take_overview(page: Any, folder: Path) -> None:
    go(page, "Overview")
    page.locator(".chart canvas").first.wait_for()
    shoot(page, folder / "console_overview.png", 860)


def take_the_others(page: Any, folder: Path) -> None:
    go(page, "Canaries")
    page.get_by_role("region", name="Canary of pirate").wait_for()
    shoot(page, folder / "console_canaries.png", 620)
    go(page, "Keys and usage")
    page.get_by_role("region", name="Usage", exact=True).get_by_role("table").wait_for()
    shoot(page, folder / "console_keys.png", 1200)
    go(page, "Playground")
    page.locator("datalist option").first.wait_for(state="attached")
    page.get_by_label("Right model").fill(PIRATE)
    page.get_by_label("Max tokens").fill("40")
    page.get_by_label("Prompt").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    page.get_by_text("Done.").nth(1).wait_for()
    page.get_by_role("listbox").last.get_by_role("option").nth(1).click()
    page.get_by_role("listbox").first.get_by_role("option").nth(1).click()
    shoot(page, folder / "console_playground.png", 1100)


def shoot(page: Any, file: Path, height: int) -> None:
    page.set_viewport_size({"width": WIDTH, "height": height})
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 200)))")
    page.screenshot(path=file)
    print(f"{file}: {file.stat().st_size // 1000} KB")


def post(client: httpx.Client, path: str, body: dict[str, object]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


if __name__ == "__main__":
    main()
