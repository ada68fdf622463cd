"""Why each kind of layer got its precision, and which decisions mattered: facts from the tables and the trials.

Nothing here decides; it reads what the decision used, as the finished trials left it. Facts are rows with a sentence
each; equal layers of all blocks that got the same choice are one row. Errors are relative gradient errors, in units of
the mini-batch gradient noise where that is known; times are of the target, measured or modelled as the tables are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from autoprec.policy.solver import FloatTable
from autoprec.policy.space import Choice
from autoprec.tuning.decide.problem import Params, Problem, layer_key
from autoprec.tuning.decide.sampler.posterior import DivergenceModel, LinearModel
from autoprec.tuning.decide.sampler.prior import LayerTime, divergence_model, features_of, points_of
from autoprec.tuning.decide.table import SensitivityTable, families
from autoprec.tuning.study.run import Run, error_text

#: What a choice has to gain of a group's time to be called faster: as much as the fit leaves of one run's time.
_FASTER = 0.01
#: Posterior standard deviations from which on the effect of a parameter is told from noise: with some ten values of
#: parameters to look at, two would call one of them important in every third search.
SIGNIFICANT = 3.0

#: Rows that are kept of each list: a person reads no more.
MOST_REASONS, MOST_DECISIONS = 40, 8
#: Decisions below this share of both variances are left out: what noise explains has a share of zero.
LEAST_SHARE = 0.005
#: Standard deviations from a share to the end of its 95 % interval.
_TWO_SIDED95 = 1.96

Row = dict[str, Any]


def explain_layers(
    problem: Problem,
    params: Params,
    time_ms: FloatTable,
    table: SensitivityTable,
    whole_ms: float | None = None,
    limit: float | None = None,
    tried: Collection[tuple[int, int]] = (),
) -> list[Row]:
    """Return why each group runs what it runs, a row per group in model order.

    ``saved_ms`` is its time against the baseline's, ``gradient_error`` what it adds by itself, ``error_share`` its part
    of the whole policy's squared error; ``text`` says it in one sentence. ``untried`` names the next faster choice
    where nothing is known against it but that no policy that was measured had it.

    Args:
        time_ms: ``[G, C]`` time of each group under each choice.
        whole_ms: what the whole policy saves of a step, measured; what the groups save is no more in all. None where
            times are modelled, and add up by themselves.
        limit: the largest relative gradient error of a whole policy; None where there is none.
        tried: (position of a group, of a choice) of every policy that was measured.
    """
    index = problem.indices(params)
    base = [_reference(problem, group.choices) for group in problem.groups]
    times = [float(time_ms[g, base[g]] - time_ms[g, index[g]]) for g in range(len(index))]
    together = sum(times)
    scale = 1.0 if whole_ms is None or together <= 0 else min(1.0, max(0.0, whole_ms) / together)
    about = "" if whole_ms is None else "about "
    rows = np.arange(len(index))
    total = float(table.error2[rows, index].sum()) + table.parameter_error2(problem, params)
    refused = {(group, choice): why for group, choice, why in problem.refused}
    out = []
    for g, group in enumerate(problem.groups):
        here = problem.choice_names[int(index[g])]
        reference = problem.choice_names[base[g]]
        error = math.sqrt(float(table.error2[g, index[g]]))
        saved = times[g] * scale
        other = _next_faster(time_ms[g], int(index[g]))
        other_name = problem.choice_names[other] if other is not None else ""
        other_error = math.sqrt(float(table.error2[g, other])) if other is not None else 0.0
        share = float(table.error2[g, index[g]]) / total if total > 0 else 0.0
        why_not = next((why for (name, _), why in refused.items() if name == group.name), "")
        changed = total + other_error**2 - error**2
        whole = table.misfit.ratio * math.sqrt(max(0.0, changed))
        known = (g, other) in tried
        tail = _tail(other_name, other_error, whole, limit, table.noise, known=known)
        text = _sentence(here, reference, saved, about, error, share, tail, table.noise, why_not, group.choices)
        row = {"layers": group.name, "count": len(group.layers), "choice": here, "saved_ms": saved}
        open_ = other_name if not known and limit is not None and whole <= limit else ""
        out.append(row | {"gradient_error": error, "error_share": share, "text": text, "untried": open_})
    return out


def _reference(problem: Problem, choices: Sequence[str]) -> int:
    """Return the choice that a group's gain is given over."""
    return problem.choice_names.index(problem.baseline if problem.baseline in choices else choices[0])


