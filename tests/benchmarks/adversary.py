"""Hostile clients and a hostile registry against a live server, and their effect on honest clients.

The demo is started as `loraplex serve` starts it (with `--paced` the tests' paced engine takes the
place of the model, so that gaps of streams are the front's alone). 16 honest streams and short
requests run all the time; one attack follows the other. A JSON line an attack: what the honest
clients saw before and during it, the statuses that the attacker saw, memory before and after, the
promises that broke. The last line says whether all of it passed.

    python -m tests.benchmarks.adversary [--paced] [--short] [--only NAMES] [--haproxy] [--keys]
        [--out FILE]

`--short --untimed` is the form for tests: a tenth of each attack, and no judgement by the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from registry.cache import Cache
from serve_app.cli import launch
from serve_app.cli.commands.store import open_registry
from serve_app.cli.demo.prepare import ADAPTER_NAMES, BASE_NAME
from serve_app.cli.demo.prepare import prepare as prepare_demo
from serve_app.cli.registration import register_adapter, register_base
from serve_app.config import ADMIN_TOKEN as ADMIN_TOKEN_VARIABLE
from tests.benchmarks.adapter_files import write_adapters
from tests.benchmarks.adversary_attacks import (
    CONNECTION_ATTACKS,
    FLOOD_TOKENS,
    FLOODS,
    MIB,
    Attack,
    Damage,
    Target,
    described,
)
from tests.benchmarks.adversary_client import (
    ATTACKER,
    TENANT,
    Honest,
    HonestLoad,
    Seen,
    chat,
    post,
    send,
)
from tests.benchmarks.adversary_registry import ADMIN_TOKEN, REGISTRY_ATTACKS
from tests.benchmarks.cases import AdapterSpec
from tests.benchmarks.keyed import TENANCY, give_keys
from tests.benchmarks.overload_server import server
from tests.benchmarks.report import Report, print_table
from tests.benchmarks.serve_base import BASE, write_tokenizer, write_weights
from tests.benchmarks.serve_home import open_home, write_serve_file
from tests.benchmarks.shapes import SHAPES
from tests.ports import free_port

ATTACKS = {**REGISTRY_ATTACKS, **CONNECTION_ATTACKS, **FLOODS}
STREAMS = 16
ROWS, PACE = 24, 20  # of the paced engine: tokens a second of each row
CAPACITY_S = 12.0
HONEST_SHARE = 0.2  # of the capacity, in a flood
MIN_SHARE_SERVED = 0.95
# How much longer the longest gap may be than before the attack. Text is the sharp one: nothing but
# the work on the text may be in its way. The others also share two cores with the attacker.
GAP_S = {"large_texts": 0.1, "json_bombs": 0.1}
OTHER_GAP_S = 1.0
GAP_FACTOR_OF_DEMO = 2.0  # a model on the same two cores: its own steps are most of a gap
MEMORY_BYTES = 256 * MIB  # more than before, all processes together, SETTLE_S after an attack
SETTLE_S = 20.0  # until a worker for texts and the allocators gave back what they hold
SHORT_SCALE = 0.1
_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass(frozen=True, slots=True)
class Line:
    attack: str
    passed: bool
    longest_gap_s: float
    before_gap_s: float
    served: str


def prepare(home: Path, *, is_paced: bool) -> tuple[str, tuple[str, ...]]:
    """Registers the base and its adapters; their names."""
    os.environ["LORAPLEX_HOME"] = str(home)
    if not is_paced:
        prepare_demo(home)
        return BASE_NAME, tuple(ADAPTER_NAMES)
    shape = SHAPES["tiny"]
    folder = shape.write_config(home / "base")
    write_tokenizer(folder, shape.vocab_size)
    words = {"eos_token": "<eos>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    write_weights(folder)
    registry, cache = open_registry(None), Cache(home / "cache")
    register_base(registry, folder, BASE, link=True)
    adapters = [AdapterSpec(16, index) for index in range(3)]
    folders = write_adapters(home / "adapters", shape, adapters, "cpu")
    for adapter in folders:
        register_adapter(registry, adapter, adapter.name, BASE, cache=cache, probe="never")
    return BASE, tuple(adapter.name for adapter in folders)


def write_config(
    home: Path, base: str, port: int, *, is_paced: bool, is_short: bool, has_keys: bool
) -> Path:
    engine: dict[str, object] = {"device": "cpu", "num_threads": 1, "max_num_seqs": ROWS}
    if is_paced:
        engine["seed"] = PACE
    else:
        engine |= {"max_model_len": 2048, "kv_cache_bytes": "512MiB", "dtype": "float32"}
    ingress = {"graceful_shutdown_timeout_s": 2}
    if is_short:
        ingress["body_timeout_s"] = 4  # of a body that stands still; the default is 10 s
    arguments: dict[str, object] = {
        "registry": {"poll_interval_s": 0.5},
        "ingress": ingress,
        "fairness": {"weights": {TENANT: 1}},
        "models": [{"name": base, "engine": engine, "graceful_shutdown_timeout_s": 2}],
    }
    if has_keys:
        arguments["tenancy"] = TENANCY
    app = "tests.benchmarks.paced_app:build" if is_paced else "serve_app.app:build"
    return write_serve_file(home, port, arguments, import_path=app)


@contextmanager
def honest(load: HonestLoad) -> Iterator[Honest]:
    clients = Honest(load)
    try:
        yield clients
    finally:
        clients.close()


def rss_bytes(child: launch.Child) -> int:
    """All processes of the server; what they share counts once for each."""
    total = 0
    for pid in launch.session_processes(child.process.pid):
        try:
            pages = int(Path("/proc", str(pid), "statm").read_text().split()[1])
        except OSError:  # it ended meanwhile
            continue
        total += pages * os.sysconf("SC_PAGE_SIZE")
    return total


class Bench:
    def __init__(self, args: argparse.Namespace, target: Target, child: launch.Child) -> None:
        self._args = args
        self._target = target
        self._child = child
        self._begin_s = 1.0 if args.short else 5.0
        # The time before an attack is only compared with by a judgement by the clock.
        self._baseline_s = 0.1 if args.untimed else 2.0 if args.short else 10.0

    def run(self, name: str, report: Report) -> Line:
        attack = ATTACKS[name]
        is_flood = name in FLOODS
        load = self._flood_load() if is_flood else self._load()
        with honest(load) as clients:
            time.sleep(1.0 if is_flood else self._begin_s)  # every stream has begun
            clients.window()
            time.sleep(self._baseline_s)
            before, memory = clients.window(), rss_bytes(self._child)
            damage = self._attack(attack)
            during = clients.stop() if is_flood else clients.window()
        self._settle(memory)
        grown = rss_bytes(self._child) - memory
        self._judge(name, damage, before, during, grown)
        passed = not damage.broken
        report.emit(
            attack=name,
            **described(damage),
            honest_before=_rounded(before),
            honest_during=_rounded(during),
            rss_before_mib=memory // MIB,
            rss_after_mib=(memory + grown) // MIB,
            **{"pass": passed},
        )
        served = f"{during.num_served}/{during.num_sent}"
        return Line(name, passed, during.longest_gap_s, before.longest_gap_s, served)

    def _settle(self, memory: int) -> None:
        """The short form waits no longer than until memory is as `_judge` requires."""
        end_s = time.monotonic() + (SETTLE_S / 10 if self._args.short else SETTLE_S)
        while time.monotonic() < end_s:
            if self._args.short and rss_bytes(self._child) - memory <= 2 * MEMORY_BYTES:
                return
            time.sleep(0.1)

    def _attack(self, attack: Attack) -> Damage:
        try:
            return asyncio.run(attack(self._target))
        except Exception as error:  # an attack that cannot go on has shown something, too
            return Damage(broken=[f"the attack ended with {error!r}"])

    def _judge(self, name: str, damage: Damage, before: Seen, during: Seen, grown: int) -> None:
        share = during.share_served
        damage.require(share >= MIN_SHARE_SERVED, f"honest requests are served: {share:.3f}")
        damage.require(not during.num_cut, f"no honest stream is cut, but {during.num_cut}")
        # The short form looks too soon for memory to have returned, not for it to be bounded.
        allowed = 2 * MEMORY_BYTES if self._args.short else MEMORY_BYTES
        damage.require(grown <= allowed, f"memory returns: {grown // MIB} MiB more")
        if name not in FLOODS and not self._args.untimed:
            allowed_s = before.longest_gap_s + GAP_S.get(name, OTHER_GAP_S)
            if not self._args.paced:
                allowed_s = max(allowed_s, GAP_FACTOR_OF_DEMO * before.longest_gap_s)
            gap_s = during.longest_gap_s
            damage.require(gap_s <= allowed_s, f"the longest gap is {gap_s:.3f} s")

    def _load(self) -> HonestLoad:
        tokens = 400 if self._args.paced else 200
        target = self._target
        return HonestLoad(target.port, target.model, STREAMS, tokens, 1.0, 4)

    def _flood_load(self) -> HonestLoad:
        target = self._target
        rate = HONEST_SHARE * target.capacity
        return HonestLoad(target.port, target.model, 0, 0, rate, FLOOD_TOKENS)


def _rounded(seen: Seen) -> dict[str, object]:
    return {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(seen).items()
    }


async def reach_working_size(target: Target, num_bodies: int) -> None:
    """The first large bodies start the processes for long texts and give each process on their way
    its buffers, which stay: only what comes on top of that would fill a memory."""
    for size in (MIB // 8, *(12 * MIB,) * num_bodies):
        body = {"model": target.model, "prompt": "hi", "user": "u" * size, "max_tokens": 1}
        both = [send(target.port, post("/v1/completions", body)) for _ in range(2)]
        await asyncio.gather(*both)


def capacity(port: int, model: str, workers: int) -> float:
    """Requests of a flood's size that are answered a second, in a closed loop."""

    async def work() -> int:
        count, number = 0, 0
        end_s = time.monotonic() + CAPACITY_S

        async def worker(name: int) -> None:
            nonlocal count, number
            while time.monotonic() < end_s:
                number += 1
                fields = chat(model, f"{name} {number}", FLOOD_TOKENS, ignore_eos=True)
                reply = await send(port, post("/v1/chat/completions", fields))
                count += reply.status == 200 and time.monotonic() < end_s

        await asyncio.gather(*(worker(name) for name in range(workers)))
        return count

    return asyncio.run(work()) / CAPACITY_S


