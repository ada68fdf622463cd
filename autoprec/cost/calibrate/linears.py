"""Which backend runs a recipe: whole linears that `autoprec calibrate` timed on the device, and what follows from them.

A row is one linear layer, forward and backward with its casts, under one recipe by one backend, eager or compiled. The
choice is a pure function of the rows: native, unless another backend is faster by more than the noise. A file without
rows chooses nothing, and ``auto`` is native then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from autoprec.cost.kernels import LayerCost, layer_cost
from autoprec.cost.rates import Rates
from autoprec.cost.scale import GemmWork
from autoprec.errors import FileError
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import Target, recipe_family
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS, Recipe

#: Tokens, in_features and out_features of the timed linears.
LINEAR_SHAPES = ((8192, 4096, 16384), (8192, 1024, 4096))
NATIVE = "native"
#: Less than this is a tie, whatever the spread: clocks move by as much between two backends' turns.
TIE = 0.05
#: A backend whose results are this many times as far from bf16 as native's computes something else.
WRONG = 1.5


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear under one recipe by one backend.

    Attributes:
        recipe: a name of :data:`~autoprec.precision.recipes.BUILTIN_RECIPES`.
        how: ``eager`` or ``compiled``.
        shape: tokens, in_features, out_features.
        seconds: of fprop, dgrad and wgrad with all casts, called again and again: the device's time or the host's,
            whichever is longer; 0 where it failed.
        spread: relative spread of the repeated measurements.
        error: the largest relative error of output and gradients, against bf16.
        failed: why there is no time.
        device_s: as ``seconds``, of the device alone, with every launch queued beforehand; 0 on a CPU, and ``seconds``
            where the layer breaks a compiled graph.
        host_s: of the host alone, to launch it; 0 on a CPU.
    """

    recipe: str
    backend: str
    how: str
    shape: tuple[int, int, int]
    seconds: float = 0.0
    spread: float = 0.0
    error: float = 0.0
    failed: str = ""
    device_s: float = 0.0
    host_s: float = 0.0

    @property
    def decides_s(self) -> float:
        """Seconds by which backends are compared: a linear inside a compiled graph waits for no launch of its own."""
        return (self.device_s if self.how == "compiled" else 0.0) or self.seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"shape": list(self.shape)}

    @classmethod
    def from_json(cls, row: Any) -> Linear:
        """Rebuild from :meth:`to_json`.

        Raises:
            FileError: it is not such a row.
        """
        try:
            made = cls(**row | {"shape": tuple(int(size) for size in row["shape"])})
            numbers = [float(value) for value in (made.seconds, made.spread, made.error, made.device_s, made.host_s)]
            sound = all(0 <= value < math.inf for value in numbers) and len(made.shape) == 3
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound or made.recipe not in BUILTIN_RECIPES or made.how not in ("eager", "compiled"):
            names = ", ".join(field.name for field in fields(cls))
            raise FileError(f"{row!r} is not a timed linear", where="calibration", fix=f"a row has {names}")
        return made


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Who runs a family of recipes, and why, in a few words for a person."""

    backend: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Linears:
    """The timed linears of one device."""

    rows: tuple[Linear, ...] = ()

    @classmethod
    def of(cls, calibration: Mapping[str, Any] | None) -> Linears:
        """Return the linears of a calibration; none where it has none.

        Raises:
            FileError: a row is none.
        """
        rows = (calibration or {}).get("linears", ())
        if not isinstance(rows, (list, tuple)):
            raise FileError("'linears' is not a list", where="calibration", fix="write it with `autoprec calibrate`")
        return cls(tuple(Linear.from_json(row) for row in rows))

    def choices(self, how: str) -> dict[str, BackendChoice]:
        """Return family -> choice of every family that any backend ran ``eager`` or ``compiled``; bf16 is torch's."""
        names = dict.fromkeys(row.recipe for row in self.rows if BUILTIN_RECIPES[row.recipe].scaled)
        found = {name: _choice(name, [r for r in self.rows if r.recipe == name and r.how == how]) for name in names}
        return {recipe_family(BUILTIN_RECIPES[name]): choice for name, choice in found.items() if choice is not None}

    def record(self, recipes: Mapping[str, Recipe], *, compiled: bool) -> dict[str, dict[str, str]]:
        """Return name -> backend and reason of a policy's recipes, as its evidence keeps them."""
        choices = self.choices("compiled" if compiled else "eager") if self.rows else {}
        families = {name: recipe_family(recipe) for name, recipe in recipes.items()}
        return {name: choices[family].to_json() for name, family in families.items() if family in choices}

    def factors(self, target: Target, rates: Rates, how: str, backend: str = "auto") -> dict[str, tuple[float, float]]:
        """Return family -> measured over modelled time of a linear on the device, and of the host's launches of it.

        What a compiled graph launches is not what a compiled linear alone does: its host time is left as modelled.
        Without a timed bf16 linear nothing is corrected.

        Args:
            rates: what the model believes of it, these factors apart.
            how: ``eager`` or ``compiled``.
            backend: a backend's name, or ``auto`` for the chosen ones.
        """
        choices = self.choices(how)
        ratios: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            family = recipe_family(BUILTIN_RECIPES[row.recipe])
            runs = choices[family].backend if backend == "auto" and family in choices else backend
            if row.how == how and row.seconds and (row.backend == runs or family == "bf16"):
                ratios.setdefault(family, []).append(_over_modelled(target, rates, row))
        if "bf16" not in ratios:  # what the others are compared with would be another model's
            return {}
        return {family: (_mean(d for d, _ in found), _mean(h for _, h in found)) for family, found in ratios.items()}