def _next_faster(times: FloatTable, chosen: int) -> int | None:
    """Return the slowest choice that is still faster than the chosen one: the next step down in precision."""
    least = _FASTER * abs(float(times[chosen])) + 1e-12 if math.isfinite(times[chosen]) else 0.0
    faster = [c for c in np.flatnonzero(np.isfinite(times)) if times[c] < times[chosen] - least]
    return int(max(faster, key=lambda c: times[c])) if faster else None


def _amount(error: float, noise: float | None) -> str:
    if not math.isfinite(error):
        return "a gradient that is not finite"
    return error_text(error, noise)


def _sentence(
    here: str,
    reference: str,
    saved: float,
    about: str,
    error: float,
    share: float,
    tail: str,
    noise: float | None,
    refused: str,
    choices: Sequence[str],
) -> str:
    if len(choices) == 1:
        return f"{here}: nothing else to choose" + (f" ({refused})" if refused else "")
    if here == reference:
        return f"{here}: {tail or 'nothing offered is faster here'}"
    adds = f"adds an error of {_amount(error, noise)} ({share:.0%} of the policy's)"
    if saved <= 0:  # what is adopted is the policy, which was measured as a whole
        more = f"expected to be {about}{-saved:.3g} ms slower than {reference}" if saved else f"gains no time, {adds}"
        more += f", {adds}" if saved else ""
        return f"{here}: {more}; no better policy that was measured has another choice here"
    text = f"{here}: saves {about}{saved:.3g} ms of a step against {reference}, {adds}"
    return f"{text}; {tail or 'nothing offered is faster'}"


def _tail(other: str, error: float, whole: float, limit: float | None, noise: float | None, *, known: bool) -> str:
    """Return why the next faster choice was not taken; empty where nothing is faster.

    Args:
        other, error: the choice, and the gradient error that it adds by itself.
        whole: the gradient error of the policy with that choice.
        known: a policy with that choice was measured.
    """
    if not other:
        return ""
    text = f"{other} would be faster but add an error of {_amount(error, noise)}"
    if not math.isfinite(error) or limit is None:
        return text
    if whole > limit:
        return f"{text}: {100 * whole:.3g} % in all, beyond the limit of {100 * limit:.3g} %"
    return (
        f"{other} is expected to be faster and adds an error of {_amount(error, noise)}, within the limit in all; "
        + ("no better policy that was measured has it" if known else "it was not tried in any policy")
    )


def importance(problem: Problem, divergence: DivergenceModel, time: LinearModel, records: Sequence[Run]) -> list[Row]:
    """Return how much each decision moves time and divergence, everything else at its average: rows, largest first.

    ``time_share`` and ``error_share`` are parts of the variance of step time and of ln(divergence) that a random point
    of the space would show; they sum to 1 over all decisions. ``error_sd`` is the standard deviation of the latter, by
    what the runs leave open of the table.

    The variance of each decision's effect, by the models of :func:`fitted`, is taken over its values with equal weight.
    Of parameters nothing is known but what the trials
    showed, and with a dozen trials under one paired seed some parameter always seems to matter: an effect that is not
    several times its own uncertainty is noise, and counts as none. Of a layer's choices those are taken that a run of
    such layers has shown to its end: one that nothing was trained under has moved nothing.
    """
    features = features_of(problem)
    (squares, _, worse), (learned, _, effects) = divergence.law(), time.mean()
    shown = np.zeros(problem.allowed.shape, dtype=bool)
    for record in records:
        if record.ok:
            shown[np.arange(len(shown)), problem.indices(record.params)] = True
    for kind in families(problem):
        shown[kind] = shown[kind].any(axis=0)
    mean_error2 = float(np.where(np.isfinite(squares), squares, 0.0).mean(axis=1).sum()) or 1.0
    raw: dict[str, tuple[float, float]] = {}
    for g, group in enumerate(problem.groups):
        if len(group.choices) > 1:
            kept = problem.allowed[g] & np.isfinite(squares[g])
            told = squares[g, kept & shown[g]]
            raw[layer_key(group.name)] = (
                float(np.var(learned[g, kept])),
                float(np.var(0.5 * told / mean_error2)) if len(told) else 0.0,
            )
    later = _significant(effects, time.parameter_sd())
    worse = _significant(worse, divergence.parameter_sd())
    for name in problem.parameters:
        own = [k for k, (feature, _) in enumerate(features) if feature == name]
        raw[name] = (float(np.var([0.0, *later[own]])), float(np.var([0.0, *worse[own]])))
    widths = {layer_key(problem.groups[g].name): sd for g, sd in enumerate(divergence.entry_sd(squares))}
    rows: list[Row] = []
    time_total, error_total = (sum(pair[k] for pair in raw.values()) or 1.0 for k in (0, 1))
    for name, (moved, erred) in raw.items():
        share = erred / error_total
        sd = share * (1 - share) * widths.get(name, 0.0)
        rows.append({"name": name, "time_share": moved / time_total, "error_share": share, "error_sd": sd})
    return sorted(rows, key=lambda row: -(row["time_share"] + row["error_share"]))


