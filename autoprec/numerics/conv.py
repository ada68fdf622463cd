"""Convolutions under a policy: bfloat16 or float16 operands, float32 accumulation, all three passes alike.

PyTorch reaches an 8-bit convolution for training on no GPU, so other recipes are refused when a policy
is applied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.numerics.execution import Execution, autocast_dtype
from autoprec.numerics.rounding import cast_values, fast_bf16_gemm

__all__ = ["CONV_FORMATS", "ConvExecution"]

#: Formats in which a convolution can run.
CONV_FORMATS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class ConvExecution(Execution):
    """Runs one convolution in one dtype: ``format``, a key of :data:`CONV_FORMATS`.

    FP16 convolutions on a CPU, and with ``emulates_casts`` bfloat16 ones on a CPU without bfloat16 units, are float32
    convolutions of rounded values.
    """

    module: nn.Module
    format: str
    emulates_casts: bool = False

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return the convolution of ``input`` in the dtype the script would see."""
        del training
        self.called = True
        device = input.device.type
        dtype = CONV_FORMATS[self.format]
        autocast = autocast_dtype(device)
        run: Any = self.module._conv_forward
        emulated = device == "cpu" and dtype is torch.float16
        emulated |= self.emulates_casts and dtype is torch.bfloat16 and not fast_bf16_gemm(device)
        if autocast is dtype and not emulated:
            out = run(input, weight, bias)
        else:
            with torch.autocast(device, enabled=False):
                out = self._cast(run, input, weight, bias, dtype, emulated)
            if autocast is None:
                out = out.to(input.dtype)
            elif dtype is not torch.float32:
                out = out.to(autocast)
        self.ran["fprop"] = self.format
        key = (autocast, input.dtype)
        if out.requires_grad and self.watched != key and not torch.compiler.is_compiling():
            ran = {"dgrad": input.requires_grad, "wgrad": weight.requires_grad}
            self.watch(out, key, {gemm: self.format for gemm, did in ran.items() if did})
        return out  # type: ignore[no-any-return]

    @staticmethod
    def _cast(
        run: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, emulated: bool
    ) -> Tensor:
        if emulated:
            bias = None if bias is None else cast_values(bias, dtype)
            return run(cast_values(input, dtype), cast_values(weight, dtype), bias).to(dtype)  # type: ignore[no-any-return]
        return run(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))  # type: ignore[no-any-return]
