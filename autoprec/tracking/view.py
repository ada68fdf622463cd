"""The page a person lands on: one row per policy, fastest first, and three charts that answer the next questions.

MLflow hides child runs and metric columns by default, and draws a bar chart per metric. A *shared view* (an experiment
tag that its interface reads when the address carries ``viewStateShareKey``) sets filter, order, columns and charts, so
nothing has to be clicked together. Charts: step time against divergence, the loss beside the reference's loss with the
gap between them, and parallel coordinates from what layers run to what that costs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from autoprec.tuning.decide.problem import VARIANT

#: Columns of the trials table, in order, with their widths in pixels; MLflow alone sorts them by name.
COLUMNS = {
    "tags.`best`": 65,
    "tags.`pareto`": 75,
    "tags.`infeasible`": 95,
    "tags.`not_taken`": 220,
    "metrics.`gain`": 75,
    "metrics.`step_ms`": 85,
    "metrics.`seeds`": 70,
    "metrics.`divergence_pct`": 120,
    "metrics.`memory_gib`": 105,
    "metrics.`gradient_error_pct`": 145,
    "tags.`autoprec.kind`": 110,
    "tags.`autoprec.status`": 115,
}
_NAME = "attributes.`Run Name`"
#: Where variants were asked for, and its width.
_VARIANT_COLUMN = {f"params.`{VARIANT}`": 110}
_PREFIX = "mlflow.sharedViewState."
#: Characters that every version of MLflow takes as a tag (its limit was 5,000, and is 8,000).
_LONGEST_TAG = 5000
#: Axes of the parallel coordinates that say what layers run: with more, MLflow's labels overlap.
MOST_PARAMS = 5
#: The section of charts that MLflow adds for every metric; it has to exist to stay folded.
_EVERY_METRIC = "Model metrics"


def share_key(uid: str) -> str:
    """Return the key of a study's view."""
    return f"autoprec{uid[:12]}"


def _filter(study: str) -> str:
    quote_mark = '"' if "'" in study else "'"
    return f"tags.`autoprec.row` = 'policy' AND tags.`autoprec.study` = {quote_mark}{study}{quote_mark}"


def telling_params(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the parameters worth an axis, the variant before layers: the first whose value differs between runs.

    Args:
        runs: parameters of each policy, by the name MLflow has for them.
    """
    names = dict.fromkeys(name for run in runs for name in run)
    found = [name for name in names if len({run[name] for run in runs if name in run}) > 1]
    return sorted(found, key=lambda name: name != VARIANT)[:MOST_PARAMS]


def _chart(kind: str, number: int, **settings: Any) -> dict[str, Any]:
    own = {"type": kind, "uuid": f"autoprec-{number}", "metricSectionId": "autoprec", "runsCountToCompare": 50}
    return {**own, "deleted": False, "isGenerated": False, **settings}


def _line(number: int, *metrics: str) -> dict[str, Any]:
    shown = {"metricKey": metrics[0], "selectedMetricKeys": metrics, "xAxisKey": "step", "yAxisKey": "metric"}
    return _chart("LINE", number, **shown, lineSmoothness=0, scaleType="linear", xAxisScaleType="linear", range={})


def _charts(params: Sequence[str]) -> dict[str, Any]:
    """Return the charts of the page, the most telling first, and their section above MLflow's own."""
    axes = {name: {"key": key, "type": "METRIC"} for name, key in (("xaxis", "step_ms"), ("yaxis", "divergence_pct"))}
    cards = [
        _chart("SCATTER", 1, **axes),
        _line(2, "loss", "reference_loss"),
        _chart("PARALLEL", 3, selectedParams=list(params), selectedMetrics=["gain", "divergence_pct"]),
        _line(4, "loss_gap_pct"),
    ]
    sections = [
        {"uuid": "autoprec", "name": "This search", "display": True, "columns": 2, "cardHeight": 360},
        {"uuid": "autoprec-all", "name": _EVERY_METRIC, "display": False},
    ]
    return {
        "compareRunCharts": cards if params else [card for card in cards if card["type"] != "PARALLEL"],
        "compareRunSections": [{"isReordered": True, "deleted": False, **section} for section in sections],
        "isAccordionReordered": True,  # else MLflow sorts the sections by name
    }


def shared_view(uid: str, study: str, params: Sequence[str] = ()) -> tuple[str, str]:
    """Return the experiment tag (name, value) that holds the view of one study's trials.

    Args:
        params: axes of the parallel coordinates, see :func:`telling_params`; without any there is no such chart.
    """
    columns = (_VARIANT_COLUMN if VARIANT in params else {}) | COLUMNS
    view: dict[str, Any] = {
        "orderByKey": "metrics.`gain`",
        "orderByAsc": False,
        "searchFilter": _filter(study),
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": list(columns),
        "columnOrder": [_NAME, *columns],
        "columnWidths": {_NAME: 300, **columns},
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsVisibilityMap": {},
        "runsHiddenMode": "SHOW_ALL",
        "viewMaximized": False,
        "runListHidden": False,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "groupBy": None,
        "groupsExpanded": {},
        "autoRefreshEnabled": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
        **_charts(params),
    }
    text = json.dumps(view, separators=(",", ":"))
    if len(text) > _LONGEST_TAG and params:  # names of layers can be long
        return shared_view(uid, study, params[:-1])
    return _PREFIX + share_key(uid), text


def trials_url(base: str, experiment_id: str, uid: str, *, charts: bool = False) -> str:
    """Return the address of a study's trials, fastest first.

    Args:
        base: address of the server, e.g. ``http://127.0.0.1:5000``.
        uid: identity of the study.
        charts: the charts beside the list of trials, instead of the table.
    """
    # without the type of workflow MLflow shows its pages for language model applications; a filter or an order in the
    # address would make it ignore the view
    view = f"workflowType=machine_learning&viewStateShareKey={share_key(uid)}"
    page = f"{base.rstrip('/')}/#/experiments/{experiment_id}/runs?{view}"
    return page + ("&compareRunsMode=CHART" if charts else "")
