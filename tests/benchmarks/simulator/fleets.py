"""Scenarios of size and of change: a fleet of a thousand replicas, and replicas that come and go
with the load.
"""

from __future__ import annotations

import resource
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from serve_app.autoscaling.policy import ScalingArgs
from tests.benchmarks.report import Report
from tests.benchmarks.simulator.pictures import Curve, Panel, panels
from tests.benchmarks.simulator.records import TIERS, Records, over_time, quantiles_ms, summary
from tests.benchmarks.simulator.scaler import Scaler
from tests.benchmarks.simulator.setting import Setting, capacity, cluster
from tests.benchmarks.simulator.traffic import Traffic, TrafficArgs

# Seconds from the order of a replica to its first request: the engine's start as the results have
# it (17.6 s on an H200, with the weights in the page cache), and a process before it. Assumed.
START_S = 30.0
_DAY_S = 1200.0
_HOURS = {0: 0.35, 3: 0.2, 6: 0.25, 9: 0.9, 12: 1.0, 15: 0.95, 18: 0.8, 21: 0.6, 24: 0.35}
_DAY = tuple((_DAY_S * hour / 24, share) for hour, share in _HOURS.items())


def scale(setting: Setting, report: Report, picture: Path | None) -> None:
    """A load step (half of a replica's capacity, then six times as much, then half), and a day in
    twenty minutes."""
    traffic = TrafficArgs(1, 1.0, seed=setting.seed, num_adapters=100, burstiness=2.0)
    full = capacity(setting, replace(traffic, num_requests=10000), 4)
    step = ((0, 0.5), (120, 0.5), (121, 3.0), (480, 3.0), (481, 0.5), (900, 0.5))
    day = tuple((at_s, 8 * share) for at_s, share in _DAY)
    for name, curve in (("step", step), ("day", day)):
        area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(curve))
        count = int(full * area)
        args = replace(traffic, num_requests=count, rate=full, curve=curve)
        service = cluster(setting, "expected_ttft", 1)
        scaling = ScalingArgs(1, 16, target_ttft_s=0.5, upscale_delay_s=3, downscale_delay_s=60)
        scaler = Scaler(service, scaling, START_S, until_s=curve[-1][0] + 120)
        service.run(Traffic(args).calls())
        records = service.records
        at_s = records.column("arrived_s")
        ordered = [(moment, wanted) for moment, _, wanted in scaler.curve]
        report.emit(
            part=f"scale {name}",
            requests=count,
            answered=len(records),
            refused=service.num_refused,
            migrated=scaler.num_migrated,
            most_replicas=max(running for _, running, _ in scaler.curve),
            replicas_at_the_end=scaler.curve[-1][1],
            ttft_ms=quantiles_ms(records.column("ttft_s")),
            share_above_1_s=round(float((records.column("ttft_s") > 1).mean()), 4),
            first_order_s=next((t for t, wanted in ordered if wanted > 1), None),
            replica_seconds=round(sum(running for _, running, _ in scaler.curve) * 0.5),
        )
        if picture is not None:
            times = [moment for moment, _, _ in scaler.curve]
            seconds, counts = np.unique((at_s / 5).astype(int), return_counts=True)
            panels(
                picture.with_stem(f"{picture.stem}-{name}"),
                f"Autoscaling, a {name}: starts take {START_S:.0f} s",
                [
                    Panel("requests/s", [Curve((seconds * 5.0).tolist(), (counts / 5).tolist())]),
                    Panel(
                        "replicas",
                        [
                            Curve(times, [run for _, run, _ in scaler.curve], "running"),
                            Curve(times, [want for _, _, want in scaler.curve], "wanted"),
                        ],
                    ),
                    _ttft_panel(records, 5.0),
                ],
            )


def fleet(setting: Setting, report: Report, picture: Path | None) -> None:
    """1,000 replicas, 10,000 adapters, one million requests over 8 ingresses, a wave of load."""
    num_replicas = max(8, int(1000 * setting.scale))
    traffic = TrafficArgs(
        int(1_000_000 * setting.scale),
        1.0,
        seed=setting.seed,
        num_adapters=max(80, int(10_000 * setting.scale)),
        burstiness=2.0,
        drift_s=30.0,
        ranks=(16, 8, 16, 32),
    )
    few = Setting(setting.calibration, setting.seed)
    full = capacity(few, replace(traffic, num_adapters=160), 16)
    curve = ((0, 0.4), (40, 0.8), (80, 0.4))
    args = replace(traffic, rate=full * num_replicas, curve=curve)
    service = cluster(setting, "expected_ttft", num_replicas, 8)
    service.run(Traffic(args).calls())
    records = service.records
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report.emit(
        part="fleet",
        policy="expected_ttft",
        replicas=num_replicas,
        adapters=args.num_adapters,
        ingresses=8,
        refused=service.num_refused,
        virtual_s=round(service.loop.now_s, 1),
        cpu_s=round(service.cpu_s, 1),
        us_a_request=round(1e6 * service.cpu_s / len(records), 1),
        events=service.loop.num_events,
        peak_mib=round(peak_mib),
        busiest_to_mean=_busiest(records, num_replicas),
        **summary(records),
    )
    if picture is not None:
        _draw_fleet(picture, records, num_replicas)


def _draw_fleet(path: Path, records: Records, num_replicas: int) -> None:
    at_s = records.column("arrived_s")
    seconds, counts = np.unique(at_s.astype(int), return_counts=True)
    tiers = records.column("tier")
    shares = [
        Curve(*over_time(at_s, (tiers == TIERS.index(name)).astype(float), 1.0, -1.0), name)
        for name in TIERS[1:]
    ]
    panels(
        path,
        f"{num_replicas:,} replicas, {len(records):,} requests",
        [
            Panel("requests/s", [Curve(seconds.tolist(), counts.tolist())]),
            _ttft_panel(records, 1.0),
            Panel("adapter found in", shares),
        ],
    )


def _ttft_panel(records: Records, bin_s: float) -> Panel:
    at_s, ttft_ms = records.column("arrived_s"), records.column("ttft_s") * 1000
    curves = [
        Curve(*over_time(at_s, ttft_ms, bin_s, q), f"p{100 * q:.0f}") for q in (0.99, 0.95, 0.5)
    ]
    return Panel("TTFT, ms", curves, is_log=True)


def _busiest(records: Records, num_replicas: int) -> float:
    """Prompt and output tokens of the busiest replica to the mean."""
    tokens = records.column("prompt") - records.column("cached") + records.column("output")
    sums = np.bincount(records.column("replica").astype(int), tokens, num_replicas)
    return round(float(sums.max() / sums.mean()), 3)
