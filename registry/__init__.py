"""MLflow: register, resolve names, verified local copies. No torch, no Ray.

MLflow reads these when it is imported, so they are set here, before any module of the room can
import it: a server of models reports to nobody, and its log is ours. What the user has set stays.
"""

from __future__ import annotations

import os

for _name, _value in (
    ("MLFLOW_DISABLE_TELEMETRY", "true"),  # otherwise: a config from the internet at each start
    ("MLFLOW_LOGGING_LEVEL", "WARNING"),
    ("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"),
):
    os.environ.setdefault(_name, _value)
