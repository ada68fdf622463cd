"""Casts of an uncompiled layer on a GPU: one kernel for an operand, for both of its GEMMs at once.

A compiler fuses the ten operators of a cast with what comes before; without one, each is a kernel of its own, and a
linear layer in FP8 launches 80 to 170 of them where bf16 launches 8. Here an operand is read once more after its
magnitudes are known (not at all for delayed scales and blocks, whose magnitudes lie within a tile), and both layouts
are written: codes along its rows for the first GEMM that uses it, and transposed for the second, which
``torch._scaled_mm`` wants contiguous along the sum as well. Codes and scales are those of
:mod:`autoprec.numerics.quantize`, bit for bit, which is checked on the device the first time; else they are not used.
From then on the host waits for nothing.

=========  ==================================================================  ========
scheme     kernels                                                             operands
=========  ==================================================================  ========
tensor     largest magnitude (atomic maximum), cast                            2
row        largest by row and by column, cast with either                      2
delayed    cast with the known scale; its magnitude is noted on the way        1
block      1x128 along rows and along columns, or 128x128 for the weight       1
=========  ==================================================================  ========

Where Triton is missing, on a CPU and in compiled graphs the operators of torch do the same.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import struct
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from autoprec.errors import AutoPrecWarning
from autoprec.numerics.operand import QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.quantize import quantize
from autoprec.precision.formats import FORMATS
from autoprec.support.optional import require

_GROUP = 128
_CHUNK = 1 << 20
_TILE = (64, 128)
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)

Pair = tuple[QuantizedOperand | None, QuantizedOperand | None]


@functools.cache
def _kernels() -> Any:
    require("triton", purpose="fused casts")
    return importlib.import_module("autoprec.backends.fused_kernels")


def launch(name: str, grid: tuple[int, int], arguments: tuple[Any, ...], constants: Mapping[str, Any]) -> None:
    """Start one of the kernels on the device of its first argument."""
    kernel = getattr(_kernels(), name)
    device = arguments[0].device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **constants)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **constants)


def fused_casts(state: QuantizerState) -> FusedCasts | None:
    """Return what casts the operands of a layer on NVIDIA GPUs, or None where Triton is missing."""
    return FusedCasts(state) if has_kernels() else None


def has_kernels() -> bool:
    """Say whether there is a Triton for NVIDIA GPUs."""
    return importlib.util.find_spec("triton") is not None and torch.version.hip is None


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _casts(spec: Spec | None, x: Tensor) -> bool:
    if spec is None or spec.scheme not in ("tensor", "row", "block") or spec.format not in ("e4m3", "e5m2"):
        return False
    return _on_gpu(x) and x.numel() > 0 and x.dtype in _SOURCES


def _is_current_tensor(spec: Spec | None) -> bool:
    return spec is not None and spec.scheme == "tensor" and spec.rule.scale != "delayed"


@dataclass(slots=True, eq=False, weakref_slot=True)
class FusedCasts:
    """Casts the operands of one layer.

    A weight is cast once for all micro-batches of a step: its codes are kept while the optimizer that owns it has not
    stepped, in training, once a step has been seen to use it more than once. Where no :class:`torch.optim.Optimizer`
    holds this very Parameter (a sharded one, a hand-written update), it is cast every time.

    Attributes:
        state: delayed scales of the layer.
        kept: the weight's codes, by what they are codes of.
        uses: training forwards since the optimizer stepped; ``again``: there was more than one before that.
    """

    state: QuantizerState
    kept: dict[Any, Pair] = field(default_factory=dict)
    uses: int = 0
    again: bool = False

    def pair(
        self,
        x: Tensor,
        first: Spec | None,
        second: Spec | None,
        operand: str,
        *,
        update: bool = False,
        recompute: bool = False,
    ) -> Pair:
        """Quantise a 2-D tensor for a GEMM that sums along its rows, and for one that sums along its columns.

        Args:
            x: ``[rows, columns]``, any strides.
            first, second: how, or None where there is no such GEMM.
            operand: input, weight or grad_output.
            update: let delayed scaling take this tensor's amax in.
            recompute: this call repeats an earlier forward (activation checkpointing).

        Returns:
            Two operands; None in place of one that is not asked for or that torch's own operators must cast.
        """
        if self.state.groups.get(operand) and any(_is_current_tensor(spec) for spec in (first, second)):
            return None, None  # the kernel that finds the largest value casts as well: nothing could reduce it between
        first = first if _casts(first, x) else None
        second = second if _casts(second, x) else None
        together = first is None or second is None or (first.scheme, first.format, first.scaling, first.square) == (
            second.scheme, second.format, second.scaling, second.square
        )  # fmt: skip
        if not together:
            ahead = self.pair(x, first, None, operand, update=update, recompute=recompute)
            return ahead[0], self.pair(x, None, second, operand, update=update, recompute=recompute)[1]
        spec = first or second
        if spec is None or not _agrees(x.device, x.dtype, first, second):
            return None, None
        if spec.scheme == "block":
            return _blocks(x, spec, first, second)
        if spec.scaling is not None and spec.scaling.scale == "delayed":
            known = self.state.known_scale(operand, spec, x.device, update=update, recompute=recompute)
            return (None, None) if known is None else _delayed(x, spec, first, second, *known)
        return _scaled(x, spec, first, second)

    def weight(self, weight: Tensor, first: Spec | None, second: Spec | None, *, training: bool, **how: Any) -> Pair:
        """Quantise a weight as :meth:`pair` does, or return what is kept of it."""
        if second is not None and _is_delayed(second) and second != first:
            second = None  # dgrad's own delayed scale is taken when the backward pass comes to it
        lasting = training and type(weight) is nn.Parameter and _is_stepped(weight)
        if not lasting or any(spec is not None and _is_delayed(spec) for spec in (first, second)):
            return self.pair(weight, first, second, "weight", **how)
        _holders.add(self)
        self.uses += not how.get("recompute", False)
        key = (id(weight), weight._version, weight.data_ptr(), first, second)
        found = self.kept.get(key)
        if found is None:
            found = self.pair(weight, first, second, "weight", **how)
            self.kept = {key: found} if self.again or self.uses > 1 else {}
        return found

    def stepped(self) -> None:
        self.kept, self.again, self.uses = {}, self.uses > 1, 0

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedCasts:
        """A copied layer keeps nothing of another's weight."""
        return FusedCasts(copy.deepcopy(self.state, memo))


