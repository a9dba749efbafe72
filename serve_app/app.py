"""The entry point of `serve run configs/quickstart.yaml`: arguments -> the `api` Serve application.

The application is the ingress and the manager; the manager starts another application per base.
No `from __future__ import annotations` here: Serve turns the file's `args` into PlatformArgs only
if the annotation of `build` is the class itself and not its name.
"""

from functools import partial

import ray
from ray.serve import Application
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions, ProxyLocation

from serve_app.api.ingress import ingress_application
from serve_app.config import (
    PlatformArgs,
    artifact_root,
    artifact_schemes,
    cache_folder,
    check_routers,
    default_home,
    tracking_uri,
)
from serve_app.control.manager import manager_application
from serve_app.observe.observer import ObserveArgs
from serve_app.platform_view import Sources, open_named
from serve_app.serve_file import called_by, refusal


def build(args: PlatformArgs) -> Application:
    """Returns the application. Raises ValueError if Serve listens for other machines and neither
    keys nor a gateway are configured: the deployment then fails with that reason."""
    host = _http_host()
    if host is not None and (why := refusal(host, args)) is not None:
        raise ValueError(why)
    check_routers(args)  # here, while the file is read: the manager never imports a router's class
    if host is not None:
        args = args.model_copy(update={"ingress": called_by(args.ingress, host)})
    return build_with(args, sources(args, "engine.factory:open_engine"))


def _http_host() -> str | None:
    """Returns the host of Serve's proxies; None if there are none or Serve does not run yet."""
    if not ray.is_initialized():
        return None
    try:
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
    except ValueError:
        return None
    location: object = ray.get(controller.get_proxy_location.remote())
    options: HTTPOptions = ray.get(controller.get_http_config.remote())
    return None if location == ProxyLocation.Disabled else options.host


def sources(args: PlatformArgs, engine_factory: str) -> Sources:
    """Returns the sources with the configured registry. `engine_factory`: see `Sources`."""
    registry = args.registry
    open_registry = partial(
        open_named,
        "serve_app.control.cached_registry:CachedRegistry",
        tracking_uri(registry),
        cache_folder(),
        registry.cache_bytes,
        artifact_root(registry),
        artifact_schemes(registry),
    )
    return Sources(open_registry, engine_factory, default_home(), args.metrics.to_ray)


def build_with(args: PlatformArgs, sources: Sources) -> Application:
    """Returns the application with any registry and engine behind the same interfaces."""
    manager = manager_application(args, sources)
    observe = ObserveArgs(args.metrics, args.logging, args.traces)
    return ingress_application(args.ingress, args.fairness, args.tenancy, manager, observe)
