"""The one table of all routes and the scope that a caller needs for each, where keys are on.

    open         anybody: probes, documents, and the webhook, which checks a signature of its own
    any          any valid key
    infer, load, admin:read, admin    a key with this scope; the admin token has all of them

A path that is not in the table is closed to everybody: a new route has to be entered here.
"""

from __future__ import annotations

import re
from typing import Literal

from starlette.routing import compile_path

from serve_app.tenancy.caller import Scope

Access = Scope | Literal["open", "any"]

_INFER: tuple[Access, Access] = ("infer", "infer")
_ADMIN: tuple[Access, Access] = ("admin:read", "admin")
_OPEN: tuple[Access, Access] = ("open", "open")

# By the route's pattern: the scope of GET and HEAD, and that of all other methods.
ROUTES: dict[str, tuple[Access, Access]] = {
    "/live": _OPEN,
    "/health": _OPEN,
    "/ready": _OPEN,
    "/version": _OPEN,
    "/openapi.json": _OPEN,
    "/docs": _OPEN,
    "/v1/registry/webhook": _OPEN,
    "/console": _OPEN,  # the page and its files are the same for everybody
    "/console/": _OPEN,
    "/console/assets/{path:path}": _OPEN,
    "/console/session": _OPEN,  # the rights of the caller, which may be none
    "/console/login": _OPEN,
    "/console/logout": _OPEN,
    "/metrics": _ADMIN,
    "/v1/chat/completions": _INFER,
    "/v1/completions": _INFER,
    "/v1/responses": _INFER,
    "/v1/responses/{response_id}": _INFER,
    "/v1/messages": _INFER,
    "/v1/messages/count_tokens": _INFER,
    "/tokenize": _INFER,
    "/detokenize": _INFER,
    "/tokenizer_info": _INFER,
    "/v1/models": ("any", "any"),
    "/v1/models/{model:path}": ("any", "any"),
    "/v1/load_lora_adapter": ("load", "load"),
    "/v1/unload_lora_adapter": ("load", "load"),
    "/admin/status": _ADMIN,
    "/admin/drain": _ADMIN,
    "/admin/route": ("admin:read", "admin:read"),  # a POST that changes nothing
    "/admin/decisions": _ADMIN,
    "/admin/audit": _ADMIN,
    "/admin/usage": _ADMIN,
    "/admin/series": _ADMIN,
    "/admin/registry": _ADMIN,
    "/admin/adapters": _ADMIN,
    "/admin/adapters/{name}/pin": _ADMIN,
    "/admin/adapters/{name}/unpin": _ADMIN,
    "/admin/adapters/{name}/preload": _ADMIN,
    "/admin/adapters/{name}/evict": _ADMIN,
    "/admin/bases": _ADMIN,
    "/admin/bases/{name}": _ADMIN,
    "/admin/bases/{name}/sleep": _ADMIN,
    "/admin/bases/{name}/wake": _ADMIN,
    "/admin/canaries": _ADMIN,
    "/admin/canaries/{adapter}": _ADMIN,
    "/admin/canaries/{adapter}/promote": _ADMIN,
    "/admin/canaries/{adapter}/abort": _ADMIN,
    "/key/generate": _ADMIN,
    "/key/update": _ADMIN,
    "/key/delete": _ADMIN,
    "/key/regenerate": _ADMIN,
    "/key/list": _ADMIN,
    "/key/info": ("any", "admin"),  # without admin:read about the caller's own key only
    "/key/usage": ("any", "admin"),  # about the caller's own key
}
_PATTERNS: tuple[tuple[re.Pattern[str], tuple[Access, Access]], ...] = tuple(
    (compile_path(path)[0], access) for path, access in ROUTES.items() if "{" in path
)


def required(method: str, path: str) -> Access | None:
    """Returns the access that a request needs; None: there is no such route."""
    found = ROUTES.get(path)
    if found is None:
        found = next((access for pattern, access in _PATTERNS if pattern.match(path)), None)
    if found is None:
        return None
    return found[0] if method in ("GET", "HEAD") else found[1]
