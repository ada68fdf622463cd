"""What each trial's run shows in MLflow, from the study's records and its answer alone; nothing here talks to a server.

A row of the table is a policy. Once there is an answer, the row of a policy that was measured again has the figures of
all its paired runs, as the report has them, and every row that is not the answer says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoprec.support.redact import redact_text
from autoprec.support.units import gap_name
from autoprec.tuning.decide.decision import Rules
from autoprec.tuning.decide.noise import Baseline
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import BY_BLOCK, METRICS, Run, pooled

#: Tags of a trial that a person filters by: ``tags.pareto = 'true'``.
TRIAL_TAGS = ("preset", "finalist", "pareto", "best", "infeasible", "pruned", BY_BLOCK)
#: The tag that says why a policy is not the answer.
WHY_NOT = "not_taken"
#: Kinds of records that are a row of the table; further runs of a policy are beneath the study's own run only.
ROWS = ("reference", "preset", "search")
#: A script of less than this share of the 16-bit run's speed is not drawn beside policies.
_NEAR = 0.5
_STATUS = {"ok": "FINISHED", "pruned": "FINISHED", "duplicate": "FINISHED"}


@dataclass(frozen=True, slots=True)
class TrialRun:
    """A trial as MLflow shows it."""

    name: str
    status: str
    params: dict[str, str]
    figures: dict[str, float]
    tags: dict[str, str]


def trial_runs(
    records: Sequence[Run], result: SearchResult | None, info: Mapping[str, Any], study: str
) -> list[TrialRun]:
    """Return the run of each record.

    Args:
        result: the answer; None while the search is at work.
        info: what the study was asked: its limits.
    """
    known = _known_at_end(records, result) if result is not None else {}
    marks = _marks(records, result, info) if result is not None else {}
    return [
        TrialRun(
            name=_name(record, marks.get(index, {}), str(result.budget.get("written", "")) if result else ""),
            status=_STATUS.get(record.status, "FAILED"),
            params=_params(record),
            figures=_figures(record, known.get(index)),
            tags=_tags(record, study) | marks.get(index, {}),
        )
        for index, record in enumerate(records)
    ]


def shown_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of the trials table, in the units people read and rounded to what means something.

    MLflow prints a metric with all its digits, so the table shows these copies: ``gain`` (over the best 16-bit run
    where that is known, else over the script as written; ``gain_low`` and ``gain_high`` bound it where that is known),
    ``step_ms``, ``divergence_pct``, ``memory_gib`` and ``gradient_error_pct``. The metrics they are made of are logged
    beside them, unrounded.
    """
    gain = "speedup_over_16bit" if "speedup_over_16bit" in metrics else "speedup"
    low, high = (metrics.get("intervals") or {}).get(gain, (None, None))
    metrics = {**metrics, "gain_low": low, "gain_high": high}
    parts = (
        *(("gain", gain, 1.0, 2), ("gain_low", "gain_low", 1.0, 2), ("gain_high", "gain_high", 1.0, 2)),
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


def _figures(record: Run, at_end: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics of a trial's run: the record's own, or those that an answer gives its policy.

    The script's divergence is from itself: 0, which says nothing. Without it the script is not drawn in the chart of
    time against divergence, where an fp32 script that takes ten times as long as bf16 would push all policies into one
    corner; a script that comes near the 16-bit run, which is known at the end only, is drawn.
    """
    metrics = record.figures | {"intervals": record.intervals} | dict(at_end or {})
    shown = shown_metrics(metrics)
    if record.kind == "reference" and (at_end is None or metrics.get("speedup_over_16bit", 1.0) < _NEAR):
        shown.pop("divergence_pct", None)
    return _finite({**metrics, **shown, "seconds": record.seconds})


def _params(record: Run) -> dict[str, str]:
    """Return what was decided of a run."""
    return {key.replace("layer:", "layer/", 1): str(value) for key, value in record.params.items()}


def _name(record: Run, marks: Mapping[str, str], written: str) -> str:
    """Return the run name of a trial: its name, a star where it is the answer and, for paired repeats, their seed.

    A script that has autocast is named so, once the answer knows what it is ``written`` in.
    """
    if record.kind == "reference" and written.endswith("autocast"):
        return "the script's own autocast"
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
    rules = Rules(
        float((not result.metric and info.get("max_divergence")) or result.limit or math.inf),
        Baseline(metric=result.metric),
        max_gradient=result.budget.get("gradient_limit"),
        max_memory=info.get("max_memory"),
    )
    out = {}
    for index, record in enumerate(records):
        if record.kind not in ROWS or record.kind == "reference":
            continue
        name, broken = record.name, ""
        if record.ok and name != best:
            broken = result.rejected.get(name) or _broken(known[name], rules)
        why = broken or result.not_taken.get(name, "") or ("" if record.ok else f"{record.status}: {record.reason}")
        marks = {
            "best": name == best and record.ok,
            "pareto": name in front and record.ok and name not in result.rejected,
            "infeasible": bool(broken),
        }
        if not why and name != best:
            slower = record.ok and (known[name].get("speedup") or 0.0) <= (result.best.get("speedup") or 0.0)
            why = "not faster than the answer" if slower and result.verdict == "adopt" else result.verdict
        out[index] = {key: "true" if value else "false" for key, value in marks.items()}
        out[index][WHY_NOT] = redact_text(why)[:4000] if name != best else ""
    return out


def _broken(record: Run, rules: Rules) -> str:
    """Say which limits a policy's figures break, each with its value; empty where they break none."""
    metrics = {"noise_floor": 0.0, **record.figures}
    if not {"divergence", "gradient_error", "memory_bytes"} <= metrics.keys():
        return ""

    def said(name: str) -> str:
        about = METRICS[name]
        label = gap_name(rules.baseline.metric) if name == "divergence" else about.label
        return f"{label} {about.text(metrics[name])}, limit {about.text(rules.bounds[name])}"

    return "; ".join(map(said, rules.exceeded(metrics)))


def _known_at_end(records: Sequence[Run], result: SearchResult) -> dict[int, dict[str, Any]]:
    """Return, by index of its row, the figures of every policy over all its paired runs.

    All gains over 16 bit are over one 16-bit run, the answer's: a trial was reported over it as it was known then.
    """
    plain = _plain_speedup(result)
    found: dict[str, dict[str, Any]] = {}
    for name, run in pooled(records).items():
        over = {"speedup_over_16bit": run["speedup"] / plain} if plain and "speedup" in run.metrics else {}
        found[name] = {"seeds": 1.0} | run.figures | over | {"intervals": run.intervals}
    for row in (result.reference, result.best):
        name = str(row.get("name"))
        found[name] = found.get(name, {}) | {key: row[key] for key in (*METRICS, "seeds", "intervals") if key in row}
    rows: dict[str, int] = {}
    for index, record in enumerate(records):
        if record.kind in ROWS:
            rows.setdefault(record.name, index)
    return {rows[name]: figures for name, figures in found.items() if name in rows}


def _plain_speedup(result: SearchResult) -> float | None:
    """Return the speed-up of the 16-bit run over the script; None where a result has none."""
    rows = (result.best, result.reference, *result.presets)
    known = [row for row in rows if row.get("speedup") and row.get("speedup_over_16bit")]
    return known[0]["speedup"] / known[0]["speedup_over_16bit"] if known else None
