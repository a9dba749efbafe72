"""`serve run configs/quickstart.yaml` comes in here: arguments -> the `api` Serve application.

The application is the ingress and the manager; the manager makes one more application a base.
No `from __future__ import annotations` here: Serve turns the file's `args` into PlatformArgs only
if the annotation of `build` is the class itself and not its name.
"""

from functools import partial

from ray.serve import Application

from serve_app.config import (
    PlatformArgs,
    artifact_root,
    artifact_schemes,
    cache_folder,
    check_routers,
    default_home,
    tracking_uri,
)
from serve_app.ingress import ingress_application
from serve_app.manager import manager_application
from serve_app.topology import Sources, open_named


def build(args: PlatformArgs) -> Application:
    check_routers(args)  # here, where the file is read: the manager imports no class of a router
    return build_with(args, sources(args, "engine.factory:open_engine"))


def sources(args: PlatformArgs, engine_factory: str) -> Sources:
    """The configured registry. `engine_factory`: see `Sources`."""
    registry = args.registry
    open_registry = partial(
        open_named,
        "serve_app.cached_registry:CachedRegistry",
        tracking_uri(registry),
        cache_folder(),
        registry.cache_bytes,
        artifact_root(registry),
        artifact_schemes(registry),
    )
    return Sources(open_registry, engine_factory, default_home())


def build_with(args: PlatformArgs, sources: Sources) -> Application:
    """With another registry or engine behind the same interfaces."""
    return ingress_application(args.ingress, args.fairness, manager_application(args, sources))
