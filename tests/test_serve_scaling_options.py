"""Autoscaling from the file to Serve's options, and the replicas in Serve's status."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError
from ray.serve._private.common import (
    DeploymentStatus,
    DeploymentStatusTrigger,
    ReplicaState,
)
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatusOverview,
)

from registry.entities import BaseVersion
from serve_app.autoscaling.options import engine_scaling, ingress_scaling
from serve_app.autoscaling.policy import EngineScalingPolicy
from serve_app.config import IngressArgs, ModelArgs, PlatformArgs
from serve_app.control.base_status import ReplicaCounts, StartLog, count_replicas, unplaced_replicas
from serve_app.control.deployments import base_application
from serve_app.platform_view import BaseLine, BaseSpec, Sources
from tests.fakes_registry import FolderRegistry

SCALED = {"min_replicas": 2, "max_replicas": 5}
NO_ROOM = (
    "Deployment 'engine' in application 'base--b' has 2 replicas that have taken more than 30s to "
    "be scheduled. This may be due to waiting for the cluster to auto-scale or for a runtime "
    'environment to be installed. Resources required for each replica: {"GPU": 1.0}, total '
    "resources available: {}. Use `ray status` for more details."
)


def model(**fields: object) -> ModelArgs:
    return ModelArgs.model_validate({"name": "b", **fields})


def test_without_autoscaling_the_number_stands() -> None:
    assert engine_scaling(model(replicas=3)) is None
    assert ingress_scaling(IngressArgs(replicas=3)) is None


def test_a_base_starts_with_replicas_and_scales_by_our_policy() -> None:
    scaling = engine_scaling(model(replicas=3, autoscaling=SCALED | {"target_ttft_s": 0.5}))
    assert scaling is not None
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (2, 3, 5)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (0.0, 0.0)
    policy = EngineScalingPolicy(**scaling.policy.policy_kwargs)
    assert policy._args is not None
    assert (policy._args.target_ttft_s, policy._args.downscale_delay_s) == (0.5, 60.0)


def test_ingresses_scale_by_their_open_requests() -> None:
    scaling = ingress_scaling(
        IngressArgs.model_validate({"autoscaling": {"max_replicas": 4, "upscale_delay_s": 1}})
    )
    assert scaling is not None
    assert (scaling.min_replicas, scaling.initial_replicas, scaling.max_replicas) == (1, 1, 4)
    assert (scaling.target_ongoing_requests, scaling.upscale_delay_s) == (200.0, 1.0)
    assert scaling.policy.is_default_policy_function()


def test_replicas_left_out_are_the_least() -> None:
    assert model(autoscaling=SCALED).replicas == 2
    again = ModelArgs.model_validate(model(autoscaling=SCALED).model_dump(mode="json"))
    assert again.replicas == 2
    assert IngressArgs.model_validate({"autoscaling": SCALED}).replicas == 2


@pytest.mark.parametrize("replicas", [1, 6])
def test_a_start_outside_of_the_range_is_refused_by_field_and_value(replicas: int) -> None:
    with pytest.raises(ValidationError, match=f"replicas is {replicas}.*min_replicas 2.*max_repl"):
        PlatformArgs.model_validate(
            {"models": [{"name": "b", "replicas": replicas, "autoscaling": SCALED}]}
        )
    with pytest.raises(ValidationError, match=f"replicas is {replicas}"):
        IngressArgs.model_validate({"replicas": replicas, "autoscaling": SCALED})


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_replicas 1 < min_replicas 2"):
        model(autoscaling={"min_replicas": 2, "max_replicas": 1})


def test_on_a_cpu_replicas_ask_for_no_share_and_on_a_gpu_for_one_each(tmp_path: Path) -> None:
    base = BaseVersion("b", 1, "b" * 64, "models:/b/1", ("champion",))
    sources = Sources(partial(FolderRegistry, tmp_path), "tests.fakes_engine:open_paced_engine")

    def options(device: str) -> dict[str, object]:
        spec = BaseSpec(base, model(autoscaling=SCALED), device, "base--b")
        deployment = base_application(spec, sources)._bound_deployment
        scaling, found = (
            deployment._deployment_config.autoscaling_config,
            deployment.ray_actor_options,
        )
        assert scaling is not None
        assert found is not None
        assert scaling.max_replicas == 5
        return found

    assert options("cpu")["num_cpus"] == 0
    assert options("cuda")["num_cpus"] == 0.01


def app(
    status: ApplicationStatus = ApplicationStatus.RUNNING, message: str = "", **states: int
) -> ApplicationStatusOverview:
    deployment = DeploymentStatusOverview(
        DeploymentStatus.UPSCALING,
        DeploymentStatusTrigger.AUTOSCALING,
        {ReplicaState(name): count for name, count in states.items()},
        message,
    )
    return ApplicationStatusOverview(status, "", 1.0, {"engine": deployment})


def test_replicas_are_counted_as_they_are() -> None:
    assert count_replicas(None) == ReplicaCounts()
    assert count_replicas(app(RUNNING=2, STARTING=1, STOPPING=3)) == ReplicaCounts(2, 3, 3)
    deleting = app(ApplicationStatus.DELETING, RUNNING=1, STOPPING=2)
    assert count_replicas(deleting) == ReplicaCounts(0, 0, 3)


def test_replicas_without_room_are_told_of_in_words() -> None:
    assert unplaced_replicas(app(message=NO_ROOM, RUNNING=1, STARTING=2)) == (
        '2 of 3 replicas wait for a node with {"GPU": 1.0} free'
    )
    assert unplaced_replicas(app(message=NO_ROOM, RUNNING=3)) == ""  # an outdated message
    assert unplaced_replicas(app(message="", RUNNING=1, STARTING=2)) == ""


def test_metrics_tell_how_many_run_and_how_many_are_wanted() -> None:
    line = BaseLine(
        "b", 1, "running", "", "file", 2, None, None, None, "wait", "app", "d", wanted_replicas=3
    )
    text = StartLog().text([line]).decode()
    assert 'loraplex_replicas{model_name="b",state="running"} 2.0' in text
    assert 'loraplex_replicas{model_name="b",state="wanted"} 3.0' in text
