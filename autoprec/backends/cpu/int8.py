"""Casts and products of INT8 layers on a CPU: what :mod:`autoprec.numerics` computes, bit for bit, in fewer passes.

An operand is read twice: once for its magnitudes, once to write the codes of both GEMMs that use it. With one scale a
tensor both use the same codes; with a scale a row each has its own, along its sum. ``torch._int_mm`` takes transposed
operands as they lie, at the same speed; a CPU with AVX2 and without VNNI multiplies by ``product.c``, exactly too. The
int32 sums are widened and rescaled in their own memory. In a graph of
``torch.compile`` the casts are one operator of a library (``autoprec::int8_codes``) and the rescaling is the
compiler's. What is not a plain float32 or bfloat16 matrix on a CPU is left to torch's operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.backends.cpu.library import Rule, library
from autoprec.numerics.gemm import LONGEST_SUM, exact_sums, integer_matmul, product_scales
from autoprec.numerics.linear import Pair
from autoprec.numerics.operand import QuantizedOperand, QuantizerState, Spec
from autoprec.numerics.plan import GemmStep, Multiply, multiply_emulated
from autoprec.numerics.rounding import number
from autoprec.policy import LayerPlan
from autoprec.precision.formats import FORMATS
from autoprec.precision.recipes import GEMMS, Gemm

_SUFFIX = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_PLAIN = (Tensor, nn.Parameter)
#: of product.c: columns of a panel, and bytes of space for each of them
_PANEL, _PANEL_BYTES = 16, 512 * 2


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _is_int8(spec: Spec | None) -> bool:
    return spec is not None and FORMATS[spec.format].torch_name == "int8" and not spec.stochastic


def _whole(x: Tensor, how: Rule) -> tuple[Tensor, Tensor]:
    """Return the codes ``[rows, columns]`` and the inverse scale ``[1, 1]`` of a matrix of contiguous rows."""
    codes, inverse = x.new_empty(x.shape, dtype=torch.int8), x.new_empty((1, 1), dtype=torch.float32)
    run = getattr(library(), f"whole_{_SUFFIX[x.dtype]}")
    run(x.data_ptr(), *x.shape, x.stride(0), how, inverse.data_ptr(), codes.data_ptr(), torch.get_num_threads())
    return codes, inverse


def _lines(x: Tensor, along: Rule | None, across: Rule | None) -> list[Tensor | None]:
    """Return codes and inverse scales ``[rows, 1]``, then those ``[1, columns]``; None for what is not asked for."""
    rows, columns = x.shape
    threads = torch.get_num_threads()
    out: list[Tensor | None] = []
    for rule, shape in ((along, (rows, 1)), (across, (1, columns))):
        wanted = rule is not None
        out.append(x.new_empty(x.shape, dtype=torch.int8) if wanted else None)
        out.append(x.new_empty(shape, dtype=torch.float32) if wanted else None)
    space = x.new_empty(rows + (threads * columns if across is not None else 0), dtype=torch.int32)
    rules = along or Rule(), across or Rule()
    pointers = [_pointer(out[i]) for i in (1, 0, 3, 2)]
    run = getattr(library(), f"lines_{_SUFFIX[x.dtype]}")
    run(x.data_ptr(), rows, columns, x.stride(0), *rules, *pointers, space.data_ptr(), threads)
    return out


def _cast_pair(x: Tensor, first: Spec | None, second: Spec | None) -> Pair:
    """Cast a matrix for one use or two, in one call where that is possible."""
    rows, columns = x.shape
    if first is not None and second is not None and not _together(first, second):
        return _cast_pair(x, first, None)[0], _cast_pair(x, None, second)[1]
    traced = torch.compiler.is_compiling()
    made: list[QuantizedOperand | None] = []
    if not traced and x.stride(1) != 1 and x.stride(0) == 1:  # a transpose: cast what it is the transpose of
        for one in _cast_pair(x.t(), second, first):
            scale = None if one is None or one.scale is None else one.scale.t()
            made.append(None if one is None else QuantizedOperand(one.codes.t(), scale, one.spec, rows, columns))
        return made[1], made[0]
    scheme = next(spec.scheme for spec in (first, second) if spec is not None)
    run: Any = torch.ops.autoprec.int8_codes if traced else _int8_codes
    parts = run(x, scheme, _numbers(first), _numbers(second))
    for spec, at in zip((first, second), (0, 0 if scheme == "tensor" or first is None else 2), strict=True):
        made.append(None if spec is None else QuantizedOperand(parts[at], parts[at + 1], spec, rows, columns))
    return made[0], made[1]


def _together(first: Spec, second: Spec) -> bool:
    """Say whether one call casts for both: the same codes for a tensor, or a scale for each row and each column."""
    return first == second if "tensor" in (first.scheme, second.scheme) else True


@dataclass(frozen=True, slots=True)
class Int8Casts:
    """Casts the operands of one layer; see :class:`autoprec.numerics.linear.Casts`."""

    state: QuantizerState

    def pair(self, x: Tensor, first: Spec | None, second: Spec | None, operand: str) -> Pair:
        """Quantise ``[rows, columns]`` for a GEMM that sums along rows, and for one that sums along columns.

        Args:
            x: ``[rows, columns]``, float32, bfloat16 or float16.
            first, second: how, for each of the two GEMMs; None where a GEMM does not need it.
            operand: ``input``, ``weight`` or ``grad_output``.
        """
        uses = [spec if _is_int8(spec) else None for spec in (first, second)]
        # where ranks share scales they agree on the largest value before anything is cast
        if uses == [None, None] or x.device.type != "cpu" or x.dtype not in _SUFFIX or self.state.groups.get(operand):
            return None, None
        plain = torch.compiler.is_compiling() or (type(x) in _PLAIN and x.numel() > 0)
        return _cast_pair(x, *uses) if plain else (None, None)


def _numbers(spec: Spec | None) -> list[float]:
    return [] if spec is None else [number(spec.format), spec.rule.epsilon, 1.0 if spec.rule.power_of_2 else 0.0]


def _rule(values: list[float]) -> Rule | None:
    return Rule(values[0], values[1], int(values[2])) if values else None


def _int8_codes(x: Tensor, scheme: str, along: list[float], across: list[float]) -> list[Tensor]:
    """Return codes and inverse scales of a matrix, for each rule that is not empty; once where a tensor has one."""
    x = x if x.stride(1) == 1 else x.contiguous()
    if scheme == "tensor":
        return list(_whole(x, _rule(along or across) or Rule()))
    return [part for part in _lines(x, _rule(along), _rule(across)) if part is not None]


def _int8_shapes(x: Tensor, scheme: str, along: list[float], across: list[float]) -> list[Tensor]:
    rows, columns = x.shape
    shapes = [(1, 1)] if scheme == "tensor" else [(rows, 1)] * bool(along) + [(1, columns)] * bool(across)
    out = []
    for shape in shapes:
        out += [x.new_empty((rows, columns), dtype=torch.int8), x.new_empty(shape, dtype=torch.float32)]
    return out


def int8_multiply(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, out_dtype: torch.dtype) -> Tensor:
    """Multiply two INT8 operands; the int32 sums are widened and rescaled where they lie.

    Args:
        a, b: operands, 2-D.
        step: which axes are summed.
        out_dtype: of the product.

    Returns:
        ``[M, N]`` in ``out_dtype``.
    """
    left = a.codes if step.axes[0] == 1 else a.codes.t()
    right = b.codes if step.axes[1] == 0 else b.codes.t()
    scales = product_scales(a, b, step.axes)
    rows, columns = left.shape[0], right.shape[1]
    plain = a.codes.device.type == "cpu" and out_dtype in _SUFFIX and 0 < left.shape[1] <= LONGEST_SUM
    if not plain or (len(scales) == 2 and [scale.numel() for scale in scales] != [rows, columns]):
        return multiply_emulated(a, b, step, out_dtype)
    if torch.compiler.is_compiling():
        out: Tensor = torch.ops.autoprec.int8_product(left, right, scales, out_dtype is torch.bfloat16)
        return out
    if type(a.codes) is not Tensor:
        return multiply_emulated(a, b, step, out_dtype)
    return _int8_product(left, right, scales, out_dtype is torch.bfloat16)


def int8_sums(left: Tensor, right: Tensor) -> Tensor:
    """Multiply codes ``[M, K]`` and ``[K, N]`` exactly, by what this CPU is fastest with; K is at most 2**17.

    Returns the int32 sums ``[M, N]``. The library must be there.
    """
    if exact_sums(left, right):
        return torch._int_mm(left, right)
    if not hasattr(library(), "product"):
        return integer_matmul(left, right).to(torch.int32)
    out: Tensor = torch.ops.autoprec.int_mm(left, right)  # an operator: a recorded step has to show it
    return out


def _int_mm(left: Tensor, right: Tensor) -> Tensor:
    functions: Any = library()
    (rows, inner), columns = left.shape, right.shape[1]
    out = left.new_empty((rows, columns), dtype=torch.int32)
    space = left.new_empty((columns + _PANEL) * _PANEL_BYTES, dtype=torch.int8)
    aligned = space.data_ptr() + -space.data_ptr() % 32
    operands = (left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride())
    functions.product(*operands, rows, columns, inner, out.data_ptr(), aligned, torch.get_num_threads())
    return out


def _int8_product(left: Tensor, right: Tensor, scales: list[Tensor], narrow: bool) -> Tensor:
    """Multiply codes ``[M, K]`` and ``[K, N]``; scales are one, or one of each row and one of each column."""
    functions: Any = library()
    rows, columns, threads = left.shape[0], right.shape[1], torch.get_num_threads()
    out = int8_sums(left, right).view(torch.float32)
    held = [scale.contiguous() for scale in scales]
    of_rows, of_columns = (held[0].data_ptr(), held[1].data_ptr()) if len(held) == 2 else (None, None)
    whole = 1.0 if of_rows else float(held[0])
    functions.rescale(out.data_ptr(), rows, columns, of_rows, of_columns, whole, threads)
    if not narrow:
        return out
    narrowed = out.new_empty((rows, columns), dtype=torch.bfloat16)
    functions.narrow(out.data_ptr(), out.numel(), narrowed.data_ptr(), threads)
    return narrowed


def _int_mm_shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.int32)


def _int8_product_shape(left: Tensor, right: Tensor, _scales: list[Tensor], narrow: bool) -> Tensor:
    dtype = torch.bfloat16 if narrow else torch.float32
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


# as operators of a library, which a graph calls without looking inside; custom_op's own wrapper takes ten times as long
_OPERATORS: Any = torch.library.Library(  # type: ignore[no-untyped-call]
    "autoprec", "FRAGMENT"
)
for _schema, _run, _shape in (
    ("int8_codes(Tensor x, str scheme, float[] along, float[] across) -> Tensor[]", _int8_codes, _int8_shapes),
    ("int_mm(Tensor a, Tensor b) -> Tensor", _int_mm, _int_mm_shape),
    ("int8_product(Tensor a, Tensor b, Tensor[] scales, bool narrow) -> Tensor", _int8_product, _int8_product_shape),
):
    _name = _OPERATORS.define(_schema)
    _OPERATORS.impl(_name, _run, "CPU")
    torch.library.register_fake(f"autoprec::{_name}", _shape, lib=_OPERATORS)


def int8_parts(plan: LayerPlan, module: nn.Module, state: QuantizerState) -> dict[str, Any]:
    """Return what a :class:`LinearExecution` of a plan with INT8 GEMMs runs them with on a CPU; nothing for others.

    Compiles the library where that has not been done yet.

    Args:
        plan: a recipe per GEMM.
        module: whose Parameters say on which device it is.
        state: what the layer remembers.
    """
    recipes = {gemm: plan.recipe(gemm) for gemm in GEMMS}
    integer: list[Gemm] = [gemm for gemm, recipe in recipes.items() if recipe is not None and recipe.format == "int8"]
    here = all(parameter.device.type == "cpu" for parameter in module.parameters())
    if not integer or not here or library() is None:
        return {}
    multiply: dict[Gemm, Multiply] = dict.fromkeys(integer, int8_multiply)
    return {"multiply": multiply, "casts": Int8Casts(state)}