def measure(args: argparse.Namespace, report: Report, home: Path) -> bool:
    base, adapters = prepare(home, is_paced=args.paced)
    port = free_port()
    kinds = {"is_paced": args.paced, "is_short": args.short, "has_keys": args.keys}
    config = write_config(home, base, port, **kinds)
    os.environ[ADMIN_TOKEN_VARIABLE] = ADMIN_TOKEN
    lines = []
    with server(home, config, port, haproxy=args.haproxy) as child:
        if args.keys:
            give_keys(f"http://127.0.0.1:{port}", (TENANT, ATTACKER))
        model = f"{base}:{adapters[0]}"
        rate = ROWS * PACE / FLOOD_TOKENS if args.paced else capacity(port, model, ROWS)
        scale = SHORT_SCALE if args.short else 1.0
        target = Target(port, home, child.log, base, adapters, scale, rate, not args.paced)
        bench = Bench(args, target, child)
        idle = rss_bytes(child)
        asyncio.run(reach_working_size(target, num_bodies=4 if args.short else 24))
        time.sleep(SETTLE_S / 10 if args.short else SETTLE_S)
        large = rss_bytes(child)
        report.emit(rss_idle_mib=idle // MIB, rss_after_first_large_bodies_mib=large // MIB)
        for name in args.only.split(",") if args.only else ATTACKS:
            lines.append(bench.run(name, report))
    header = ("attack", "pass", "longest gap s", "before s", "honest served")
    print_table(header, [tuple(asdict(line).values()) for line in lines])
    return all(line.passed for line in lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--paced", action="store_true", help="the paced engine, not the demo's")
    parser.add_argument("--short", action="store_true", help="a tenth of every attack")
    parser.add_argument("--untimed", action="store_true", help="judge all but the longest gap")
    parser.add_argument("--only", help="attacks by name, separated by commas")
    parser.add_argument("--haproxy", action="store_true", help="in front")
    parser.add_argument("--keys", action="store_true", help="a key for honest clients, one besides")
    parser.add_argument("--home", type=Path, help="kept; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="a file that receives every line, too")
    args = parser.parse_args()
    if unknown := set((args.only or "").split(",")) - {"", *ATTACKS}:
        parser.error(f"--only: no attack is called {', '.join(sorted(unknown))}")
    return args


def main() -> None:
    args = parse_args()
    report = Report(args.out)
    report.emit_machine("adversary", arguments=sys.argv[1:])
    with open_home(args.home, "adversary-") as home:
        passed = measure(args, report, home)
    report.emit(**{"pass": passed})
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