_agreed: dict[Any, bool] = {}


def _agrees(device: torch.device, dtype: torch.dtype, first: Spec | None, second: Spec | None) -> bool:
    """Say whether the kernels give the codes of torch's operators on this device: tried once for each kind of cast.

    What does not compile, or gives other codes, is told once and not used.
    """
    return agreed((device, dtype, first, second), device, functools.partial(_same_codes, device, dtype, first, second))


def agreed(key: Any, device: torch.device, same: Callable[[], bool]) -> bool:
    """Say whether ``same`` holds on a device, asked once for each ``key``; what it raises is told and means no."""
    found = _agreed.get(key)
    if found is None:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # comparing waits for the device, which a graph that is being captured cannot
        why = ""
        try:
            with torch.inference_mode(False), torch.no_grad():
                found = same()
        except Exception as error:  # whatever a compiler or a driver raises
            found, why = False, f": {type(error).__name__}: {error}"
        if not found:
            what = "do not run here" if why else "give other codes than torch's operators"
            warnings.warn(
                f"fused FP8 casts {what}, torch casts instead, more slowly{why}"[:400], AutoPrecWarning, stacklevel=2
            )
        _agreed[key] = found
    return found


def _same_codes(device: torch.device, dtype: torch.dtype, first: Spec | None, second: Spec | None) -> bool:
    x = torch.linspace(-3.0, 5.0, 128 * 256, device=device).pow(3).reshape(128, 256).to(dtype)
    state, spec = QuantizerState(), first or second
    if spec is None:
        return True
    if spec.scheme == "block":
        made = _blocks(x, spec, first, second)
    elif _is_delayed(spec):
        scale = state.history("input", spec).scale = torch.full((), 4.0, device=device)
        made = _delayed(x, spec, first, second, scale, None)
    else:
        made = _scaled(x, spec, first, second)
    for ours, use in zip(made, (first, second), strict=True):
        if ours is None or use is None:
            continue
        theirs = quantize(x, use, state=state, update=False)
        pairs = [(ours.codes.contiguous().view(torch.uint8), theirs.codes.contiguous().view(torch.uint8))]
        pairs += [
            (a, b)
            for a, b in ((ours.scale, theirs.scale), (ours.groups, theirs.groups))
            if a is not None and b is not None
        ]
        if not all(torch.equal(a, b) for a, b in pairs):
            return False
    return True


