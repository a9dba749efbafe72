"""/docs: the OpenAPI document as one page of HTML, without a script and without the internet.

The pages of Swagger and Redoc load scripts from a content delivery network: behind a firewall they
stay empty, and the scripts would run with the rights of this server's pages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "summary{cursor:pointer;padding:.3rem 0}code,pre{font:14px/1.4 ui-monospace,monospace}"
    "pre{background:#f4f4f4;padding:1rem;overflow:auto}b{display:inline-block;min-width:4.5rem}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}pre{background:#222}"
    "a{color:#8cf}}"
)


def docs_page(document: Mapping[str, object]) -> str:
    """Returns the page of `document`, the content of /openapi.json."""
    info = _object(document.get("info"))
    title = f"{info.get('title', '')} {info.get('version', '')}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
        "<p>Machine-readable: <a href=/openapi.json>/openapi.json</a>. "
        "Schemas are at the end of the page.</p>",
        *_routes(_object(document.get("paths"))),
        "<h2>Schemas</h2>",
    ]
    schemas = _object(_object(document.get("components")).get("schemas"))
    parts += [_folded(f"<code>{escape(name)}</code>", schemas[name]) for name in sorted(schemas)]
    return "".join(parts) + "</html>"


def _routes(paths: Mapping[str, object]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in _object(methods).items():
            summary = escape(str(_object(operation).get("summary", "")))
            head = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code> {summary}"
            yield _folded(head, operation)


def _folded(head: str, content: object) -> str:
    text = escape(json.dumps(content, indent=2, ensure_ascii=False))
    return f"<details><summary>{head}</summary><pre>{text}</pre></details>"


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
