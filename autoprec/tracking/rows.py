"""What each trial's run shows in MLflow, from the study's records and its answer alone; nothing here talks to a server.

A row of the table is a policy. Once there is an answer, the row of a policy that was measured again has the figures of
all its paired runs, as the report has them, those of its first run beside them as ``first_run/...``, and every row that
is not the answer says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoprec.support.redact import redact_text
from autoprec.tuning.limits import Limits
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import BY_BLOCK, METRICS, Run, pooled

#: Tags of a trial that a person filters by: ``tags.pareto = 'true'``.
TRIAL_TAGS = ("preset", "finalist", "pareto", "best", "infeasible", "pruned", BY_BLOCK)
#: The tag that says why a policy is not the answer.
WHY_NOT = "not_taken"
#: Kinds of records that are a row of the table; further runs of a policy are beneath the study's own run only.
ROWS = ("reference", "preset", "search")
#: Before the figures of a policy's first run where its row has those of all its paired runs.
FIRST_RUN = "first_run/"
#: A script of less than this share of the 16-bit run's speed is not drawn beside policies.
_NEAR = 0.5
_STATUS = {"ok": "FINISHED", "pruned": "FINISHED", "duplicate": "FINISHED"}


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial as MLflow shows it: ``figures`` are the record's own, ``final`` what the answer added or changed."""

    name: str
    status: str
    params: dict[str, str]
    figures: dict[str, float]
    tags: dict[str, str]
    final: dict[str, float] = field(default_factory=dict)


def trial_runs(
    records: Sequence[Run], result: SearchResult | None, info: Mapping[str, Any], study: str
) -> list[TrialRun]:
    """Return the run of each record.

    Args:
        result: the answer; None while the search is at work.
        info: what the study was asked: its limits.
    """
    final = _final_figures(records, result) if result is not None else {}
    marks = _marks(records, result, info) if result is not None else {}
    return [
        TrialRun(
            name=_name(record, marks.get(index, {})),
            status=_STATUS.get(record.status, "FAILED"),
            params={key.replace("layer:", "layer/", 1): str(value) for key, value in record.params.items()},
            figures=_own_figures(record),
            tags=_tags(record, study) | marks.get(index, {}),
            final=final.get(index, {}),
        )
        for index, record in enumerate(records)
    ]


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the trials table, in the units people read and rounded to what means something.

    MLflow prints a metric with all its digits, so the table shows these copies: ``gain`` (over the best 16-bit run
    where that is known, else over the script as written), ``step_ms``, ``divergence_pct``, ``memory_gib`` and
    ``gradient_error_pct``. The metrics they are made of are logged beside them, unrounded.
    """
    parts = (
        ("gain", "speedup_over_16bit" if "speedup_over_16bit" in metrics else "speedup", 1.0, 2),
        ("step_ms", "step_time_ms", 1.0, 1 if (metrics.get("step_time_ms") or 0.0) >= 100.0 else 2),
        ("divergence_pct", "divergence", 100.0, 3),
        ("memory_gib", "memory_bytes", 2.0**-30, 2),
        ("gradient_error_pct", "gradient_error", 100.0, 2),
    )
    return {
        name: round(factor * metrics[source], digits)
        for name, source, factor, digits in parts
        if source in _finite(metrics)
    }


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float)) and math.isfinite(v)}


def _reference_figures(metrics: Mapping[str, Any], *, drawn: bool = True) -> dict[str, float]:
    """Return the script's figures of the table, once it is known how it compares with the 16-bit run.

    Its divergence is from itself: 0, which says nothing. Without it the script is not drawn in the chart of time
    against divergence, where an fp32 script that takes ten times as long as bf16 would push all policies into one
    corner; a script that comes near the 16-bit run is drawn.
    """
    shown = shown_metrics(metrics)
    if not drawn or metrics.get("speedup_over_16bit", 1.0) < _NEAR:
        shown.pop("divergence_pct", None)
    return shown


def _own_figures(record: Run) -> dict[str, float]:
    # whether the script is drawn among policies is known at the end only
    reference = record.kind == "reference"
    shown = _reference_figures(record.figures, drawn=False) if reference else shown_metrics(record.figures)
    return _finite({**record.figures, **shown, "seconds": record.seconds})


def _name(record: Run, marks: Mapping[str, str]) -> str:
    """Return the run name of a trial: its name, a star where it is the answer and, for paired repeats, their seed."""
    seed = (f" (seed {record.seed})" if record.seed else " (whole model)") if record.kind == "finalist" else ""
    star = "\N{BLACK STAR} " if marks.get("best") == "true" else ""
    return f"{star}{record.name or record.kind}{seed}"[:250]


def _tags(record: Run, study: str) -> dict[str, str]:
    tags = {
        "autoprec.role": "trial",
        "autoprec.row": "policy" if record.kind in ROWS else "run",
        "autoprec.study": study,
        "autoprec.kind": record.kind,
        "autoprec.name": record.name,
        "autoprec.number": str(record.number),
        "autoprec.seed": str(record.seed),
        "autoprec.status": record.status,
    }
    if record.reason:
        tags["autoprec.reason"] = redact_text(record.reason)[:4000]
    if record.sources:
        modelled = sorted(name for name, source in record.sources.items() if source == "modelled")
        tags["autoprec.modelled"] = ", ".join(modelled) or "nothing: all measured"
    present = {*record.tags, *({record.kind} & {"preset", "finalist"}), *({record.status} & {"pruned"})}
    return tags | {name: "true" if name in present else "false" for name in TRIAL_TAGS}


def _marks(records: Sequence[Run], result: SearchResult, info: Mapping[str, Any]) -> dict[int, dict[str, str]]:
    """Return, by index, the tags that are known only with the answer: best, on the front, infeasible, and why not."""
    front, best = {row.get("name") for row in result.front}, result.best.get("name")
    known = pooled(records)
    limits = Limits(
        float(info.get("max_divergence") or result.budget.get("max_divergence") or math.inf),
        math.inf,
        info.get("max_memory"),
    )
    out = {}
    for index, record in enumerate(records):
        if record.kind not in ROWS or record.kind == "reference":
            continue
        name, broken = record.name, ""
        if record.ok and name != best:
            broken = result.rejected.get(name) or _broken(known[name], limits, result.budget)
        why = broken or result.not_taken.get(name, "") or ("" if record.ok else f"{record.status}: {record.reason}")
        marks = {
            "best": name == best and record.ok,
            "pareto": name in front and record.ok and name not in result.rejected,
            "infeasible": bool(broken),
        }
        if not why and name != best:
            slower = record.ok and (known[name].get("speedup") or 0.0) <= (result.best.get("speedup") or 0.0)
            why = "slower than the answer" if slower and result.verdict == "adopt" else result.verdict
        out[index] = {key: "true" if value else "false" for key, value in marks.items()}
        out[index][WHY_NOT] = redact_text(why)[:4000] if name != best else ""
    return out


def _broken(record: Run, limits: Limits, budget: Mapping[str, Any]) -> str:
    """Say which limits a policy's figures break, each with its value; empty where they break none."""
    metrics, most = {"noise_floor": 0.0, **record.figures}, budget.get("gradient_limit")
    if not {"divergence", "gradient_error", "memory_bytes"} <= metrics.keys():
        return ""
    bounds = limits.bounds(most)

    def said(name: str) -> str:
        about = METRICS[name]
        return f"{about.label} {about.text(metrics[name])}, limit {about.text(bounds[name])}"

    return "; ".join(map(said, limits.exceeded(metrics, most)))