def _significant(effects: FloatTable, uncertainty: FloatTable) -> FloatTable:
    """Return effects ``[K]`` with those that noise explains set to zero."""
    return np.where(np.abs(effects) > SIGNIFICANT * uncertainty, effects, 0.0)


def fitted(
    problem: Problem, time_ms: FloatTable, table: SensitivityTable, records: Sequence[Run]
) -> tuple[DivergenceModel, LinearModel]:
    """Return the models that the sampler uses, of divergence and time, fitted to trials and starting from tables."""
    divergence = divergence_model(problem, table.error2)
    time = LinearModel(time_ms, 0.0, np.zeros(len(features_of(problem))), noise=0.01)
    done = [record for record in records if record.ok]
    points = points_of(problem, [record.params for record in done], partial(table.parameter_error2, problem))
    gaps, times = (np.array([r[name] for r in done], dtype=np.float64) for name in ("divergence", "step_time_ms"))
    divergence.fit(points, gaps, np.zeros(len(done), dtype=np.int64))
    time.fit(points, times)
    return divergence, time


def explanation(
    problem: Problem,
    layer_time_ms: LayerTime,
    table: SensitivityTable,
    trials: Sequence[Run],
    params: Params,
    whole_ms: float | None = None,
    limit: float | None = None,
) -> dict[str, Any]:
    """Return the reasons behind a point as plain data.

    Args:
        layer_time_ms: modelled milliseconds of a layer (by name) under a plan and an autocast dtype.
        trials: what was tried, failures included.
        whole_ms: what it saves of a step against the baseline, measured; None where times are modelled.
        limit: the largest relative gradient error of a whole policy; None where there is none.

    Returns:
        ``layers``: one mapping per kind of layer and choice (``layers``, ``count``, ``choice``, ``saved_ms``,
        ``gradient_error``, ``error_share``, ``text``), those that save most first; ``importance``: one mapping per
        decision (``name``, ``time_share``, ``error_share``, ``error_sd``), the most important first.
    """
    finished = [record for record in trials if _finite(record)]
    divergence, time = fitted(problem, _modelled_times(problem, layer_time_ms), table, finished)
    tried = {(g, int(c)) for run in finished if run.params for g, c in enumerate(problem.indices(run.params))}
    reasons = explain_layers(problem, params, time.mean()[0], table, whole_ms, limit, tried)
    decisions = importance(problem, divergence, time, finished)
    return {
        "layers": merged(reasons)[:MOST_REASONS],
        "importance": [
            {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
            for row in decisions[:MOST_DECISIONS]
            if max(row["time_share"], row["error_share"]) >= LEAST_SHARE
        ],
    }


def is_sure(row: Mapping[str, Any]) -> bool:
    """Say whether a decision's share of what moves divergence is surely above zero (95 %)."""
    return float(row["error_share"]) > _TWO_SIDED95 * float(row.get("error_sd", 0.0))


def _kind(name: str) -> str:
    """Return a layer's name without the numbers of its blocks."""
    return re.sub(r"\d+", "*", name)


def merged(rows: Sequence[Row]) -> list[Row]:
    """Return one row per kind of group and choice: savings add, errors add in quadrature."""
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((_kind(row["layers"]), row["choice"]), []).append(row)
    out: list[Row] = []
    for (name, _), same in kinds.items():
        error = math.sqrt(sum(row["gradient_error"] ** 2 for row in same))
        # the sentence of the one that adds most: where the choice is most in question
        most = max(same, key=lambda row: row["gradient_error"])
        out.append(
            most
            | {
                "layers": same[0]["layers"] if len(same) == 1 else f"{name} ({len(same)})",
                "count": sum(row["count"] for row in same),
                "saved_ms": round(sum(row["saved_ms"] for row in same), 6),
                "gradient_error": float(f"{error:.4g}") if math.isfinite(error) else None,
                "error_share": round(sum(row["error_share"] for row in same), 4),
            }
        )
    return sorted(out, key=lambda row: -row["saved_ms"])


def stay_explanation(rows: Sequence[Mapping[str, Any]], baseline: str) -> dict[str, Any]:
    """Return why each kind of layer stays as it is where no trial was needed to say so.

    Args:
        rows: one per tunable layer, as in :attr:`autoprec.cost.verdict.Verdict.rows`.
        baseline: the choice that they are judged against, and stay in.

    Returns:
        What :func:`explanation` returns: the kinds that take most of the step first, no decision called important.
    """
    kinds: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((_kind(row["name"]), row["best"], row["blocked"]), []).append(row)
    out = []
    for (name, best, _), same in sorted(kinds.items(), key=lambda kind: -sum(row["baseline_ms"] for row in kind[1])):
        largest = max(same, key=lambda row: row["baseline_ms"])
        text = str(largest["reason"])
        if largest["gain_ms"] > 0:
            text = f"{best} would save {largest['gain']:.0%} of it, too little of the step to matter"
        out.append(
            {
                "layers": largest["name"] if len(same) == 1 else f"{name} ({len(same)})",
                "count": len(same),
                "choice": baseline,
                "saved_ms": 0.0,
                "gradient_error": None,
                "error_share": 0.0,
                "text": text,
            }
        )
    return {"layers": out[:MOST_REASONS], "importance": []}


def as_evidence(reasons: dict[str, Any]) -> dict[str, Any]:
    """Return the reasons as sentences for a policy's evidence: ``why`` by layers, ``mattered`` by decision."""
    why: dict[str, str] = {}
    for row in reasons.get("layers", ()):
        name = row["layers"] if row["layers"] not in why else f"{row['layers']} {row['choice']}"
        share = f"; together {row['saved_ms']:.3g} ms and {row['error_share']:.0%} of the error"
        why[name] = row["text"] + (share if row["layers"].endswith(")") and row["saved_ms"] else "")
    mattered = {
        d["name"].removeprefix("layer:"): f"{d['time_share']:.0%} of what moves time"
        + (f", {error_share(d)} of divergence" if is_sure(d) else "")
        for d in reasons.get("importance", ())
        if d["time_share"] >= LEAST_SHARE or is_sure(d)
    }
    return {name: value for name, value in (("why", why), ("mattered", mattered)) if value}


def error_share(decision: Mapping[str, Any]) -> str:
    """Return a decision's share of what moves divergence, with its standard deviation; no figure that may be zero."""
    if not is_sure(decision):
        return "an unknown share"
    share, sd = float(decision["error_share"]), float(decision.get("error_sd", 0.0))
    return f"{share:.0%} ± {sd:.0%}" if sd >= 0.005 else f"{share:.0%}"


def _finite(record: Run) -> bool:
    return record.ok and all(math.isfinite(record[name]) for name in ("divergence", "step_time_ms"))


def _modelled_times(problem: Problem, layer_time_ms: LayerTime) -> FloatTable:
    """Return ``[G, C]`` milliseconds by the cost model."""
    recipes = problem.space.all_recipes
    activations = str(problem.value(problem.params_of(problem.baseline), "activations"))
    plans = {name: Choice.parse(name).plan(recipes) for name in problem.choice_names}
    return np.asarray(
        problem.table(lambda g, c: sum(layer_time_ms(layer, plans[c], activations) for layer in g.layers))
    )