def _is_delayed(spec: Spec) -> bool:
    return spec.scaling is not None and spec.scaling.scale == "delayed"


_holders: weakref.WeakSet[FusedCasts] = weakref.WeakSet()
#: ids of what each optimizer updates; weak references would forbid torch.utils.swap_tensors, which autoprec.optim needs
_stepped: weakref.WeakKeyDictionary[Optimizer, frozenset[int]] = weakref.WeakKeyDictionary()


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for casts in _holders:
        casts.stepped()
    _stepped[optimizer] = frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _is_stepped(weight: nn.Parameter) -> bool:
    """Say whether an optimizer has been seen to update this very Parameter."""
    _watch_optimizers()
    return any(id(weight) in ids for ids in _stepped.values())


class _Zeros(threading.local):
    """Cells that begin at 0, cut from one piece of memory for many operands: one memset for all of them."""

    def __init__(self) -> None:
        self.rest: dict[tuple[torch.device, int], Tensor] = {}

    def take(self, count: int, device: torch.device) -> Tensor:
        """Return ``count`` zeros, int32, aligned to 16 bytes, zeroed on the stream that will use them."""
        count += -count % 4
        on_gpu = device.type == "cuda"
        captured = on_gpu and torch.cuda.is_current_stream_capturing()  # a replayed graph must zero them itself
        if count > _CHUNK // 4 or captured:
            return torch.zeros(count, dtype=torch.int32, device=device)
        key = (device, torch._C._cuda_getCurrentRawStream(device.index) if on_gpu else 0)
        rest = self.rest.get(key)
        if rest is None or rest.numel() < count:
            with torch.inference_mode(False):
                rest = torch.zeros(_CHUNK, dtype=torch.int32, device=device)
        self.rest[key] = rest[count:]
        return rest[:count]


_zeros = _Zeros()


def constants_of(spec: Spec, tile: tuple[int, int]) -> dict[str, Any]:
    """Return what every kernel that casts with scales of its own takes: the format, the rule of scales, the tile."""
    limits = {"e4m3": (121, 3, 0x43E00000), "e5m2": (113, 2, 0x47600000)}
    exponent, mantissa, limit = limits[spec.format]
    epsilon = spec.scaling.amax_epsilon if spec.scaling else 0.0
    return {
        "EXPONENT": exponent, "MANTISSA": mantissa, "LIMIT": limit, "FORMAT_MAX": FORMATS[spec.format].max,
        "POWER_OF_2": bool(spec.scaling and spec.scaling.power_of_2), "BLOCK_R": tile[0], "BLOCK_C": tile[1],
        "EPSILON": epsilon,
    }  # fmt: skip


def _grid(x: Tensor, tile: tuple[int, int]) -> tuple[int, int]:
    return -(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1])


def _cast(
    x: Tensor,
    spec: Spec,
    scheme: str,
    uses: tuple[Spec | None, Spec | None],
    inverses: tuple[Tensor, Tensor],
    *,
    largest: tuple[Tensor, Tensor] | None = None,
    delayed: tuple[Tensor, Tensor | None] | None = None,
    tile: tuple[int, int] = _TILE,
    group: int = 1,
) -> tuple[Tensor | None, Tensor | None]:
    """Run ``cast_kernel``; return codes ``[rows, columns]`` and ``[columns, rows]``, in groups padded to whole ones."""
    rows, columns = x.shape
    wide, high = columns + -columns % group, rows + -rows % group
    square = scheme == "square"
    by_row = x.new_empty((high if square else rows, wide), dtype=torch.uint8) if uses[0] else None
    by_column = x.new_empty((wide if square else columns, high), dtype=torch.uint8) if uses[1] else None
    nothing = inverses[0]  # stands for pointers that are not read
    cells = largest or (nothing, nothing)
    scale, seen = delayed or (nothing, None)
    arguments = (
        x, rows, columns, *x.stride(),
        nothing if by_row is None else by_row, nothing if by_column is None else by_column, wide, high, *inverses,
        *cells, scale, nothing if seen is None else seen.view(torch.int32),
    )  # fmt: skip
    constants = constants_of(spec, tile) | {"SCHEME": scheme, "NOTE": seen is not None}
    constants |= {"BY_ROW": uses[0] is not None, "BY_COLUMN": uses[1] is not None}
    constants["EPSILON_BITS"] = struct.unpack("<i", struct.pack("<f", constants["EPSILON"]))[0]
    launch("cast_kernel", _grid(x, tile), arguments, constants | {"num_warps": 8 if group > 1 else 4})
    return by_row, by_column