def _final_figures(records: Sequence[Run], result: SearchResult) -> dict[int, dict[str, float]]:
    """Return, by index, the figures that became known after a policy's trial.

    Those of a policy that was measured again are over all its paired runs. The script's gain over 16 bit is known once
    a 16-bit run was measured; without it an fp32 script would show 1.00 beside the 1.00 of bf16, ten times as fast.
    """
    rows: dict[str, int] = {}
    for index, record in enumerate(records):
        if record.kind in ROWS:
            rows.setdefault(record.name, index)
    plain, best = _plain_speedup(result), str(result.best.get("name"))
    several: dict[str, Mapping[str, Any]] = {}
    final: dict[str, dict[str, float]] = {}
    for name, record in pooled(records).items():
        metrics = dict(record.figures)
        if plain:
            metrics["speedup_over_16bit"] = metrics.get("speedup", math.nan) / plain
        shown = shown_metrics(metrics)
        if "seeds" in metrics:
            several[name], final[name] = metrics, shown | {"seeds": metrics["seeds"]}
        else:  # the 16-bit run was not measured yet at its trial, or not as well
            final[name] = {key: shown[key] for key in ("gain",) if key in shown}
    seeds = float(result.best.get("seeds") or 1)
    if seeds > 1:
        several[best] = result.best
    final[best] = shown_metrics(result.best) | {"seeds": seeds}
    final[str(result.reference.get("name"))] = _reference_figures(result.reference)
    return {
        rows[name]: figures | _of_all_runs(_own_figures(records[rows[name]]), several.get(name, {}))
        for name, figures in final.items()
        if name in rows
    }


def _plain_speedup(result: SearchResult) -> float | None:
    """Return the speed-up of the 16-bit run over the script; None where a result has none."""
    rows = (result.best, result.reference, *result.presets)
    known = [row for row in rows if row.get("speedup") and row.get("speedup_over_16bit")]
    return known[0]["speedup"] / known[0]["speedup_over_16bit"] if known else None


def _of_all_runs(own: Mapping[str, float], figures: Mapping[str, Any]) -> dict[str, float]:
    """Return a policy's figures over all its runs by the names its first run had them, and that run's own as such."""
    shown = shown_metrics(figures)
    out: dict[str, float] = {}
    for name, value in _finite(figures).items():
        if name in own and name not in shown and value != own[name]:
            out |= {name: value, f"{FIRST_RUN}{name}": own[name]}
    return out
