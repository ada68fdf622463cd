"""The sensitivity table: how much gradient error each group adds under each choice, on the same weights and batch.

The relative gradient error is ``||g - g_ref|| / ||g_ref||`` over all trainable parameters, from one forward and
backward pass with only the probed groups changed. Errors of different groups are close to orthogonal, so their
**squares** add over a mixed assignment; the table holds squares, and a few mixed probes check the addition on every
model.

A probe is named by what it changes: ``3,4,5|mxfp8`` (groups 3, 4 and 5 under mxfp8, the rest as written),
``parameter|activations=bf16``, ``mixed|2`` (the third random assignment). A probe over several groups gives the sum of
their squares; :mod:`autoprec.tuning.decide.scan` decides which sums are split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from autoprec.errors import UsageError
from autoprec.policy.solver import FloatTable
from autoprec.policy.space import Choice
from autoprec.precision.recipes import GEMMS, KEEP
from autoprec.support.arrays import np
from autoprec.support.plain import or_null, rebuild, shallow
from autoprec.trial.protocol import Probe
from autoprec.tuning.decide.problem import Params, Problem, layer_key

#: Random mixed assignments that are measured to check that squares add.
MIXED_PROBES = 4
#: Squared relative error of one float32 rounding: what cannot be told from zero.
_TINY = 1e-14
#: Relative gradient errors of models whose GEMMs all run in a format, as they usually are: the first guess where no
#: probe of a choice was answered. (``keep`` is not guessed.)
_USUAL_ERRORS = {
    **{"fp32": 1e-6, "tf32": 6e-4, "fp16": 6e-4, "bf16": 5e-3},
    **{"fp8": 5e-2, "mxfp8": 5e-2, "int8": 5e-2, "nvfp4": 0.2},
}
#: Rounds in which levels of groups and choices are fitted; they converge in fewer where each has a probe in common.
_FIT_ROUNDS = 30
#: Parameters that change one forward and backward pass, and so can be probed; optimizer state and communication cannot.
_PROBED = ("activations", "attention")


def families(problem: Problem) -> list[list[int]]:
    """Return groups of one kind in order of depth: equal names up to numbers, and equal choices."""
    out: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for index, group in enumerate(problem.groups):
        out.setdefault((re.sub(r"\d+", "*", group.name), group.choices), []).append(index)
    return list(out.values())


def group_probe(problem: Problem, groups: Sequence[int], choice: str) -> Probe:
    """Return the probe of some groups under one choice, everything else as the script wrote it.

    Args:
        problem: groups, choices and parameters.
        groups: positions of the groups.
        choice: what they run.
    """
    params = problem.quiet() | {layer_key(problem.groups[g].name): choice for g in groups}
    return Probe(id=f"{','.join(map(str, groups))}|{choice}", policy=problem.render(params).to_dict())


def parameter_probes(problem: Problem) -> list[Probe]:
    """Return the probes of activations and attention: what they add by themselves, all layers as written."""
    out = []
    for name in _PROBED:
        for value in problem.parameters.get(name, (problem.fixed.get(name, "keep"),)):
            if value != "keep":
                params = problem.quiet() | {name: value}
                out.append(Probe(f"parameter|{name}={value}", problem.render(params).to_dict()))
    return out


def mixed_params(problem: Problem, number: int) -> dict[str, Any]:
    """Return the ``number``-th random assignment (activations and attention as written): full params."""
    rng = np.random.default_rng([0, number, 7])
    params = problem.quiet()
    for group in problem.groups:
        params[layer_key(group.name)] = str(rng.choice(np.array(group.choices)))
    return params


def mixed_probes(problem: Problem) -> list[Probe]:
    """Return the random mixed assignments that check the addition of squares."""
    if len(problem.free_groups) < 2:
        return []
    return [Probe(f"mixed|{k}", problem.render(mixed_params(problem, k)).to_dict()) for k in range(MIXED_PROBES)]


def plan_probes(problem: Problem) -> list[Probe]:
    """Return the complete scan: every group under every choice, the parameters, and the mixed checks.

    :class:`autoprec.tuning.decide.scan.SensitivityScan` asks fewer questions on large models.
    """
    out = []
    for index, group in enumerate(problem.groups):
        out += [group_probe(problem, [index], choice) for choice in group.choices if choice != KEEP]
    return out + parameter_probes(problem) + mixed_probes(problem)


@dataclass(frozen=True, slots=True)
class Misfit:
    """How well squares added on this model: measured over predicted error of the mixed probes.

    ``ratio`` is the geometric mean, ``spread`` the largest factor away from it, ``count`` how many were measured.
    """

    ratio: float = 1.0
    spread: float = 1.0
    count: int = 0


@dataclass(frozen=True)
class SensitivityTable:
    """Squared relative gradient errors ``[G, C]`` and what belongs to them.

    Attributes:
        error2: infinite where a group does not offer a choice or its probe was not finite; 0 for ``keep``.
        parameters: ``activations=bf16`` -> squared error it adds beyond the layers' own.
        noise: relative standard deviation of the gradient between mini-batches; None when it was not measured.
        misfit: the check of additivity; predictions are multiplied by its ratio.
        measured: ``[G, C]`` True where a probe asked about this group alone, False where a sum was shared out.
        passes: forward and backward passes it took.
        hardly_moved: layers whose weights had hardly any gradient: their errors say nothing of later training.
    """

    groups: tuple[str, ...]
    choices: tuple[str, ...]
    error2: FloatTable
    parameters: dict[str, float] = field(default_factory=dict)
    noise: float | None = None
    misfit: Misfit = Misfit()
    measured: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    passes: int = 0
    hardly_moved: tuple[str, ...] = ()

    @classmethod
    def of(cls, problem: Problem, squares: Mapping[str, float], noise: float | None) -> SensitivityTable:
        """Build the table from squared errors by probe.

        Args:
            squares: infinite where a probe failed; what is missing is filled in from what is known of the same group
                and the same format.

        Raises:
            UsageError: a probe of another problem.
        """
        sums: dict[tuple[tuple[int, ...], str], float] = {}
        parameters: dict[str, float] = {}
        mixed: dict[int, float] = {}
        for probe, square in squares.items():
            head, _, tail = probe.partition("|")
            if head == "parameter":
                parameters[tail] = square
            elif head == "mixed":
                mixed[int(tail)] = square
            else:
                indices = tuple(int(i) for i in head.split(","))
                if max(indices) >= len(problem.groups) or tail not in problem.choice_names:
                    raise UsageError(f"probe '{probe}' is not of this model", fix="repeat the sensitivity scan")
                sums[indices, tail] = square
        error2, measured = _share_out(problem, sums)
        table = cls(
            groups=tuple(group.name for group in problem.groups),
            choices=problem.choice_names,
            error2=error2,
            parameters=_beyond_layers(problem, error2, parameters),
            noise=float(noise) if noise is not None and math.isfinite(noise) and noise > 0 else None,
            measured=measured,
        )
        return table._with_misfit(problem, mixed)

    def _with_misfit(self, problem: Problem, mixed: Mapping[int, float]) -> SensitivityTable:
        logs = []
        for number, error2 in mixed.items():
            predicted = self.predict(problem, mixed_params(problem, number))
            if math.isfinite(error2) and error2 > _TINY and math.isfinite(predicted) and predicted > 0:
                logs.append(0.5 * math.log(error2) - math.log(predicted))
        if not logs:
            return self
        mean = sum(logs) / len(logs)
        misfit = Misfit(math.exp(mean), math.exp(max(abs(v - mean) for v in logs)), len(logs))
        return replace(self, misfit=misfit)

    def parameter_error2(self, problem: Problem, params: Params) -> float:
        """Return the squared error that activations and attention add beyond the layers' own."""
        total = 0.0
        for name in _PROBED:
            known = {**problem.fixed, **{k: v[0] for k, v in problem.parameters.items()}, **params}
            total += self.parameters.get(f"{name}={known.get(name)}", 0.0)
        return total

    def predict(self, problem: Problem, params: Params) -> float:
        """Return the relative gradient error of a point: the root of the added squares, corrected by the misfit."""
        index = problem.indices(params)
        total = float(self.error2[np.arange(len(index)), index].sum()) + self.parameter_error2(problem, params)
        return math.sqrt(total) * self.misfit.ratio

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per group and choice for display, errors as roots and in units of the gradient noise."""
        out = []
        for g, group in enumerate(self.groups):
            for c, choice in enumerate(self.choices):
                value = float(self.error2[g, c])
                if choice == KEEP or not math.isfinite(value):
                    continue
                error = math.sqrt(value)
                row: dict[str, Any] = {"group": group, "choice": choice, "gradient_error": error}
                row["noise_share"] = error / self.noise if self.noise else None
                row["measured"] = bool(self.measured[g, c]) if self.measured is not None else True
                out.append(row)
        return out

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; infinite entries become null."""
        return shallow(self) | {
            "error2": [or_null(row) for row in self.error2.tolist()],
            "parameters": dict(zip(self.parameters, or_null(self.parameters.values()), strict=True)),
            "misfit": asdict(self.misfit),
            "measured": self.measured.tolist() if self.measured is not None else None,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SensitivityTable:
        """Rebuild the table from :meth:`to_json`.

        Raises:
            KeyError, ValueError, TypeError: it is not one.
        """
        error2, measured = np.array(document["error2"], dtype=np.float64), document.get("measured")  # null becomes NaN
        parts: dict[str, Any] = {
            "error2": np.where(np.isnan(error2), np.inf, error2),
            "parameters": {k: math.inf if v is None else v for k, v in document["parameters"].items()},
            "misfit": Misfit(**document["misfit"]),
            "measured": np.array(measured, dtype=bool) if measured is not None else None,
        }
        return rebuild(cls, {**document, **parts})


def _share_out(
    problem: Problem, sums: Mapping[tuple[tuple[int, ...], str], float]
) -> tuple[FloatTable, np.ndarray[Any, np.dtype[np.bool_]]]:
    """Turn sums over segments of groups into one number per group and choice.

    The choice with the most segments of a family gives the depth profile; a coarser choice's sum is shared out along
    it. A segment that contains smaller measured ones shares only what they leave.
    """
    shape = (len(problem.groups), len(problem.choice_names))
    error2 = np.where(problem.allowed, np.nan, np.inf)
    measured = np.zeros(shape, dtype=bool)
    for family in families(problem):
        inside = set(family)
        by_choice: dict[str, dict[tuple[int, ...], float]] = {}
        for (indices, choice), value in sums.items():
            if inside.issuperset(indices):
                by_choice.setdefault(choice, {})[indices] = value
        profile = np.ones(shape[0])
        for choice in sorted(by_choice, key=lambda c: -len(by_choice[c])):
            column = problem.choice_names.index(choice)
            values = _along(by_choice[choice], profile)
            for g, value in values.items():
                error2[g, column] = value
                measured[g, column] = (g,) in by_choice[choice]
            if len(by_choice[choice]) > 1 and np.all(profile == 1.0):
                for g, value in values.items():
                    profile[g] = max(value, _TINY) if math.isfinite(value) else 1.0
    if KEEP in problem.choice_names:
        column = problem.choice_names.index(KEEP)
        error2[:, column] = np.where(problem.allowed[:, column], 0.0, np.inf)
    return _fill_in(error2, _usual_logs(problem)), measured


def _along(segments: Mapping[tuple[int, ...], float], profile: FloatTable) -> dict[int, float]:
    out: dict[int, float] = {}
    for indices in sorted(segments, key=len):
        rest = [g for g in indices if g not in out]
        if not rest:
            continue
        total = segments[indices]
        known = sum(out[g] for g in indices if g in out and math.isfinite(out[g]))
        share = float(profile[rest].sum() / profile[list(indices)].sum())
        left = max(total - known, 0.25 * share * total) if math.isfinite(total) else math.inf
        for g in rest:
            out[g] = float(left * profile[g] / profile[rest].sum()) if math.isfinite(left) else math.inf
    return out


def _usual_logs(problem: Problem) -> FloatTable:
    """Return ``[C]``: the logarithm of the squared error that each choice usually adds, where GEMMs share it evenly."""
    recipes, out = problem.space.all_recipes, []
    for name in problem.choice_names:
        plan = Choice.parse(name).plan(recipes)
        formats = ["fp32" if recipe is None else recipe.format for recipe in map(plan.recipe, GEMMS)]
        out.append(math.log(sum(_USUAL_ERRORS[one] ** 2 for one in formats) / len(formats)))
    return np.array(out)


def _fill_in(error2: FloatTable, usual: FloatTable) -> FloatTable:
    """Replace what no probe answered (NaN) by group level times choice level, in logarithms.

    Levels are fitted beside what choices of their formats usually add: a choice that no probe is about, as in a scan
    that was cut off, follows from its format, not from the choices that were probed.
    """
    missing = np.isnan(error2)
    if not missing.any():
        return error2
    known = np.isfinite(error2) & (error2 > 0)
    if not known.any():
        return np.where(missing, np.inf, error2)
    logs = np.log(np.where(known, np.maximum(error2, _TINY), 1.0)) - usual
    asked, groups = known.any(axis=0), known.any(axis=1)
    column, row = np.zeros(known.shape[1]), np.zeros(known.shape[0])
    for _ in range(_FIT_ROUNDS):
        row = np.where(known, logs - column, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
        column = np.where(known, logs - row[:, None], 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)
        column = np.where(asked, column - column[asked].mean(), 0.0)
    row = np.where(groups, row, row[groups].mean())
    return np.where(missing, np.exp(usual + column + row[:, None]), error2)


def _beyond_layers(problem: Problem, error2: FloatTable, parameters: Mapping[str, float]) -> dict[str, float]:
    """Take from the error of autocast what its GEMMs account for: layers bring that themselves."""
    out = {}
    for name, value in parameters.items():
        cast = name.removeprefix("activations=")
        inside = 0.0
        if name.startswith("activations=") and cast in problem.choice_names:
            under = ({"activations": cast, layer_key(group.name): KEEP} for group in problem.groups)
            reached = [problem.effective(p, group) == cast for p, group in zip(under, problem.groups, strict=True)]
            column = error2[reached, problem.choice_names.index(cast)]
            inside = float(column[np.isfinite(column)].sum())
        out[name] = max(0.0, value - inside) if math.isfinite(value) else math.inf
    return out