def _operands(
    x: Tensor,
    uses: tuple[Spec | None, Spec | None],
    codes: tuple[Tensor | None, Tensor | None],
    inverses: tuple[Tensor, Tensor],
) -> Pair:
    rows, columns = x.shape
    made: list[QuantizedOperand | None] = []
    for spec, held, inverse, turned in zip(uses, codes, inverses, (False, True), strict=True):
        if spec is None or held is None:
            made.append(None)
            continue
        stored = held.view(spec.dtype)
        made.append(QuantizedOperand(stored.t() if turned else stored, inverse, spec, rows, columns))
    return made[0], made[1]


def _scaled(x: Tensor, spec: Spec, first: Spec | None, second: Spec | None) -> Pair:
    rows, columns = x.shape
    by_row, by_column = spec.scheme == "row" and first is not None, spec.scheme == "row" and second is not None
    sizes = (int(spec.scheme == "tensor"), rows * by_row, columns * by_column)
    cells = _zeros.take(sum(sizes), x.device)
    whole, along, across = cells, cells, cells[rows * by_row :]
    shape = {"WHOLE": bool(sizes[0]), "BY_ROW": by_row, "BY_COLUMN": by_column}
    tile = {"BLOCK_R": _TILE[0], "BLOCK_C": _TILE[1]}
    launch("largest_kernel", _grid(x, _TILE), (x, rows, columns, *x.stride(), whole, along, across), shape | tile)
    if spec.scheme == "tensor":
        inverse = x.new_empty((1, 1), dtype=torch.float32)
        inverses, largest = (inverse, inverse), (whole, whole)
    else:
        inverses = x.new_empty((rows, 1), dtype=torch.float32), x.new_empty((1, columns), dtype=torch.float32)
        largest = along, across
    codes = _cast(x, spec, spec.scheme, (first, second), inverses, largest=largest)
    return _operands(x, (first, second), codes, inverses)


def _delayed(
    x: Tensor, spec: Spec, first: Spec | None, second: Spec | None, scale: Tensor, seen: Tensor | None
) -> Pair:
    inverse = _zeros.take(1, x.device)[:1].view(1, 1)
    codes = _cast(x, spec, "delayed", (first, second), (inverse, inverse), delayed=(scale, seen))
    wide = inverse.view(torch.float32)
    return _operands(x, (first, second), codes, (wide, wide))


def _blocks(x: Tensor, spec: Spec, first: Spec | None, second: Spec | None) -> Pair:
    """Return operands whose codes and groups are laid out as :mod:`autoprec.numerics.grouped` lays them out."""
    rows, columns = x.shape
    down, along = -(-rows // _GROUP), -(-columns // _GROUP)
    if spec.square:
        squares = x.new_empty((down, along), dtype=torch.float32)
        inverses = squares, squares
        groups = (squares.reshape(down, 1, along, 1),) * 2
    else:
        inverses = x.new_empty((along, rows), dtype=torch.float32), x.new_empty((down, columns), dtype=torch.float32)
        groups = inverses[0].t().unsqueeze(-1), inverses[1].unsqueeze(1)
    uses, scheme = (first, second), "square" if spec.square else "block"
    codes = _cast(x, spec, scheme, uses, inverses, tile=(_GROUP, _GROUP), group=_GROUP)
    made: list[QuantizedOperand | None] = [None, None]
    for index, (use, held) in enumerate(zip(uses, codes, strict=True)):
        if use is None or held is None:
            continue
        stored = held.view(use.dtype)
        if spec.square:
            shape = (down, _GROUP, along, _GROUP)
            view = stored.view(shape) if index == 0 else stored.view(*shape[2:], *shape[:2]).permute(2, 3, 0, 1)
        elif index == 0:
            view = stored.view(rows, along, _GROUP)
        else:
            view = stored.view(columns, down, _GROUP).permute(1, 2, 0)
        made[index] = QuantizedOperand(view, None, use, rows, columns, groups[index])
    return made[0], made[1]
