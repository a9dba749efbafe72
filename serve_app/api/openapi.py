"""/openapi.json: the public routes with their bodies, responses and errors; /docs shows it as a
page.

The routes of the administration are left out, and vLLM's adapter routes if the configuration turns
them off. The routes parse bodies themselves, without FastAPI, so the schemas are added here, from
the models and structs that parse them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.metadata import version

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from serve_app.api import lora
from serve_app.api.openapi_dialects import DIALECT_SCHEMAS
from serve_app.api.state import state_of
from serve_app.dialects import messages, responses
from serve_app.openai.chat import ChatRequest
from serve_app.openai.completions import CompletionRequest
from serve_app.openai.tokenize import DetokenizeRequest, TokenizeRequest

Schema = dict[str, object]

PATH = "/openapi.json"
router = APIRouter()

_REFERENCES = "#/components/schemas/"
_BODIES: Mapping[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_DIALECT_BODIES: Mapping[str, str] = {
    responses.PATH: "ResponsesRequest",
    messages.PATH: "MessagesRequest",
    messages.COUNT_PATH: "CountTokensRequest",
}
_LORA_BODIES: Mapping[str, type[msgspec.Struct]] = {
    "/v1/load_lora_adapter": lora.LoadBody,
    "/v1/unload_lora_adapter": lora.UnloadBody,
}


def _object(properties: Mapping[str, object], optional: Sequence[str] = ()) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required}


def _nullable(kind: str) -> Schema:
    return {"type": [kind, "null"]}


def _list(items: Mapping[str, object]) -> Schema:
    return {"type": "array", "items": dict(items)}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LOGPROBS = _nullable("object")
_STATUS = _object({"status": _TEXT})
_ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
                "param": _nullable("string"),
                "code": _nullable("string"),
            }
        )
    }
)
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    },
    optional=("completion_tokens_details",),
)
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": _TEXT,
        "parent": _nullable("string"),
        "max_model_len": _nullable("integer"),
    }
)


def _generated(kind: str, content: Mapping[str, object]) -> Schema:
    choice = _object(
        {
            "index": _COUNT,
            **content,
            "logprobs": _LOGPROBS,
            "finish_reason": _nullable("string"),
            "stop_reason": {"type": ["string", "integer", "null"]},
        }
    )
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "system_fingerprint": _TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
        }
    )


_CALL = _object(
    {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": _object({"name": _TEXT, "arguments": _TEXT}),
    }
)
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": _nullable("string"),  # null if there are only tool calls
        "refusal": _nullable("string"),
        "reasoning": _TEXT,
        "reasoning_content": _TEXT,
        "tool_calls": _list(_CALL),
    },
    optional=("reasoning", "reasoning_content", "tool_calls"),
)
_SCHEMAS: Mapping[str, Schema] = {
    "Error": _ERROR,
    **DIALECT_SCHEMAS,
    "ChatCompletion": _generated("chat.completion", {"message": _MESSAGE}),
    "Completion": _generated("text_completion", {"text": _TEXT}),
    "Model": _MODEL,
    "ModelList": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": {"type": ["array", "null"], "items": _TEXT},
        }
    ),
    "Detokenized": _object({"prompt": _TEXT}),
    "TokenizerInfo": {"type": "object"},
    "Status": _STATUS,
    "Version": _object({"version": _TEXT}),
}
# Path -> name of the schema of a successful JSON response.
_RESPONSES: Mapping[str, str] = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/completions": "Completion",
    responses.PATH: "Response",
    messages.PATH: "Message",
    messages.COUNT_PATH: "MessageTokens",
    "/v1/models": "ModelList",
    "/v1/models/{model}": "Model",
    "/tokenize": "Tokens",
    "/detokenize": "Detokenized",
    "/tokenizer_info": "TokenizerInfo",
    "/live": "Status",
    "/health": "Status",
    "/ready": "Status",
    "/version": "Version",
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
    schemas: dict[str, object] = dict(_SCHEMAS)
    paths: dict[str, dict[str, Schema]] = made["paths"]
    for path in _LORA_BODIES if not has_lora else ():
        del paths[path]
    for path, operations in paths.items():
        body = _body(path, schemas)
        for method, operation in operations.items():
            operation["operationId"] = f"{method} {path}"
            operation["responses"] = _responses(path)
            if body is not None:
                operation["requestBody"] = {"required": True, "content": _json(body)}
            if path in _LORA_BODIES:
                operation["security"] = [{"admin_token": []}]
    made["components"] = {"schemas": schemas}
    if has_lora:
        scheme = {"type": "http", "scheme": "bearer"}
        made["components"]["securitySchemes"] = {"admin_token": scheme}
    return made


def _body(path: str, schemas: dict[str, object]) -> str | None:
    """Returns the name of the body's schema after adding it to `schemas`, None without a body."""
    if (model := _BODIES.get(path)) is not None:
        schema = model.model_json_schema(ref_template=_REFERENCES + "{model}")
        schemas |= schema.pop("$defs", {})
        for field in schema["properties"].values():
            field.pop("default", None)  # some are parsed values that are not JSON of the field
        schemas[model.__name__] = schema
        return model.__name__
    if path in _DIALECT_BODIES:
        return _DIALECT_BODIES[path]
    if (struct := _LORA_BODIES.get(path)) is not None:
        _, components = msgspec.json.schema_components(
            (struct,), ref_template=_REFERENCES + "{name}"
        )
        schemas |= components
        return struct.__name__
    return None


def _responses(path: str) -> Schema:
    failed = {"description": "The request was refused or failed.", "content": _json("Error")}
    if path in ("/live", "/health", "/ready"):
        return {
            "200": {"description": "The check passes.", "content": _json("Status")},
            "503": {"description": "The check fails.", "content": _json("Status")},
            "default": failed,
        }
    name = _RESPONSES.get(path)
    if name is None:
        content: Schema = {"text/plain": {"schema": _TEXT}}
    else:
        content = _json(name)
    if path.startswith(messages.PATH):
        failed = {**failed, "content": _json("MessagesError")}
    if name in ("ChatCompletion", "Completion", "Response", "Message"):
        content["text/event-stream"] = {"schema": {**_TEXT, "description": _EVENTS}}
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


def docs_page(document: Mapping[str, object]) -> str:
    """Returns `document`, the content of /openapi.json, as a page without a script.

    The pages of Swagger and Redoc load scripts from a content delivery network: behind a firewall
    they stay empty, and the scripts would run with the rights of this server's pages.
    """
    info = _mapping(document.get("info"))
    title = f"{info.get('title', '')} {info.get('version', '')}"
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
        "<p>Machine-readable: <a href=/openapi.json>/openapi.json</a>. "
        "Schemas are at the end of the page.</p>",
        *_routes(_mapping(document.get("paths"))),
        "<h2>Schemas</h2>",
    ]
    schemas = _mapping(_mapping(document.get("components")).get("schemas"))
    parts += [_folded(f"<code>{escape(name)}</code>", schemas[name]) for name in sorted(schemas)]
    return "".join(parts) + "</html>"


def _routes(paths: Mapping[str, object]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in _mapping(methods).items():
            summary = escape(str(_mapping(operation).get("summary", "")))
            head = f"<b>{escape(method.upper())}</b> <code>{escape(path)}</code> {summary}"
            yield _folded(head, operation)


def _folded(head: str, content: object) -> str:
    text = escape(json.dumps(content, indent=2, ensure_ascii=False))
    return f"<details><summary>{head}</summary><pre>{text}</pre></details>"


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