def modelled(target: Target, rates: Rates, row: Linear) -> LayerCost:
    """Return what the model says of a timed linear: alone, with FP32 weights under bf16 autocast."""
    work = GemmWork(*row.shape, batch=1, copies=1.0, roles=GEMMS)
    plan = LayerPlan.uniform(BUILTIN_RECIPES[row.recipe])
    eager = row.how == "eager" and not rates.library
    return layer_cost(target, rates, work, plan, activations="bf16", script="fp32", eager=eager)


def _over_modelled(target: Target, rates: Rates, row: Linear) -> tuple[float, float]:
    """Return how much longer than modelled a linear took, on the device and on the host."""
    cost = modelled(target, rates, row)
    host = row.host_s / (cost.kernels * rates.host_us * 1e-6) if row.how == "eager" and row.host_s else 1.0
    return (row.device_s or row.seconds) / cost.seconds, host


def _choice(recipe: str, rows: Sequence[Linear]) -> BackendChoice | None:
    """Return who runs one recipe; None where nobody does."""
    by_backend: dict[str, dict[tuple[int, ...], Linear]] = {}
    for row in rows:
        if row.seconds:
            by_backend.setdefault(row.backend, {})[row.shape] = row
    native = by_backend.pop(NATIVE, None)
    if native is None:
        return _without_native(recipe, rows, by_backend)
    gains: dict[str, float] = {}
    said = []
    for name, found in by_backend.items():
        pairs = [(native[shape], row) for shape, row in found.items() if shape in native]
        if not pairs:
            continue
        if any(row.error > WRONG * own.error + 1e-3 for own, row in pairs):
            said.append(f"{name} computes something else")
            continue
        gain = _mean(own.decides_s / row.decides_s for own, row in pairs)
        noise = max(TIE, *(own.spread + row.spread for own, row in pairs))
        if gain > 1.0 + noise:
            gains[name] = gain
        said.append(f"{name} {gain:.2f}x its speed" + (", a tie" if abs(gain - 1.0) <= noise else ""))
    if gains:
        best = max(gains, key=lambda name: gains[name])
        return BackendChoice(best, f"{best}: {gains[best]:.2f}x native at {recipe}, measured")
    return BackendChoice(NATIVE, f"native: {'; '.join(said) or 'no other backend ran it'} at {recipe}, measured")


def _without_native(
    recipe: str, rows: Sequence[Linear], others: Mapping[str, Mapping[tuple[int, ...], Linear]]
) -> BackendChoice | None:
    refusal = next((row.failed for row in rows if row.backend == NATIVE and row.failed), "")
    if not others or not refusal:  # what was not timed decides nothing
        return None
    shared = set.intersection(*(set(found) for found in others.values()))
    least = {row.shape: row.error for row in sorted(rows, key=lambda row: -row.error) if row.seconds}
    sound = {n: f for n, f in others.items() if all(r.error <= WRONG * least[r.shape] + 1e-3 for r in f.values())}
    sound = sound or dict(others)  # none is the closest to bf16 in every shape
    best = min(sound, key=lambda name: _mean(sound[name][shape].decides_s for shape in shared or sound[name]))
    return BackendChoice(best, f"{best}: native does not run {recipe} here ({refusal})")


def _mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))
