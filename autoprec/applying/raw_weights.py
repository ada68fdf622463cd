"""GEMMs that no layer module runs: weights multiplied by a function inside some module's forward.

A torch-function mode, active only inside the forward of the module that holds such weights, recognises them when
``F.linear``, ``matmul``, ``@``, ``mm``, ``bmm``, ``addmm``, ``baddbmm``, ``einsum`` or ``grouped_mm`` multiplies by
them, also through a view (``weight[expert]``, ``weight.t()``) or a cast copy (``weight.to(x.dtype)``), and runs the
product through the weight's execution. An einsum that is not a matrix product (an index summed or repeated in one
operand alone) is left alone; the audit then says that the weight was never seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoprec.applying.compiling import only_in_graphs
from autoprec.applying.swap import execution_of
from autoprec.applying.units import Unit
from autoprec.numerics.einsum import EinsumProduct, reversed_terms
from autoprec.numerics.execution import Execution
from autoprec.numerics.sharded import is_dtensor

_MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm)
_ADDMM = (torch.addmm, torch.baddbmm)
#: What a grouped product may be given by name.
_GROUPED = {"offs", "bias", "out_dtype"}
#: What returns a weight in another dtype or layout of memory, its values otherwise the same.
_COPIES = frozenset(
    {Tensor.to, Tensor.type_as, Tensor.type, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.contiguous}
)

_VIEW_NAMES = (
    *("t", "transpose", "swapaxes", "permute", "reshape", "select", "narrow", "unbind", "chunk", "split", "squeeze"),
    *("unsqueeze", "adjoint", "movedim"),
)
#: What returns a view of a weight, or several.
_VIEWS = frozenset(
    {getattr(home, name) for home in (torch, Tensor) for name in _VIEW_NAMES if hasattr(home, name)}
    | {Tensor.view, Tensor.__getitem__, Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
)


class WeightExecutions:
    """Installed in a module that holds several weights: their executions, by parameter name."""

    def __init__(self, module: nn.Module, executions: dict[str, Execution]) -> None:
        self.module, self.executions = module, executions

    def describe(self) -> str:
        """Return what runs each of the module's weights, in words."""
        return "; ".join(f"{name}: {execution.describe()}" for name, execution in self.executions.items())


def unit_execution(unit: Unit) -> Any:
    """Return what runs one tunable unit, or None where it runs as the script wrote it."""
    found = execution_of(unit.module)
    if isinstance(found, WeightExecutions):
        return found.executions.get(unit.parameter)
    return found


def _let_dynamo_dispatch() -> None:
    """Make ``torch.compile`` hand grouped products to torch-function modes, as Python does.

    Dynamo asks a table that leaves out every function whose name begins with an underscore, and runs those past the
    mode without a word (torch 2.11 and 2.13).
    """
    table = torch.overrides.get_overridable_functions().get(torch)
    if table is not None and torch._grouped_mm not in table:
        table.append(torch._grouped_mm)
    dynamo = sys.modules.get("torch._dynamo.variables.torch")
    if dynamo is not None:  # its copy of the table may have been made already
        dynamo.get_overridable_functions().add(torch._grouped_mm)


class RawWeightExecutions(WeightExecutions):
    """The executions of weights that functions multiply by."""

    def __init__(self, module: nn.Module, executions: dict[str, Execution]) -> None:
        super().__init__(module, executions)
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            _let_dynamo_dispatch()

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's forward; products with its weights run under the policy.

        Args:
            forward: the module's own.
            args, kwargs: of the call.
        """
        weights = [(one, made) for name, made in self.executions.items() for one in _held(getattr(self.module, name))]
        before = len(_TRACED)
        with WeightMode(weights, self.module.training):
            out = forward(*args, **kwargs)
        while len(_TRACED) > before:
            _TRACED.pop()
        return out


def _held(weight: Any) -> Iterator[Tensor]:
    """Yield a weight, and the experts among it that this rank has: ``to_local`` gives scripts a view of them."""
    yield weight
    if is_dtensor(weight) and weight.ndim == 3 and all(p.is_replicate() or p.is_shard(0) for p in weight.placements):
        yield weight._local_tensor


def _may_be_turned(held: Tensor, other: Tensor) -> bool:
    """Say whether a tensor may be a weight's ``T``, ``mT`` or ``H``, or it; shapes may be symbols, which none sorts."""
    if held.ndim != other.ndim or held.ndim < 2:
        return False
    (rows, columns), last = held.shape[-2:], tuple(other.shape[-2:])
    return last in ((rows, columns), (columns, rows))


#: What graphs being traced made of weights. Not in the mode, which Dynamo cannot write to once it has left a graph.
_TRACED: list[tuple[Tensor, Any]] = []


