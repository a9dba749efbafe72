"""An MLflow flavour for adapters, for pipelines that log and register with plain `mlflow` calls.

    info = registry.flavor.log_model("out/pirate", base="smollm2", registered_model_name="pirate")

The `MLmodel` file names the folder of the files and the base, and no code to execute.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from mlflow.models import Model
from mlflow.models.model import ModelInfo

from registry.manifest import MAX_ADAPTER_BYTES, scan_folder

FLAVOR_NAME = "loraplex"
DATA = "files"  # folder of the served files, below the artifacts of a version
ADAPTER_CONFIG = "adapter_config.json"


def describe(model: Model, kind: str, base: str | None) -> Model:
    fields = {"kind": kind, "data": DATA} | ({"base": base} if base is not None else {})
    described: Model = model.add_flavor(FLAVOR_NAME, **fields)
    return described


def save_model(
    adapter_folder: str | Path, path: str | Path, base: str, mlflow_model: Model | None = None
) -> None:
    source = Path(adapter_folder)
    target = Path(path) / DATA
    target.mkdir(parents=True)
    for entry in scan_folder(source, ADAPTER_CONFIG, MAX_ADAPTER_BYTES):
        shutil.copyfile(source / entry.path, target / entry.path)
    describe(mlflow_model or Model(), "adapter", base).save(str(Path(path) / "MLmodel"))


def log_model(
    adapter_folder: str | Path,
    *,
    base: str,
    name: str = "adapter",
    registered_model_name: str | None = None,
) -> ModelInfo:
    """Logs an adapter to MLflow's active experiment and tracking URI, as every `log_model` does."""
    info: ModelInfo = Model.log(
        artifact_path=None,
        name=name,
        flavor=sys.modules[__name__],
        registered_model_name=registered_model_name,
        model_type="lora",
        adapter_folder=str(adapter_folder),
        base=base,
    )
    return info
