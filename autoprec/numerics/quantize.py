"""Quantise one operand of one GEMM, and read it back: the unit every recipe is made of.

An operand is a 2-D tensor and the axis over which the GEMM sums (its *contraction axis*). Tensor scales, row scales
(one per slice along that axis) multiply the result of the GEMM; block, MX and NVFP4 scales lie inside the sum and
multiply the values. What is kept for the backward pass is the codes and the scales, nothing wider.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoprec.formats import FORMATS
from autoprec.numerics.rounding import STORAGE, decode, encode, round_tf32
from autoprec.numerics.scaling import DelayedScale, amax_of, inverse_of, scale_of
from autoprec.recipes import GEMM_OPERANDS, Gemm, Operand, Recipe, Scaling

__all__ = ["QuantizedOperand", "QuantizerState", "Spec", "quantize", "quantize_dequantize", "spec_of"]


@dataclass(frozen=True, slots=True)
class Spec:
    """How one operand is quantised for one GEMM; equal specs give equal results, so they are computed once.

    ``axis`` is the contraction axis (0 or 1), or -1 where the result does not depend on it (casts, tensor scales,
    square blocks). ``scheme`` is cast, tensor, row, block, mx, nvfp4.
    """

    scheme: str
    format: str
    axis: int = -1
    scaling: Scaling | None = None
    square: bool = False
    hadamard: bool = False
    stochastic: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that stores the codes."""
        return STORAGE[self.format]


def spec_of(recipe: Recipe, gemm: Gemm, operand: Operand) -> Spec:
    """Return how ``recipe`` quantises ``operand`` of ``gemm``."""
    axis = CONTRACTION[gemm][GEMM_OPERANDS[gemm].index(operand)]
    name = recipe.operand_format(operand)
    if recipe.format in ("fp8", "int8") and recipe.scaling is not None:
        granularity = recipe.scaling.granularity
        square = granularity == "block" and operand == "weight"
        free = granularity == "tensor" or square
        return Spec(granularity, name, -1 if free else axis, recipe.scaling, square)
    if recipe.format == "mxfp8":
        return Spec("mx", name, axis)
    if recipe.format == "nvfp4":
        square = recipe.weight_2d and operand == "weight"
        return Spec(
            "nvfp4",
            name,
            -1 if square else axis,
            square=square,
            hadamard=recipe.hadamard and gemm == "wgrad",
            stochastic=recipe.stochastic_rounding and operand == "grad_output",
        )
    return Spec("cast", name)


#: Contraction axis of (first, second) operand of each GEMM, as 2-D tensors input [M, K], weight [N, K],
#: grad_output [M, N].
CONTRACTION: dict[Gemm, tuple[int, int]] = {"fprop": (1, 1), "dgrad": (1, 0), "wgrad": (0, 0)}


@dataclass(slots=True)
class QuantizedOperand:
    """Codes and scales of one operand.

    Attributes:
        codes: the stored values, in the format's dtype, of the operand's shape (padded for MX and NVFP4).
        scale: what the GEMM's result (``folded``) or the values are multiplied by; None for casts.
        spec: how it was made.
        rows, columns: shape of the operand.
    """

    codes: Tensor
    scale: Tensor | None
    spec: Spec
    rows: int
    columns: int
    second: Tensor | None = None

    @property
    def folded(self) -> bool:
        """True when the scale is constant along the contraction axis and multiplies the GEMM's result."""
        return self.spec.scheme in ("tensor", "row")

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values the GEMM multiplies, folded scales not applied, as ``dtype``."""
        if self.spec.scheme in ("cast", "tensor", "row"):
            return self.codes.to(dtype) if self.spec.scheme == "cast" else decode(self.codes, dtype)
        return _GROUPED_VALUES[self.spec.scheme](self, dtype)

    def dequantize(self) -> Tensor:
        """Return the operand's values in float32, scales applied."""
        if self.folded and self.scale is not None:
            return decode(self.codes, torch.float32) * self.scale
        return self.values(torch.float32)


