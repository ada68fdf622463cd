"""The small interface behind which GEMMs run: what can you run, and give me something that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from autoprec.policy import LayerPlan
from autoprec.precision.recipes import Gemm, Recipe

__all__ = ["Backend", "Capability", "Execution", "feature_sizes"]


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether something can run, and why (not)."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


class Execution(Protocol):
    """Runs one layer under its plan and remembers what ran; see ``numerics.linear.LinearExecution``."""

    plan: LayerPlan
    backend: str
    note: str
    called: bool

    @property
    def executed(self) -> dict[str, str]:
        """What the last forward and backward ran, by GEMM."""
        ...

    def describe(self) -> str:
        """Return what ``print(model)`` shows."""
        ...

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        ...


class Backend(Protocol):
    """Who runs a GEMM.

    Two methods are optional: ``around_model() -> factory of a context manager`` for what the model's forward is run in
    (or None), and ``gap(plan, check) -> reason`` for checks of the conformance suite it is known not to pass.
    """

    name: str

    def available(self, device: str) -> Capability:
        """Say whether the backend can run at all on a device (``cpu``, ``cuda:0``), with the reason."""
        ...

    def capability(self, recipe: Recipe, *, gemm: Gemm, m: int, k: int, n: int, device: str) -> Capability:
        """Say whether one GEMM, ``[m, k] x [k, n]``, runs under a recipe; 0 stands for a size not known yet."""
        ...

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> Execution:
        """Return what runs ``module`` under ``plan``.

        Raises:
            UnsupportedError: the backend cannot express the plan.
        """
        ...


#: Builds a backend; kept lazy so that optional packages are imported only when asked for.
BackendFactory = Callable[[], Backend]


def feature_sizes(gemm: Gemm, m: int, k: int, n: int) -> dict[str, int]:
    """Return the sizes of a GEMM that are features of the layer, by label; tokens are padded, so any number will do."""
    sizes = {"M": m, "K": k, "N": n}
    del sizes["K" if gemm == "wgrad" else "M"]
    return sizes