@only_in_graphs
class WeightMode(TorchFunctionMode):
    """Runs products with known weights through their executions.

    ``known`` holds the weights and what was made of them. In a traced graph no tensor can be asked for its base or its
    id, so views are followed as they are made.
    """

    def __init__(self, weights: Sequence[tuple[Tensor, Any]], training: bool) -> None:
        super().__init__()
        self.known, self.training = list(weights), training
        self.ids: dict[int, Any] = {}

    def _execution(self, weight: Any) -> Any:
        if not isinstance(weight, Tensor):
            return None
        if torch.compiler.is_compiling():
            unlike = True
            for known in (self.known, _TRACED):
                for held, execution in known:
                    if held is weight:
                        return execution
                    unlike = unlike and not _may_be_turned(held, weight)
            if unlike:
                return None
            weight._is_view()  # ends the graph: this may be a weight, as Dynamo hands w.T, w.mT and w.H to no mode
        if len(self.ids) != len(self.known):  # not where it begins, which may be in a graph
            self.ids = {id(held): execution for held, execution in self.known}
        found = self.ids.get(id(weight))
        if found is None and weight._is_view() and weight._base is not None:
            found = self.ids.get(id(weight._base))
        return found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # a Python method that asks super(), which Dynamo cannot trace here
            return args[0].unflatten(*args[1:], **kwargs)
        if func in _COPIES or (torch.compiler.is_compiling() and func in _VIEWS):
            return self._made_of(args[0], func(*args, **kwargs))
        out = None
        if func is F.linear:
            out = self._linear(*args, **kwargs)
        elif func in _MATMUL and len(args) == 2:
            out = self._matmul(args[0], args[1], None)
        elif func in _ADDMM and len(args) == 3 and not kwargs:
            out = self._matmul(args[1], args[2], args[0])
        elif func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
            out = self._einsum(*args)
        elif func is torch._grouped_mm and len(args) >= 2 and not kwargs.keys() - _GROUPED:
            out = self._grouped(*args, **kwargs)
        return func(*args, **kwargs) if out is None else out

    def _linear(self, input: Any, weight: Any, bias: Tensor | None = None) -> Tensor | None:
        execution = self._execution(weight)
        if execution is None or weight.ndim != 2:
            return None
        out: Tensor = execution(input, weight, bias, training=self.training)
        return out

    def _made_of(self, weight: Any, made: Any) -> Any:
        """Know a copy or a view of a weight for that weight, as scripts make one that cast their weights themselves."""
        execution = self._execution(weight)
        if execution is not None:
            for one in made if isinstance(made, (tuple, list)) else (made,):
                if isinstance(one, Tensor) and one is not weight and one.is_floating_point():
                    if torch.compiler.is_compiling():
                        _TRACED.append((one, execution))
                    else:
                        self.known.append((one, execution))  # held, so that no other tensor gets its id
        return made

    def _einsum(self, equation: str, first: Any, second: Any) -> Tensor | None:
        """A product written as an equation; None when neither operand is one of ours, or it is not a matrix product."""
        execution = self._execution(second)
        if execution is None:
            first, second, execution = second, first, self._execution(first)
            equation = reversed_terms(equation)
        if execution is None or not isinstance(first, Tensor):
            return None
        product = EinsumProduct.parse(equation, first.ndim, second.ndim)
        return None if product is None else product.run(first, second, partial(execution, training=self.training))

    def _matmul(self, x: Any, weight: Any, bias: Tensor | None) -> Tensor | None:
        """``x @ weight`` with weight ``[in, out]`` or ``[experts, in, out]``; None when it is not one of ours."""
        execution = self._execution(weight)
        if execution is None or not isinstance(x, Tensor):
            return None
        if weight.ndim == 2 and x.ndim >= 2 and (bias is None or bias.ndim == 1):
            out: Tensor = execution(x, weight.t(), bias, training=self.training)
            return out
        if weight.ndim == 3 and x.ndim == 3 and x.shape[0] == weight.shape[0] and (bias is None or bias.ndim == 3):
            # every expert has its own scales, as grouped GEMMs have
            parts = [
                execution(one, w.t(), None, training=self.training)
                for one, w in zip(x.unbind(0), weight.unbind(0), strict=True)
            ]
            stacked = torch.stack(parts)
            return stacked if bias is None else stacked + bias
        return None

    def _grouped(self, x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor | None:
        """Rows of ``x`` times the weight of their expert, ``[experts, in, out]``; None when it is not one of ours."""
        execution = self._execution(weight)
        if execution is None or bias is not None or weight.ndim != 3:
            return None
        out: Tensor | None
        if x.ndim == 2 and offs is not None:
            out = execution.grouped(x, weight, offs, training=self.training)
        elif x.ndim == 3 and offs is None:
            out = self._matmul(x, weight, None)
        else:
            return None
        return out if out is None or out_dtype is None else out.to(out_dtype)