class QuantizerState:
    """What quantisation of one layer remembers between calls: delayed scales and private random streams.

    Nothing here touches torch's global random streams, so that paired runs stay paired.
    """

    __slots__ = ("delayed", "generators", "last", "seed")

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.delayed: dict[tuple[str, Spec], DelayedScale] = {}
        self.last: dict[tuple[str, Spec], Tensor] = {}
        self.generators: dict[torch.device, torch.Generator] = {}

    def __deepcopy__(self, _memo: Any) -> QuantizerState:
        """A copied layer starts with its own histories and its own stream from the same seed."""
        return QuantizerState(self.seed)

    def generator(self, device: torch.device) -> torch.Generator:
        """Return this layer's private random stream on ``device``."""
        if device not in self.generators:
            made = torch.Generator(device=device)
            made.manual_seed(self.seed)
            self.generators[device] = made
        return self.generators[device]

    def delayed_scale(self, operand: str, spec: Spec, amax: Tensor, *, update: bool, recompute: bool) -> Tensor:
        """Return the delayed scale of an operand; a recomputed forward reuses the scale of the forward it repeats."""
        key = (operand, spec)
        if recompute and key in self.last:
            return self.last[key]
        scaling = spec.scaling or Scaling()
        found = self.delayed.get(key)
        if found is None:
            found = self.delayed[key] = DelayedScale(
                FORMATS[spec.format].max,
                length=scaling.amax_history_len,
                algorithm=scaling.amax_compute_algo,
                margin=scaling.margin,
                power_of_2=scaling.power_of_2,
            )
        scale = self.last[key] = found.step(amax, update=update)
        return scale


def _cast(x: Tensor, spec: Spec) -> QuantizedOperand:
    if spec.format == "tf32":
        return QuantizedOperand(round_tf32(x.float()), None, spec, x.shape[0], x.shape[1])
    return QuantizedOperand(x.to(spec.dtype), None, spec, x.shape[0], x.shape[1])


def _tensor(
    x: Tensor, spec: Spec, state: QuantizerState, operand: str, update: bool, recompute: bool
) -> QuantizedOperand:
    scaling, limit = spec.scaling or Scaling(), FORMATS[spec.format].max
    amax = amax_of(x)
    if scaling.amax_epsilon:
        amax = amax.clamp(min=scaling.amax_epsilon)
    delayed = scaling.scale == "delayed"
    if delayed:
        scale = state.delayed_scale(operand, spec, amax, update=update, recompute=recompute)
    else:
        scale = scale_of(amax, limit, power_of_2=scaling.power_of_2)
    # a [1, 1] float32 scale promotes bfloat16 values on the fly; a 0-d one would not
    codes = encode(x * scale.reshape(1, 1), spec.format, bounded=not delayed)
    return QuantizedOperand(codes, inverse_of(scale, amax).reshape(1, 1), spec, x.shape[0], x.shape[1])


def _row(x: Tensor, spec: Spec) -> QuantizedOperand:
    scaling, limit = spec.scaling or Scaling(), FORMATS[spec.format].max
    amax = amax_of(x, spec.axis)
    scale = scale_of(amax, limit, power_of_2=scaling.power_of_2, epsilon=scaling.amax_epsilon)
    scaled = x * scale
    if spec.format == "int8":
        # NaN has no int8 code: the NaN inverse of its row carries it
        codes = scaled.round_().nan_to_num_(nan=0.0).clamp_(-127, 127).to(torch.int8)
    else:
        codes = encode(scaled, spec.format, bounded=True)
    return QuantizedOperand(codes, inverse_of(scale, amax), spec, x.shape[0], x.shape[1])


_GROUPED_VALUES: dict[str, Callable[[QuantizedOperand, torch.dtype], Tensor]] = {}
_GROUPED: dict[str, Callable[[Tensor, Spec, QuantizerState], QuantizedOperand]] = {}


def quantize(
    x: Tensor,
    spec: Spec,
    *,
    operand: str = "input",
    state: QuantizerState | None = None,
    update: bool = True,
    recompute: bool = False,
) -> QuantizedOperand:
    """Quantise a 2-D tensor for one GEMM.

    Args:
        x: ``[rows, columns]``, float32, bfloat16 or float16; any strides; may be empty.
        spec: how; see :func:`spec_of`.
        operand: input, weight or grad_output: delayed scaling keeps a history for each.
        state: delayed scales and random stream of the layer; a fresh one when None.
        update: let delayed scaling take this tensor's amax in.
        recompute: this call repeats an earlier forward (activation checkpointing).

    All-zero tensors stay zero. A NaN or infinity makes everything it shares a scale with NaN.
    """
    if spec.scheme == "cast":
        return _cast(x, spec)
    state = QuantizerState() if state is None else state
    if spec.scheme == "tensor":
        return _tensor(x, spec, state, operand, update, recompute)
    if spec.scheme == "row":
        return _row(x, spec)
    return _GROUPED[spec.scheme](x, spec, state)


def quantize_dequantize(x: Tensor, recipe: Recipe, operand: Operand = "input", gemm: Gemm = "fprop") -> Tensor:
    """Return what is left of ``x`` (2-D) after quantisation by ``recipe`` for one GEMM, as float32."""
    return quantize(x, spec_of(recipe, gemm, operand), operand=operand).dequantize()
