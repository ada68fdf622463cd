"""Why each layer got its precision, and which decisions mattered: facts from the tables and the trials, as sentences.

Nothing here decides; it reads what the decision used. Errors are relative gradient errors, in units of the mini-batch
gradient noise where that is known; times are of the target, measured or modelled as the tables are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autoprec.policy.solver import FloatTable
from autoprec.tuning.decide.problem import Params, Problem, layer_key
from autoprec.tuning.decide.sampler.posterior import DivergenceModel, LinearModel
from autoprec.tuning.decide.sampler.prior import divergence_model, features_of, points_of
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.study.run import Run, error_text

#: What a choice has to gain of a group's time to be called faster: as much as the fit leaves of one run's time.
_FASTER = 0.01
#: Posterior standard deviations from which on the effect of a parameter is told from noise: with some ten values of
#: parameters to look at, two would call one of them important in every third search.
SIGNIFICANT = 3.0


@dataclass(frozen=True, slots=True)
class LayerReason:
    """Why one group runs what it runs.

    ``saved_ms`` is its time against the baseline's, ``gradient_error`` what it adds by itself, ``error_share`` its part
    of the whole policy's squared error; ``text`` says it in one sentence.
    """

    group: str
    layers: tuple[str, ...]
    choice: str
    saved_ms: float
    gradient_error: float
    error_share: float
    text: str


def explain_layers(
    problem: Problem,
    params: Params,
    time_ms: FloatTable,
    table: SensitivityTable,
    whole_ms: float | None = None,
    limit: float | None = None,
) -> list[LayerReason]:
    """Return one reason per group, in model order.

    Args:
        time_ms: ``[G, C]`` time of each group under each choice.
        whole_ms: what the whole policy saves of a step, measured; what the groups save is no more in all. None where
            times are modelled, and add up by themselves.
        limit: the largest relative gradient error of a whole policy; None where there is none.
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
        tail = _tail(other_name, other_error, table.misfit.ratio * math.sqrt(max(0.0, changed)), limit, table.noise)
        text = _sentence(here, reference, saved, about, error, share, tail, table.noise, why_not, group.choices)
        out.append(LayerReason(group.name, group.layers, here, saved, error, share, text))
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


def _tail(other: str, error: float, whole: float, limit: float | None, noise: float | None) -> str:
    """Return why the next faster choice was not taken; empty where nothing is faster.

    Args:
        other, error: the choice, and the gradient error that it adds by itself.
        whole: the gradient error of the policy with that choice.
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
        "no better policy that was measured has it"
    )


@dataclass(frozen=True, slots=True)
class Importance:
    """How much one decision moves the two objectives over the values it may take, everything else at its average.

    ``time_share`` and ``error_share`` are parts of the variance of step time and of ln(divergence) that a random point
    of the space would show; they sum to 1 over all decisions. ``error_sd`` is the standard deviation of the latter, by
    what the runs leave open of the table.
    """

    name: str
    time_share: float
    error_share: float
    error_sd: float = 0.0


def importance(
    problem: Problem, time_ms: FloatTable, table: SensitivityTable, records: Sequence[Run]
) -> list[Importance]:
    """Return the importance of every group and parameter, largest first.

    The models that the sampler uses are fitted to the finished trials, starting from the tables; the variance of each
    decision's effect is taken over its values with equal weight. Of parameters nothing is known but what the trials
    showed, and with a dozen trials under one paired seed some parameter always seems to matter: an effect that is not
    several times its own uncertainty is noise, and counts as none.
    """
    features = features_of(problem)
    divergence, time = _fitted(problem, time_ms, table, records)
    (squares, _, worse), (learned, _, effects) = divergence.law(), time.mean()
    mean_error2 = float(np.where(np.isfinite(squares), squares, 0.0).mean(axis=1).sum()) or 1.0
    raw: dict[str, tuple[float, float]] = {}
    for g, group in enumerate(problem.groups):
        if len(group.choices) > 1:
            kept = problem.allowed[g] & np.isfinite(squares[g])
            raw[layer_key(group.name)] = (
                float(np.var(learned[g, kept])),
                float(np.var(0.5 * squares[g, kept] / mean_error2)),
            )
    later = _significant(effects, time.parameter_sd())
    worse = _significant(worse, divergence.parameter_sd())
    for name in problem.parameters:
        own = [k for k, (feature, _) in enumerate(features) if feature == name]
        raw[name] = (float(np.var([0.0, *later[own]])), float(np.var([0.0, *worse[own]])))
    widths = {layer_key(problem.groups[g].name): sd for g, sd in enumerate(divergence.entry_sd(squares))}
    return [replace(d, error_sd=d.error_share * (1 - d.error_share) * widths.get(d.name, 0.0)) for d in _shares(raw)]


def _significant(effects: FloatTable, uncertainty: FloatTable) -> FloatTable:
    """Return effects ``[K]`` with those that noise explains set to zero."""
    return np.where(np.abs(effects) > SIGNIFICANT * uncertainty, effects, 0.0)


def learned_times(problem: Problem, time_ms: FloatTable, table: SensitivityTable, records: Sequence[Run]) -> FloatTable:
    """Return ``[G, C]`` milliseconds as the finished trials corrected them; differences within a row are meant."""
    _, time = _fitted(problem, time_ms, table, records)
    return time.mean()[0]


def _fitted(
    problem: Problem, time_ms: FloatTable, table: SensitivityTable, records: Sequence[Run]
) -> tuple[DivergenceModel, LinearModel]:
    divergence = divergence_model(problem, table.error2)
    time = LinearModel(time_ms, 0.0, np.zeros(len(features_of(problem))), noise=0.01)
    done = [record for record in records if record.ok]
    points = points_of(problem, [record.params for record in done], partial(table.parameter_error2, problem))
    gaps, times = (np.array([r[name] for r in done], dtype=np.float64) for name in ("divergence", "step_time_ms"))
    divergence.fit(points, gaps, np.zeros(len(done), dtype=np.int64))
    time.fit(points, times)
    return divergence, time


def _shares(raw: Mapping[str, tuple[float, float]]) -> list[Importance]:
    time_total = sum(t for t, _ in raw.values()) or 1.0
    error_total = sum(e for _, e in raw.values()) or 1.0
    out = [Importance(name, t / time_total, e / error_total) for name, (t, e) in raw.items()]
    return sorted(out, key=lambda item: -(item.time_share + item.error_share))
