"""Autoscaling options for Serve: the product's policy scales the engine replicas of a base, Serve's
own policy scales the ingress replicas by open requests.
"""

from __future__ import annotations

import warnings

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from serve_app.autoscaling.policy import EngineScalingPolicy
from serve_app.config import IngressArgs, ModelArgs

_REPORT_S = 1.0  # how often replicas and handles report; Serve's default of 10 s is too late
_LOOK_BACK_S = 2.0


def engine_scaling(model: ModelArgs) -> AutoscalingConfig | None:
    """Returns None if the base always has `replicas` engine replicas."""
    args = model.autoscaling
    if args is None:
        return None
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function=f"{EngineScalingPolicy.__module__}:{EngineScalingPolicy.__name__}",
        policy_kwargs=args.model_dump(),
    )
    return _config(
        min_replicas=args.min_replicas,
        initial_replicas=model.replicas,
        max_replicas=args.max_replicas,
        policy=policy,
        # The policy applies the delays itself: it can judge which numbers are reliable.
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
        # `metrics_interval_s` is deprecated in favour of variables that Serve does not read yet.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            metrics_interval_s=_REPORT_S,
            look_back_period_s=_LOOK_BACK_S,
            **fields,  # type: ignore[arg-type]
        )
