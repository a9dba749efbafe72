"""`docs/configuration.md`, from the pydantic models in `serve_app/config`.

A key's description is the string below its field, which Python itself throws away: it is read from
the source, so that no process pays for it at its start.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serve_app.config import STEP_LIMITS, PlatformArgs
from serve_app.config.values import AliasName, Args, Bytes, HostName, Origin
from tests.docs.markdown import GENERATED, table

SECTIONS = (
    *("models", "registry", "ingress", "fairness", "canary", "tenancy"),
    *("metrics", "logging", "traces"),
)
# How annotated types read; pydantic has taken them apart in FieldInfo.
NAMES: tuple[tuple[Any, str], ...] = (
    (Bytes, "size"),
    (AliasName, "alias"),
    (HostName, "host name"),
    (Origin, "origin"),
)
INTRODUCTION = """
# Configuration

One Ray Serve config file configures the server; `configs/quickstart.yaml` and
`configs/two_bases.yaml` are examples. The keys below stand under `args` of the application whose
`import_path` is `serve_app.app:build`. An unknown key, a value of the wrong type and a value out of
bounds are errors that name the key; `loraplex serve FILE` checks the file before anything starts.
A base added at run time takes the same keys: `loraplex bases add NAME --engine KEY=VALUE`.

A *size* is a number of bytes or a string with a unit: `1048576`, `512MiB`, `4GB`. Names that end in
`_s` are seconds. Numbers are at most 2^31 - 1; sizes and `seed` at most 2^63 - 1.
"""
ENVIRONMENT = """
## Environment variables

| variable | meaning |
| --- | --- |
| `LORAPLEX_HOME` | The folder of the embedded registry, the cache, the logs and the admin token. By default `~/.loraplex`. |
| `LORAPLEX_ADMIN_TOKEN` | The bearer token of `/admin` and of the runtime LoRA endpoints, which are off without it. `loraplex serve` keeps one in `LORAPLEX_HOME/admin_token`. |
| `MLFLOW_TRACKING_URI` | The registry, if `registry.tracking_uri` is not set. By default SQLite in the home. |
| `LORAPLEX_ARTIFACT_ROOT` | `registry.artifact_root` for commands that read no file. |
| `LORAPLEX_ARTIFACT_SCHEMES` | `registry.artifact_schemes` for commands that read no file, separated by commas. |
| `LORAPLEX_API_KEY` | The key that `loraplex chat`, `bench` and `models --url` send. |
| `LORAPLEX_DATABASE_URL` | The database of keys, if `tenancy.database_url` is not set. |
| `LORAPLEX_KEY_PEPPER` | The pepper of the hashes of keys, at least 32 characters. By default the file `key_pepper` in the home. |
| `LORAPLEX_WEBHOOK_SECRET` | The secret with which an MLflow server signs its calls of `/v1/registry/webhook`. |
| `LORAPLEX_LOG_FORMAT` | `text` or `json`; `loraplex serve --log-format` sets it. |
| `LORAPLEX_FRONT_LIMITS` | `args.ingress` as JSON, for Serve's proxies; `loraplex serve` sets it. |
| `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` | `serve_app.http.front:middlewares` puts the limits of headers, bodies and slow readers into Serve's proxies; `loraplex serve` sets it. |
"""  # noqa: E501


def configuration_page() -> str:
    parts = [GENERATED, INTRODUCTION]
    for name in SECTIONS:
        model = _models_of(PlatformArgs.model_fields[name].annotation)[0]
        parts += list(_sections(name + ("[]" if name == "models" else ""), model))
    limits = "; ".join(
        f"{device}: " + ", ".join(f"`{key}` {value}" for key, value in sorted(values.items()))
        for device, values in STEP_LIMITS.items()
    )
    parts += [f"\nDefaults of a step's limits by device: {limits}.\n", ENVIRONMENT]
    return "".join(parts)


def descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Returns the strings below the fields of a model and of its bases, by field."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, Args) or cls is Args:
            continue
        body = _class_body(cls)
        for field, below in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def _class_body(cls: type) -> list[ast.stmt]:
    tree = ast.parse(Path(inspect.getfile(cls)).read_text())
    (node,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls.__name__]
    return node.body


def _sections(path: str, model: type[BaseModel]) -> Iterator[str]:
    """The table of a model's own keys, then those of the models in it."""
    words = descriptions(model)
    inner: list[tuple[str, type[BaseModel]]] = []
    rows = []
    for name, field in model.model_fields.items():
        if found := _models_of(field.annotation):
            inner.append((name, found[0]))
            if field.default is not None:
                continue
        rows.append(
            (f"`{name}`", _type(model, name, field), _default(name, field), words.get(name, ""))
        )
    yield f"\n## `{path}`\n\n{inspect.cleandoc(model.__doc__ or '')}\n\n"
    yield table(("key", "type", "default", "meaning"), rows)
    for name, below in inner:
        yield from _sections(f"{path}.{name}", below)


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_of(part)]


def _type(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    hints = inspect.get_annotations(_owner(model, name), eval_str=True)
    words = _words(hints[name])
    bounds = "" if ", " in words or words == "size" else _bounds(field.metadata)
    return f"{words}, {bounds}" if bounds else words


def _owner(model: type[BaseModel], name: str) -> type:
    return next(cls for cls in model.__mro__ if name in inspect.get_annotations(cls))


def _words(hint: Any) -> str:
    for known, name in NAMES:
        if hint == known:
            return name
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        bounds = _bounds([one for part in metadata for one in getattr(part, "metadata", [part])])
        return f"{_words(inner)}, {bounds}" if bounds else _words(inner)
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple:
        return f"list of {_words(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        key, value = get_args(hint)
        return f"mapping of {_words(key)} to {_words(value)}"
    if inspect.isclass(hint) and issubclass(hint, BaseModel):
        return "mapping, see below"
    plain = {str: "text", int: "integer", float: "number", bool: "boolean", Path: "path"}
    return plain.get(hint, str(hint))


def _bounds(metadata: list[Any]) -> str:
    signs = {Ge: ("ge", "≥"), Gt: ("gt", ">"), Le: ("le", "≤"), Lt: ("lt", "<")}
    return ", ".join(
        f"{sign} {getattr(one, attribute):g}"
        for one in metadata
        for kind, (attribute, sign) in signs.items()
        if isinstance(one, kind)
    )


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1024 and value % 1024 == 0 and name.endswith("_bytes"):
        unit, size = ("MiB", 1024**2) if value % 1024**2 == 0 else ("KiB", 1024)
        return f"{value // size} {unit}"
    if isinstance(value, tuple | dict):
        return "empty" if not value else str(value)
    return f"`{value}`" if isinstance(value, str) else f"{value:g}"
