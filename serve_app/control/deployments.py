"""The Serve application of a base model: its engine replicas and, behind HAProxy, a placeholder
through which the application is entered."""

from __future__ import annotations

import ray
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.handle import DeploymentHandle

from serve_app.autoscaling.options import engine_scaling
from serve_app.messages import DOOR, ENGINE
from serve_app.platform_view import BaseSpec, Sources
from serve_app.ray_network import keep_to_loopback
from serve_app.replica.deployment import EngineReplica


def base_application(spec: BaseSpec, sources: Sources) -> serve.Application:
    model = spec.model
    # Replica and actor share a node, hence its cache. Ranks are processes of the actor: they share
    # the node, too, and its GPUs are theirs all together or not at all.
    bundle = {"CPU": 0.01, "GPU": float(model.engine.tensor_parallel_size)}
    scaling = engine_scaling(model)
    deployment = serve.deployment(EngineReplica).options(  # type: ignore[attr-defined]
        name=ENGINE,
        num_replicas=model.replicas if scaling is None else None,
        autoscaling_config=scaling,
        max_ongoing_requests=model.max_ongoing_requests,
        max_queued_requests=model.max_queued_requests,
        request_router_config=RequestRouterConfig(
            request_router_class="serve_app.routing.serve_router:LoraplexRouter",  # type: ignore[arg-type]
            request_router_kwargs=model.router.model_dump(),
        ),
        health_check_period_s=model.health_check_period_s,
        graceful_shutdown_timeout_s=model.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        # After two failed starts, waiting requests get the error; the manager retries later.
        max_constructor_retry_count=max(2, model.replicas),
        ray_actor_options={"num_cpus": 0.01 if spec.device == "cuda" else 0},
        # The file's logging_config does not apply to this application: it would log every request.
        logging_config={"enable_access_log": False},
        placement_group_bundles=[bundle] if spec.device == "cuda" else None,
        placement_group_strategy="STRICT_PACK" if spec.device == "cuda" else None,
    )
    application: serve.Application = deployment.bind(spec, sources)
    return _behind_placeholder(application) if RAY_SERVE_ENABLE_HA_PROXY else application


def scale(app_name: str, num_replicas: int) -> None:
    """Sets the number of a running application's engine replicas, as the route `scale` of Serve's
    REST API does: Serve starts others, or drains some; the rest is not touched. Blocks. Raises
    RayTaskError if the application was deployed without `external_scaler_enabled`."""
    client = _get_global_client()
    assert client is not None  # else it has raised
    deployment = DeploymentID(name=ENGINE, app_name=app_name)
    ray.get(client._controller.update_deployment_replicas.remote(deployment, num_replicas))


class Placeholder:
    """Does nothing. With HAProxy, Serve refuses a custom router on the deployment through which an
    application is entered, although this application is not entered over HTTP."""

    def __init__(self, engine: DeploymentHandle[object]) -> None:
        keep_to_loopback()


def _behind_placeholder(engine: serve.Application) -> serve.Application:
    door = serve.deployment(Placeholder).options(  # type: ignore[attr-defined]
        name=DOOR, num_replicas=1, ray_actor_options={"num_cpus": 0}
    )
    application: serve.Application = door.bind(engine)
    return application
