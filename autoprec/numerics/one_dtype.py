"""Layers that a library's kernel runs in one dtype: convolutions, recurrent layers (LSTM, GRU, RNN) and their cells.

PyTorch reaches an 8-bit convolution for training on no GPU, and a recurrent kernel multiplies by all weights of all
gates and steps in one call, so both have one recipe for all three passes: fp32, bf16 or fp16, accumulated in FP32;
others are refused when a policy is applied. A recurrent layer's weights are cast for the call and handed over in place
of the module's flat list; autograd leads their gradients back through the cast. CUDA autocast's own rule casts cuDNN's
recurrent kernels to FP16 whatever it is asked for (ATen/cudnn/AutocastRNN.cpp); here bf16 is bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from autoprec.errors import UnsupportedError
from autoprec.numerics.execution import Execution, autocast_dtype
from autoprec.numerics.plan import NATIVE
from autoprec.numerics.rounding import cast_values, fast_bf16_gemm
from autoprec.precision.recipes import GEMMS

_CELLS: tuple[Any, ...] = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


@dataclass(slots=True)
class _OneDtypeExecution(Execution):
    """Runs one module in one dtype: ``format``, a key of :data:`autoprec.numerics.plan.NATIVE`.

    FP16 on a CPU, and with ``emulates_casts`` bfloat16 on a CPU without bfloat16 units, are float32 kernels on rounded
    values.
    """

    module: nn.Module
    format: str
    emulates_casts: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """What the module's kernel computes in."""
        return NATIVE[self.format]

    @property
    def labels(self) -> dict[str, str]:
        """What every GEMM runs as."""
        return dict.fromkeys(GEMMS, self.format)

    def emulated(self, device: str) -> bool:
        """Say whether float32 kernels run on rounded values."""
        if self.dtype is torch.float16:
            return device == "cpu"
        return self.emulates_casts and self.dtype is torch.bfloat16 and not fast_bf16_gemm(device)

    def narrow(self, x: Tensor) -> Tensor:
        """Return an operand in the format."""
        return cast_values(x, self.dtype) if self.emulated(x.device.type) else x.to(self.dtype)

    def widen(self, x: Tensor, script: torch.dtype) -> Tensor:
        """Return a result in the dtype the script would see, which computes in ``script`` where autocast is off."""
        autocast = autocast_dtype(x.device.type)
        wide = script if autocast is None else torch.float32 if self.dtype is torch.float32 else autocast
        return (x.to(self.dtype) if self.emulated(x.device.type) else x).to(wide)


@dataclass(slots=True)
class ConvExecution(_OneDtypeExecution):
    """Runs one convolution in one dtype."""

    def __call__(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True, size: tuple[Any, ...] = ()
    ) -> Tensor:
        """Return the convolution of ``input`` in the dtype the script would see; ``size`` is a transposed one's."""
        del training
        self.called = True
        device = input.device.type
        autocast = autocast_dtype(device)
        own: Any = self.module
        run: Any = partial(_transposed, own, size[0] if size else None) if own.transposed else own._conv_forward
        if autocast is self.dtype and not self.emulated(device):
            out = run(input, weight, bias)
        else:
            with torch.autocast(device, enabled=False):
                out = run(self.narrow(input), self.narrow(weight), None if bias is None else self.narrow(bias))
            out = self.widen(out, input.dtype)
        self.record(out, (autocast, input.dtype), self.labels, dgrad=input.requires_grad, wgrad=weight.requires_grad)
        return out  # type: ignore[no-any-return]


def _transposed(module: Any, size: list[int] | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what a transposed convolution's own forward would, with such a weight and bias."""
    rank = weight.ndim - 2
    run: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[rank - 1]
    geometry = (module.stride, module.padding)
    more = module._output_padding(x, size, *geometry, module.kernel_size, rank, module.dilation)
    return run(x, weight, bias, *geometry, more, module.groups, module.dilation)  # type: ignore[no-any-return]


@dataclass(slots=True)
class RecurrentExecution(_OneDtypeExecution):
    """Runs one recurrent module in one dtype; what passes from step to step is not rounded where that is emulated."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None, *, training: bool = True) -> Tensor:
        """Recurrent layers have no single product: :meth:`run` is what their forward calls."""
        del input, weight, bias, training
        raise UnsupportedError("a recurrent layer has no single product", fix="call the module itself")

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's forward with weights, input and states in the format; results are as the script's.

        Args:
            forward: the module's own.
            args, kwargs: of the call: input ``[T, B, K]`` (or packed) and states, in the script's dtype.
        """
        self.called = True
        module = self.module
        if isinstance(module, nn.RNNBase):
            module._update_flat_weights()  # now, not in the forward: FSDP2 and copies come with other Parameters
            weights: list[Any] = module._flat_weights
        else:
            weights = [getattr(module, name) for name in module._parameters]
        device = weights[0].device.type
        given = args[0] if args else kwargs["input"]
        script: torch.dtype = (given.data if isinstance(given, PackedSequence) else given).dtype
        narrowed = [None if weight is None else self.narrow(weight) for weight in weights]
        with torch.autocast(device, enabled=False):
            if isinstance(module, nn.RNNBase):
                module._flat_weights = narrowed
                try:
                    out = forward(*_each(args, self.narrow), **_each(kwargs, self.narrow))
                finally:
                    module._flat_weights = weights
            else:  # torch's own forward reads its weights from what stands for the module
                cell = SimpleNamespace(**module.__dict__, **dict(zip(module._parameters, narrowed, strict=True)))
                own: Any = next(cls.forward for cls in _CELLS if isinstance(module, cls))
                out = own(cell, *_each(args, self.narrow), **_each(kwargs, self.narrow))
        out = _each(out, partial(self.widen, script=script))
        first = out[0] if isinstance(out, tuple) else out
        first = first.data if isinstance(first, PackedSequence) else first
        trains = any(weight is not None and weight.requires_grad for weight in weights)
        self.record(first, (autocast_dtype(device), script), self.labels, dgrad=True, wgrad=trains)
        return out


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments or results of a recurrent layer with its floating tensors changed."""
    if isinstance(value, PackedSequence):
        return PackedSequence(change(value.data), value.batch_sizes, value.sorted_indices, value.unsorted_indices)
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, list):  # states kept in a list: a loop that detaches them writes it so
        return [_each(item, change) for item in value]
    return tuple(_each(item, change) for item in value) if isinstance(value, tuple) else value
