"""Autoscaling as Serve takes it: of a base's engine replicas by our policy, of ingress replicas by
Serve's own, on open requests.
"""

from __future__ import annotations

import warnings
from dataclasses import asdict

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from serve_app.autoscaling.policy import EngineScalingPolicy, ScalingArgs
from serve_app.config import IngressArgs, ModelArgs

_REPORT_S = 1.0  # how often replicas and handles tell; Serve's default of 10 s is too late
_LOOK_BACK_S = 2.0


def engine_scaling(model: ModelArgs) -> AutoscalingConfig | None:
    """None: `replicas` of them, always."""
    args = model.autoscaling
    if args is None:
        return None
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=f"{EngineScalingPolicy.__module__}:{EngineScalingPolicy.__name__}",
        policy_kwargs=asdict(ScalingArgs(**args.model_dump())),
    )
    return _config(
        min_replicas=args.min_replicas,
        initial_replicas=model.replicas,
        max_replicas=args.max_replicas,
        policy=policy,
        # The delays are in the policy, which knows when a number is to be trusted.
        upscale_delay_s=0.0,
        downscale_delay_s=0.0,
    )


def ingress_scaling(ingress: IngressArgs) -> AutoscalingConfig | None:
    args = ingress.autoscaling
    if args is None:
        return None
    return _config(**args.model_dump(), initial_replicas=ingress.replicas)


def _config(**fields: object) -> AutoscalingConfig:
    with warnings.catch_warnings():
        # `metrics_interval_s` is deprecated for variables that nothing reads yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            metrics_interval_s=_REPORT_S,
            look_back_period_s=_LOOK_BACK_S,
            **fields,  # type: ignore[arg-type]
        )
