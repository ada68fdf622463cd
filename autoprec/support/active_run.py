"""The MLflow run that a training has opened itself, if it has: where what happens to its policy is noted."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping


def log_to_active_run(metrics: Mapping[str, float], step: int, tags: Mapping[str, str] | None = None) -> None:
    """Log metrics (finite ones) and tags to the active MLflow run; MLflow is never imported for it."""
    mlflow = sys.modules.get("mlflow")
    if mlflow is None or getattr(mlflow, "active_run", lambda: None)() is None:
        return
    try:
        mlflow.log_metrics({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)
        if tags:
            mlflow.set_tags(dict(tags))
    except Exception:  # a tracking server must never end a training
        logging.getLogger("autoprec").exception("could not log to MLflow")
