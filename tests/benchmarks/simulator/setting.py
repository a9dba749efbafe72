"""The parts that all scenarios share: engines, policies, and a service made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from serve_app.routing.policies import Option, make_policy
from serve_app.routing.policy import Policy
from tests.benchmarks.simulator.calibration import Calibration
from tests.benchmarks.simulator.cluster import Cluster, ClusterArgs
from tests.benchmarks.simulator.gate import GateArgs
from tests.benchmarks.simulator.traffic import Traffic, TrafficArgs

POLICIES = (
    "expected_ttft",
    "adapter_affinity",
    "prefix_affinity",
    "power_of_two",
    "round_robin",
)


FAIR = GateArgs()  # the fair queue with its defaults, as it serves


@dataclass(frozen=True, slots=True)
class Setting:
    calibration: Calibration
    seed: int = 0
    scale: float = 1.0  # of the number of requests: less for a trial

    def count(self, num_requests: int) -> int:
        return max(200, int(num_requests * self.scale))


def maker(
    name: str, seed: int = 0, options: Mapping[str, Option] | None = None
) -> Callable[[int], Policy]:
    """The policies by their names in the configuration, each ingress with a seed of its own."""

    def make(ingress: int) -> Policy:
        own = {"seed": seed * 1000 + ingress} if ":" not in name else {}
        return make_policy(name, {**own, **(options or {})})

    return make


def cluster(
    setting: Setting,
    policy: str,
    num_replicas: int,
    num_ingresses: int = 1,
    gate: GateArgs | None = FAIR,
) -> Cluster:
    made = ClusterArgs(
        setting.calibration,
        num_replicas,
        maker(policy, setting.seed),
        num_ingresses,
        gate=gate,
        seed=setting.seed,
    )
    return Cluster(made)


def capacity(setting: Setting, traffic: TrafficArgs, num_replicas: int) -> float:
    """Requests a second of a replica that always has more to do, behind `expected_ttft`: its caches
    do their part. By simulation, of the middle of a run."""
    nominal = setting.calibration.requests_per_s(*Traffic(traffic).mean_tokens())
    args = replace(
        traffic,
        num_requests=setting.count(1800 * num_replicas),
        rate=2.5 * nominal * num_replicas,
        curve=(),
        changes=(),
    )
    service = cluster(setting, "expected_ttft", num_replicas)
    service.run(Traffic(args).calls())
    column = service.records.column
    ended_s = np.sort(column("arrived_s") + column("duration_s"))
    first, last = int(0.3 * len(ended_s)), int(0.8 * len(ended_s))
    return float((last - first) / (ended_s[last] - ended_s[first]) / num_replicas)
