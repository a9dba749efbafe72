"""The rules of a caller's key: the models that it may name, and the bounds of its requests.

A name that is unknown and a name that the key may not use get the same answer, before anything is
woken or loaded. Callers without a key (`tenancy.enabled` is false) may name all models.
"""

from __future__ import annotations

from starlette.types import Receive

from engine.errors import InvalidRequestError
from registry.catalog import Resolution
from registry.errors import NotFoundError, RefusedVersionError, RegistryUnavailableError
from registry.names import parse_model, split_adapters
from serve_app.api.model_list import names_of
from serve_app.api.state import IngressState, view_of
from serve_app.dispatch.base_handle import Route
from serve_app.dispatch.gateway import Gateway
from serve_app.errors import ApiError, ClientGoneError, ServiceUnavailableError, shown, to_api_error
from serve_app.openai.engine_params import GenerationRequest
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest
from serve_app.platform_view import PlatformView
from serve_app.tenancy.caller import Caller

_LENGTHS = ("max_completion_tokens", "max_tokens")


def check_model(gateway: Gateway, caller: Caller | None, model: str) -> None:
    """Raises NotFoundError if the key may not use the model, or one of several adapters in it, or
    if there is no such model.

    A split between two versions counts as the stable version: a canary is its operator's choice.
    The reason why a version is refused is for keys that may use it alone.
    """
    if caller is None:
        return
    view = view_of(gateway)
    try:
        found = [one for one, _ in view.catalog.resolve_each(model)]
        is_allowed = all(caller.policy.allows(names_of(one)) for one in found)
    except RefusedVersionError:
        if _allows_refused(caller, view, model):
            raise
        is_allowed = False
    except NotFoundError:
        is_allowed = False
    if not is_allowed:
        raise unknown(view, model)


def check_route(
    state: IngressState, caller: Caller | None, model: str, route: Route
) -> Caller | None:
    """Checks again when the wait for a base has ended: the key may be revoked or changed meanwhile,
    and the name may mean another version. Returns the caller with its present policy. Raises
    ApiError with 401 for a key that has ended, NotFoundError for a model that it may not use."""
    if caller is None:
        return None
    if state.authenticator is not None:
        caller = state.authenticator.present(caller)
    if route.arm is not None:  # the route may be the canary's
        check_model(state.gateway, caller, model)
    elif not _allows(caller, route.resolution):
        raise unknown(view_of(state.gateway), model)
    return caller


async def find_route(
    state: IngressState, caller: Caller | None, model: str, receive: Receive
) -> Route:
    """Returns the route of a request that needs a base's text side alone: the base is started if it
    sleeps, and not kept awake. Raises as `check_model`, `ColdStarts.admit` and `check_route`."""
    check_model(state.gateway, caller, model)
    route, leave = await state.cold_starts.admit(model, receive)
    leave()
    check_route(state, caller, model, route)
    return route


def _allows(caller: Caller, resolution: Resolution) -> bool:
    """Returns True if the key may use the model, and of several adapters each."""
    each = [Resolution(resolution.base, (one,)) for one in resolution.adapters]
    return all(caller.policy.allows(names_of(one)) for one in each or [resolution])


def _allows_refused(caller: Caller, view: PlatformView, model: str) -> bool:
    """Returns True if the key may use a refused adapter, whose base is not known: its globs match
    the adapter's name, and together with a base if the request names one."""
    (name, _), *more = split_adapters(view.catalog.registered(model))
    first, second = parse_model(name)
    groups = [(first.name, str(first))]
    if second is not None:
        pair = f"{first.name}:{second.name}", f"{first.name}:{second}"
        groups = [(second.name, str(second)), pair]
    return not more and all(caller.policy.allows(names) for names in groups)


def unknown(view: PlatformView, model: str) -> Exception:
    """Returns the error for a model that does not exist as far as a key is concerned."""
    if view.registry_error is not None:  # it may be new there
        return RegistryUnavailableError("The model registry is unreachable.")
    return NotFoundError(
        f"The model {shown(model)} does not exist, or this API key may not use it."
    )


def name_digests(error: Exception, resolution: Resolution | None) -> Exception:
    """Returns the error; if it is an engine's about the adapters of the request, with their names
    in place of their digests, which are all that the engine knows."""
    if resolution is None or not isinstance(error, InvalidRequestError):
        return error
    words = error.message
    for one in resolution.adapters:
        words = words.replace(one.version.digest, repr(one.version.name))
    return error if words == error.message else InvalidRequestError(words, error.param)


def name_adapters(
    gateway: Gateway,
    caller: Caller | None,
    body: GenerationRequest | TokenizeRequest | DetokenizeRequest | None,
    error: Exception,
) -> Exception:
    """Returns the error; if it is about the field `adapters` and not about the base that `model`
    names, with that field."""
    if body is None or not body.adapters or isinstance(error, ClientGoneError):
        return error
    found = to_api_error(error)
    if found.param != "model" or not _is_base(gateway, caller, body.model):
        return error
    status, message, kind, _, *others = found.args
    return ApiError(status, message, kind, "adapters", *others)


def _is_base(gateway: Gateway, caller: Caller | None, model: str | None) -> bool:
    """Returns True if the name alone is that of a base that the caller may use."""
    try:
        name = gateway.only_model() if model is None else model
        check_model(gateway, caller, name)
        gateway.resolve(name)
    except ServiceUnavailableError:  # it exists and is not ready
        return True
    except Exception:
        return False
    return True


def check_adapter(caller: Caller | None, base: str, adapter: str) -> None:
    """Raises ApiError with 403 if the key may not load an adapter of this name for this base."""
    if caller is not None and not caller.policy.allows((adapter, f"{base}:{adapter}")):
        raise ApiError(
            403,
            f"lora_name: this API key may not load {shown(adapter)} for that base.",
            param="lora_name",
            code="model_not_allowed",
        )


def check_body(caller: Caller | None, body: GenerationRequest) -> None:
    """Raises InvalidRequestError if the request asks for more than the key allows."""
    if caller is None:
        return
    floor, most = caller.policy.lowest_priority, caller.policy.max_tokens
    # A request without a priority gets one that the key allows: `ClientRequest.priority`.
    if floor is not None and body.priority is not None and body.priority < floor:
        raise InvalidRequestError(
            f"priority: must be {floor} at least with this API key, got {body.priority}.",
            "priority",
        )
    if most is None:
        return
    # A length that the client left open, or that its API cuts, is cut by `engine_requests`.
    fields = ["min_tokens"] if body.cuts_max_tokens else [*_LENGTHS, "min_tokens"]
    for field in fields:
        value: int | None = getattr(body, field, None)
        if value is not None and value > most:
            raise InvalidRequestError(
                f"{field}: must be {most} at most with this API key, got {value}.", field
            )
