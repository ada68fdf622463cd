"""Look inside one training step: how much of what 8-bit layers see is saturated, and how much underflows to zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applying.swap import execution_of
from autoprec.applying.units import unwrap
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.quantize import quantize, spec_of
from autoprec.precision.formats import FORMATS
from autoprec.precision.recipes import Gemm, Operand, Recipe

_LAYERS = 8


class OperandSampler:
    """Samples up to eight FP8 and INT8 layers, spread over the model, in the step after :meth:`arm`.

    Hooks are on the model during that step only. Input and grad_output are quantised once more, with the scales their
    layer uses, and counted.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._handles: list[Any] = []
        self._counts: list[tuple[float, float]] = []

    def arm(self) -> None:
        """Sample operands in the next step."""
        self.disarm()
        self._counts = []
        found = []
        for module in unwrap(self.model).modules():
            execution = execution_of(module)
            if isinstance(execution, LinearExecution) and any(
                _is_8_bits(r) for r in (execution.plan.fprop, execution.plan.dgrad)
            ):
                found.append((module, execution))
        for module, execution in found[:: max(1, len(found) // _LAYERS)][:_LAYERS]:
            self._watch(module, execution)

    def _watch(self, module: nn.Module, execution: LinearExecution) -> None:
        def before(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            self._count(inputs[0], execution, execution.plan.fprop, "fprop", "input")

        def after(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(backward)  # type: ignore[no-untyped-call]

        def backward(gradient: Tensor) -> None:
            self._count(gradient, execution, execution.plan.dgrad, "dgrad", "grad_output")

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

    def disarm(self) -> None:
        """Stop sampling."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @torch.no_grad()
    def _count(self, x: Any, execution: LinearExecution, recipe: Recipe | None, gemm: Gemm, operand: Operand) -> None:
        if not isinstance(x, Tensor) or x.numel() == 0 or not _is_8_bits(recipe) or recipe is None:
            return
        flat = x.detach().reshape(-1, x.shape[-1])
        spec = spec_of(recipe, gemm, operand, flat.device.type)
        done = quantize(flat, spec, operand=operand, state=execution.quantizers, update=False, recompute=True)
        # only a delayed scale can be too large for the tensor at hand; a current one is made from it
        saturated = 0.0
        if spec.scaling is not None and spec.scaling.scale == "delayed" and done.scale is not None:
            saturated = float((flat.float().abs() > FORMATS[spec.format].max * done.scale).float().mean())
        nonzero = int((flat != 0).sum())
        lost = 1 - min(int((done.codes.float() != 0).sum()), nonzero) / nonzero if nonzero else 0.0
        self._counts.append((saturated, lost))

    def report(self) -> dict[str, float]:
        """Return the worst sampled layer's shares and take the hooks off; empty when nothing was sampled."""
        self.disarm()
        if not self._counts:
            return {}
        return {
            "saturated_share": max(saturated for saturated, _ in self._counts),
            "underflow_share": max(lost for _, lost in self._counts),
        }


def _is_8_bits(recipe: Recipe | None) -> bool:
    return recipe is not None and recipe.format in ("fp8", "int8")
