"""/openapi.json: the public routes with their bodies, responses and errors; /docs shows it as a
page.

The routes of the administration are left out, and vLLM's adapter routes if the configuration turns
them off. The routes parse bodies themselves, without FastAPI, so the schemas are added here, from
the models and structs that parse them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from html import escape
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from serve_app.api import lora
from serve_app.api.openapi_schemas import SCHEMAS, TEXT, Schema
from serve_app.api.state import state_of
from serve_app.dialects import messages, responses
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest

PATH = "/openapi.json"
router = APIRouter()

_REFERENCES = "#/components/schemas/"
_LORA_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
Body = type[BaseModel] | str
# Path -> the class of the body or the name of its schema, and the name of the answer's schema; None
# for no body, and for an answer as text.
_ROUTES: Mapping[str, tuple[Body | None, str | None]] = {
    "/v1/chat/completions": (ChatRequest, "ChatCompletion"),
    "/v1/completions": (CompletionRequest, "Completion"),
    responses.PATH: ("ResponsesRequest", "Response"),
    messages.PATH: ("MessagesRequest", "Message"),
    messages.COUNT_PATH: ("CountTokensRequest", "MessageTokens"),
    "/v1/models": (None, "ModelList"),
    "/v1/models/{model}": (None, "Model"),
    "/tokenize": (TokenizeRequest, "Tokens"),
    "/detokenize": (DetokenizeRequest, "Detokenized"),
    "/tokenizer_info": (None, "TokenizerInfo"),
    "/live": (None, "Status"),
    "/health": (None, "Status"),
    "/ready": (None, "Status"),
    "/version": (None, "Version"),
    _LORA_PATHS[0]: (lora.LoadBody, None),
    _LORA_PATHS[1]: (lora.UnloadBody, None),
}
_EVENTS = "If stream is true: server-sent events with JSON data, as in the API of the endpoint."


@router.get(PATH, include_in_schema=False)
async def openapi(request: Request) -> Response:
    return Response(msgspec.json.encode(_document_of(request)), media_type="application/json")


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    return HTMLResponse(docs_page(_document_of(request)))


def _document_of(request: Request) -> Schema:
    has_lora = state_of(request).args.allow_runtime_lora_updating
    app: FastAPI = request.app
    if app.openapi_schema is None:  # made once: 20 ms
        app.openapi_schema = document(app, has_lora=has_lora)
    return app.openapi_schema


def document(app: FastAPI, *, has_lora: bool) -> Schema:
    """Returns the document. `has_lora`: vLLM's adapter routes are on."""
    with warnings.catch_warnings():
        # A route with GET and HEAD has one id for both; each operation gets another below.
        warnings.filterwarnings("ignore", message="Duplicate Operation ID")
        made = get_openapi(title="loraplex", version=version("loraplex"), routes=app.routes)
    schemas = dict(SCHEMAS)
    paths: dict[str, dict[str, Schema]] = made["paths"]
    for path in _LORA_PATHS if not has_lora else ():
        del paths[path]
    for path, operations in paths.items():
        body, answer = _ROUTES.get(path, (None, None))
        name = body if body is None or isinstance(body, str) else _add_body(body, schemas)
        for method, operation in operations.items():
            operation["operationId"] = f"{method} {path}"
            operation["responses"] = _responses(path, answer)
            if name is not None:
                operation["requestBody"] = {"required": True, "content": _json(name)}
            if path in _LORA_PATHS:
                operation["security"] = [{"admin_token": []}]
    made["components"] = {"schemas": schemas}
    if has_lora:
        scheme = {"type": "http", "scheme": "bearer"}
        made["components"]["securitySchemes"] = {"admin_token": scheme}
    return made


def _add_body(kind: type[BaseModel], schemas: dict[str, Schema]) -> str:
    """Adds the schema of a body to `schemas`. Returns its name."""
    schema = kind.model_json_schema(ref_template=_REFERENCES + "{model}")
    schemas |= schema.pop("$defs", {})
    for field in schema["properties"].values():
        field.pop("default", None)  # some are parsed values that are not JSON of the field
    schemas[kind.__name__] = schema
    return kind.__name__


def _responses(path: str, name: str | None) -> Schema:
    """`name`: of the answer's schema."""
    error = "MessagesError" if path.startswith(messages.PATH) else "Error"
    failed = {"description": "The request was refused or failed.", "content": _json(error)}
    if name == "Status":
        return {
            "200": {"description": "The check passes.", "content": _json("Status")},
            "503": {"description": "The check fails.", "content": _json("Status")},
            "default": failed,
        }
    content: Schema = {"text/plain": {"schema": TEXT}} if name is None else _json(name)
    if name in ("ChatCompletion", "Completion", "Response", "Message"):
        content["text/event-stream"] = {"schema": {**TEXT, "description": _EVENTS}}
    return {"200": {"description": "The request succeeded.", "content": content}, "default": failed}


def _json(name: str) -> Schema:
    return {"application/json": {"schema": {"$ref": _REFERENCES + name}}}


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "summary{cursor:pointer;padding:.3rem 0}code,pre{font:14px/1.4 ui-monospace,monospace}"
    "pre{background:#f4f4f4;padding:1rem;overflow:auto}b{display:inline-block;min-width:4.5rem}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}pre{background:#222}"
    "a{color:#8cf}}"
)


def docs_page(document: Mapping[str, Any]) -> str:
    """Returns `document`, the content of /openapi.json, as a page without a script.

    The pages of Swagger and Redoc load scripts from a content delivery network: behind a firewall
    they stay empty, and the scripts would run with the rights of this server's pages.
    """
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
        "<p>Machine-readable: <a href=/openapi.json>/openapi.json</a>. "
        "Schemas are at the end of the page.</p>",
        *_routes(document["paths"]),
        "<h2>Schemas</h2>",
    ]
    schemas = document["components"]["schemas"]
    parts += [_folded(f"<code>{escape(name)}</code>", schemas[name]) for name in sorted(schemas)]
    return "".join(parts) + "</html>"


def _routes(paths: Mapping[str, Mapping[str, Schema]]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            summary = escape(str(operation.get("summary", "")))
            head = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code> {summary}"
            yield _folded(head, operation)


def _folded(head: str, content: object) -> str:
    text = escape(json.dumps(content, indent=2, ensure_ascii=False))
    return f"<details><summary>{head}</summary><pre>{text}</pre></details>"
