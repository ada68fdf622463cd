"""What a GPU reached, measured: dated data in ``measured.yaml`` that a rehearsal on such a target reads.

A row is one linear layer, forward and backward with its casts, under one recipe by one backend, eager or compiled. Its
time over the modelled one corrects the layers of that recipe. Which backend runs a recipe is decided by duels on the
device itself, not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import Field

from autoprec.cost.kernels import LayerCost, layer_cost
from autoprec.cost.rates import Rates
from autoprec.cost.scale import GemmWork
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import TARGETS, Target, recipe_family
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS
from autoprec.support.files import read_document
from autoprec.support.validation import Frozen, validated


@dataclass(frozen=True, slots=True)
class Linear:
    """One timed linear layer.

    Attributes:
        recipe: a name of :data:`~autoprec.precision.recipes.BUILTIN_RECIPES`.
        how: ``eager`` or ``compiled``.
        shape: tokens, in_features, out_features.
        seconds: of fprop, dgrad and wgrad with all casts, on the device.
    """

    recipe: str
    backend: str
    how: str
    shape: tuple[int, int, int]
    seconds: float


class Measured(Frozen):
    """What one device reached.

    Attributes:
        device: its name as CUDA prints it.
        rates: of :class:`~autoprec.cost.rates.Rates`: ``bandwidth``, ``launch_us``, ``host_us``.
        shape: tokens, in_features and out_features of the linears.
        linears: recipe, backend, ``eager`` or ``compiled``, microseconds.
    """

    device: str
    date: str
    source: str
    rates: dict[str, float]
    shape: tuple[int, int, int]
    linears: tuple[tuple[str, str, str, float], ...] = ()

    @property
    def rows(self) -> tuple[Linear, ...]:
        """The timed linears, one row each."""
        return tuple(Linear(recipe, by, how, self.shape, 1e-6 * us) for recipe, by, how, us in self.linears)

    @property
    def label(self) -> str:
        """What times are called that rest on these rows."""
        return f"modelled, calibrated on {self.device} ({self.date})"

    def over(self, rates: Rates) -> Rates:
        """Return rates with those that were measured put over them."""
        values: dict[str, Any] = dict(self.rates)
        return replace(rates, **values, label=self.label)

    def factors(self, target: Target, rates: Rates, how: str, backend: str = "auto") -> dict[str, float]:
        """Return family -> measured over modelled time of a linear by one backend; ``auto`` is native.

        Empty where bf16 was not timed, with which every family is compared.

        Args:
            target: the device.
            rates: what kernels reach of its peaks.
            how: ``eager`` or ``compiled``.
            backend: who multiplies; ``auto`` is native.
        """
        by = "native" if backend == "auto" else backend
        ratios: dict[str, list[float]] = {}
        for row in self.rows:
            family = recipe_family(BUILTIN_RECIPES[row.recipe])
            if row.how == how and (row.backend == by or family == "bf16"):
                ratios.setdefault(family, []).append(row.seconds / modelled(target, rates, row).seconds)
        if "bf16" not in ratios:
            return {}
        return {family: math.exp(sum(map(math.log, found)) / len(found)) for family, found in ratios.items()}


class _Table(Frozen):
    schema_: str = Field(alias="schema", pattern=r"^autoprec\.measured/1$")
    targets: dict[str, Measured]


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Measured]:
    path = Path(__file__).with_name("measured.yaml")
    return validated(_Table, read_document(path), where=str(path), about="measured").targets


def measured_on(target: Target) -> Measured | None:
    """Return what was measured on such a device; None where nothing was, and of a target that the user describes."""
    return _table().get(target.name) if TARGETS.get(target.name) == target else None


def modelled(target: Target, rates: Rates, row: Linear) -> LayerCost:
    """Return what the model says of a timed linear: alone, with FP32 weights under bf16 autocast.

    Args:
        target: the device.
        rates: what kernels reach of its peaks.
        row: the timed linear.
    """
    work = GemmWork(*row.shape, batch=1, copies=1.0, roles=GEMMS)
    plan = LayerPlan.uniform(BUILTIN_RECIPES[row.recipe])
    eager = row.how == "eager" and not rates.library
    return layer_cost(target, rates, work, plan, activations="bf16", script="fp32", eager=eager)
