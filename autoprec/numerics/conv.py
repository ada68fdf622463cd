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

__all__ = ["CONV_FORMATS", "ConvExecution"]

#: Formats in which a convolution can run.
CONV_FORMATS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class ConvExecution(Execution):
    """Runs one convolution in one dtype: ``format``, a key of :data:`CONV_FORMATS`."""

    module: nn.Module
    format: str

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Return the convolution of ``input`` in the dtype the script would see."""
        del training
        self.called = True
        device = input.device.type
        dtype = CONV_FORMATS[self.format]
        autocast = autocast_dtype(device)
        run: Any = self.module._conv_forward
        if autocast is dtype and not (device == "cpu" and dtype is torch.float16):
            out = run(input, weight, bias)
        else:
            with torch.autocast(device, enabled=False):
                out = self._cast(run, input, weight, bias, dtype, device)
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
    def _cast(run: Any, input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, device: str) -> Tensor:
        bias = None if bias is None else bias.to(dtype)
        x, w = input.to(dtype), weight.to(dtype)
        if device == "cpu" and dtype is torch.float16:
            # FP16 convolutions are unusably slow on CPUs: FP16 values, float32 arithmetic, FP16 result
            bias = None if bias is None else bias.float()
            return run(x.float(), w.float(), bias).to(dtype)  # type: ignore[no-any-return]
        return run(x, w, bias)  # type: ignore[no-any-return]
