"""Addresses that are given where a folder is needed: MLflow's, the Hugging Face Hub's, URIs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from registry.errors import InvalidNameError
from registry.names import check_model_id

# A path has lost all but one of the slashes that follow the colon.
_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.+)")
_OF_MLFLOW = frozenset({"runs", "models", "mlflow-artifacts"})
_HUB_SCHEME, _HUB_SITE = "hf", "huggingface.co/"

Kind = Literal["base", "adapter"]


def describe_missing(path: Path, kind: Kind) -> str:
    """Returns what a path that does not exist is otherwise, and the command that fetches it: the
    rest of a sentence that begins with the path."""
    given = str(path)
    uri = _URI.fullmatch(given)
    if uri is None:
        hub_id = _hub_id(given)
        if path.suffix.lower() == ".gguf" or not hub_id:
            return "does not exist"
        return f"does not exist; if it is a repository of the Hugging Face Hub: {_hub(hub_id)}"
    scheme, rest = uri[1].lower(), uri[2]
    if scheme == "file":
        return f"is a URI, and a folder is needed: /{unquote(rest)}"
    hub_id = _hub_id(rest.removeprefix(_HUB_SITE))
    if hub_id and (scheme == _HUB_SCHEME or rest.startswith(_HUB_SITE)):
        return f"is a repository of the Hugging Face Hub, and a folder is needed: {_hub(hub_id)}"
    if scheme in _OF_MLFLOW:
        return f"is an address of MLflow's, and a folder is needed: {_mlflow(scheme, rest, kind)}"
    return "is a URI, and a folder is needed: fetch its files, then register their folder"


def _hub_id(text: str) -> str:
    """Returns "" for what is no ORGANISATION/NAME."""
    try:
        return check_model_id(text)
    except InvalidNameError:
        return ""


def _hub(hub_id: str) -> str:
    return f"`hf download {hub_id} --local-dir FOLDER`, then register FOLDER"


def _mlflow(scheme: str, rest: str, kind: Kind) -> str:
    address = f"mlflow-artifacts:///{rest}" if scheme == "mlflow-artifacts" else f"{scheme}:/{rest}"
    words = (
        f"`mlflow artifacts download -u {address} -d FOLDER`, then register the folder that it "
        "prints"
    )
    if kind == "adapter":
        words += (
            ". Without registering, a model version of this registry is served if its source is "
            "the folder with adapter_config.json and its tag loraplex.base names the base"
        )
    return words
