"""What all library backends share: dtypes, ragged batches, bias, and seeing what ran.

A library's product runs on a 2-D input whose rows are padded with zeros to the multiple its kernels need: zero rows
change no scale and no sum, so a ragged last batch needs no other recipe. No module is replaced and no Parameter is
copied: the library's function, or a shell module that shares the Parameters, is called from the layer's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.plan import DTYPE_NAMES, describe_plan
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import GEMMS, KEEP

__all__ = ["LibraryExecution", "plan_labels", "wants_bf16"]


def plan_labels(plan: LayerPlan) -> dict[str, str]:
    """Return what each GEMM of a plan is called in an audit."""
    return {gemm: KEEP if (recipe := plan.recipe(gemm)) is None else recipe.describe() for gemm in GEMMS}


def wants_bf16(plan: LayerPlan) -> bool:
    """True when a GEMM of the plan is bf16: then operands arrive in bfloat16, whatever the script computes in."""
    return any((recipe := plan.recipe(gemm)) is not None and recipe.format == "bf16" for gemm in GEMMS)


@dataclass(slots=True)
class LibraryExecution:
    """Runs one layer through a library.

    Attributes:
        plan: what was asked for.
        backend: name of the backend.
        product: ``(input [M, K], weight [N, K]) -> [M, N]``, differentiable; the weight comes as it is stored.
        labels: what the library runs, by GEMM.
        rows: multiple of M that the library's kernels need.
        compute: dtype in which operands are handed over; None for what the script computes in.
        ran: what the last forward and backward really ran, by GEMM.
        watched: the dtypes under which a backward has been seen; others are watched once more.
        casts_weight: the weight is cast to ``compute`` as well; otherwise the library quantises it as it is stored.
    """

    plan: LayerPlan
    backend: str
    product: Callable[[Tensor, Tensor], Tensor]
    labels: dict[str, str]
    rows: int = 1
    compute: torch.dtype | None = None
    casts_weight: bool = True
    note: str = ""
    called: bool = False
    ran: dict[str, str] = field(default_factory=dict)
    watched: Any = None

    @property
    def executed(self) -> dict[str, str]:
        """What the last forward and backward ran, by GEMM."""
        return dict(self.ran)

    def describe(self) -> str:
        """Return what ``print(model)`` shows."""
        return f"{describe_plan(self.plan)} by {self.backend}"

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return ``input @ weight.T + bias`` in the dtype the script would see."""
        del training
        self.called = True
        device = input.device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        out_dtype = autocast or input.dtype
        compute = self.compute or out_dtype
        x = input.to(compute).reshape(-1, input.shape[-1])
        if x.shape[0] == 0:
            return F.linear(input, weight, bias)
        padding = -x.shape[0] % self.rows
        with torch.autocast(device, enabled=False):
            out = self.product(F.pad(x, (0, 0, 0, padding)) if padding else x.contiguous(), weight)
            if out.requires_grad:  # a gradient may come expanded (sum) or transposed, which 8-bit kernels refuse
                out.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
            out = out[: x.shape[0]].to(out_dtype)
            if bias is not None:
                out = out + bias.to(out_dtype)
        out = out.reshape(*input.shape[:-1], out.shape[-1])
        labels = self._labels(out_dtype)
        self.ran["fprop"] = labels["fprop"]
        if out.requires_grad and self.watched != (autocast, input.dtype) and not torch.compiler.is_compiling():
            ran = {"dgrad": input.requires_grad, "wgrad": weight.requires_grad}
            self._watch(out, (autocast, input.dtype), {gemm: labels[gemm] for gemm, did in ran.items() if did})
        return out

    def _labels(self, script: torch.dtype) -> dict[str, str]:
        """What the GEMMs run as: one that is kept runs in ``compute``, which may not be what the script computes in."""
        if self.compute is None or self.compute is script:
            return self.labels
        other = DTYPE_NAMES[self.compute]
        return {gemm: other if label == KEEP else label for gemm, label in self.labels.items()}

    def _watch(self, out: Tensor, key: Any, labels: dict[str, str]) -> None:
        def seen(_grad: Tensor) -> None:
            self.watched = key
            self.ran.update(labels)

        out.register_hook(seen)  # type: ignore[no-untyped-call]
