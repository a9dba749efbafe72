"""GET /console and its assets, from package data.

The assets are modules that import each other by relative names. Their address contains a hash of
all of them, so that a browser keeps them for ever and never mixes two releases; the page itself is
revalidated on each visit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from serve_app.errors import ApiError

router = APIRouter(include_in_schema=False)

_TYPES = {
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "svg": "image/svg+xml",
}
_FOLDER = Path(__file__).with_name("static")
_INDEX = "index.html"
_PLACE = b"{assets}"  # in the page, where the address of the assets belongs
# No inline script or style, no other origin, no frame: text of a model that were to become markup
# could still run no code.
_POLICY = "; ".join(
    (
        "default-src 'self'",
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'", "object-src 'none'"),
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Assets:
    digest: str
    index: bytes
    files: dict[str, bytes]  # by path


@cache
def load_assets() -> Assets:
    """Reads all files once: 200 KB."""
    found = {
        path.relative_to(_FOLDER).as_posix(): path.read_bytes()
        for path in _FOLDER.rglob("*")
        if path.suffix[1:] in _TYPES
    }
    whole = hashlib.sha256()
    for path, content in sorted(found.items()):
        whole.update(b"%s\0%d\0%s" % (path.encode(), len(content), content))
    digest = whole.hexdigest()[:16]
    # Relative, so that a gateway may serve everything below a prefix.
    index = found.pop(_INDEX).replace(_PLACE, f"console/assets/{digest}".encode())
    return Assets(digest, index, found)


@router.get("/console")
async def console(request: Request) -> Response:
    """Returns the page that loads the console."""
    assets = load_assets()
    tag = f'"{assets.digest}"'
    headers = _HEADERS | {"cache-control": "no-cache", "etag": tag}
    given = request.headers.get("if-none-match", "")
    if tag in (one.strip().removeprefix("W/") for one in given.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(assets.index, headers=headers, media_type=_TYPES["html"])


@router.get("/console/")
async def slashed() -> Response:
    """Leads to the page, whose relative links are wrong here. Relative, as they are."""
    return Response(status_code=308, headers=_HEADERS | {"location": "../console"})


@router.get("/console/assets/{path:path}")
async def asset(path: str) -> Response:
    """Returns a file of this release; 404 for a file of another."""
    assets = load_assets()
    digest, _, name = path.partition("/")
    content = assets.files.get(name) if digest == assets.digest else None
    kind = _TYPES.get(name.rpartition(".")[2])
    if content is None or kind is None:
        raise ApiError(
            404, "This release has no such file; load the console again.", code="not_found"
        )
    headers = _HEADERS | {"cache-control": "public, max-age=31536000, immutable"}
    return Response(content, headers=headers, media_type=kind)
