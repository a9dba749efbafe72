"""The model registry in MLflow: registration, name resolution, verified local copies. No torch, no
Ray.

MLflow reads these variables when it is imported, so they are set here, before any module of the
package can import it: a model server sends no telemetry and has a single log. Variables that the
user has set stay.
"""

from __future__ import annotations

import os

for _name, _value in (
    ("MLFLOW_DISABLE_TELEMETRY", "true"),  # otherwise it downloads a config at each start
    ("MLFLOW_LOGGING_LEVEL", "WARNING"),
    ("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"),
):
    os.environ.setdefault(_name, _value)
