"""The page a person lands on: the study's trials in MLflow, sorted by speed, with their metrics as columns.

MLflow hides child runs and metric columns by default. A *shared view* (an experiment tag that its interface reads
when the address carries ``viewStateShareKey``) sets filter, order and columns, so nothing has to be clicked together.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

__all__ = ["COLUMNS", "share_key", "shared_view", "trials_url"]

#: Columns of the trials table, in order.
COLUMNS = (
    "tags.`best`",
    "tags.`pareto`",
    "metrics.`gain`",
    "metrics.`step_ms`",
    "metrics.`divergence_pct`",
    "metrics.`memory_gib`",
    "metrics.`gradient_error_pct`",
    "tags.`autoprec.kind`",
    "tags.`autoprec.status`",
)
_PREFIX = "mlflow.sharedViewState."


def share_key(uid: str) -> str:
    """Return the key of a study's view."""
    return f"autoprec{uid[:12]}"


def _filter(study: str) -> str:
    quote_mark = '"' if "'" in study else "'"
    return f"tags.`autoprec.row` = 'policy' AND tags.`autoprec.study` = {quote_mark}{study}{quote_mark}"


def shared_view(uid: str, study: str) -> tuple[str, str]:
    """Return the experiment tag (name, value) that holds the view of one study's trials."""
    view: dict[str, Any] = {
        "orderByKey": "metrics.`gain`",
        "orderByAsc": False,
        "searchFilter": _filter(study),
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(COLUMNS),
        "columnOrder": [],
        "columnWidths": {},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "FIRST_20_RUNS",
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    return _PREFIX + share_key(uid), json.dumps(view, separators=(",", ":"))


def trials_url(base: str, experiment_id: str, *, uid: str = "") -> str:
    """Return the address of a study's trials table, sorted by speed, fastest first.

    Args:
        base: address of the server, e.g. ``http://127.0.0.1:5000``.
        experiment_id: the experiment.
        uid: identity of the study; without it the table shows every study's trials with default columns.
    """
    page = f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs"
    if uid:  # MLflow ignores a shared view when the address also carries a filter or an order
        return f"{page}?viewStateShareKey={share_key(uid)}"
    condition = "tags.`autoprec.role` = 'trial'"
    return (
        f"{page}?searchFilter={quote(condition)}&orderByKey={quote('metrics.`speedup`')}&orderByAsc=false&startTime=ALL"
    )
