"""Records one live training step: a dispatch mode, module hooks and autograd sequence numbers, nothing else.

How a backward operator finds its layer: autograd gives every node the sequence number that was current when the
forward operator ran; inside backward the running node tells that number back. It holds through custom functions,
recurrent layers, in-place operators and both kinds of checkpointing, where module hooks on the backward pass do not.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.graph.analysis.memory import multiplied_matrices, stand_in, step_of_twin
from autoprec.graph.analysis.modules import ModelNames, on_this_rank
from autoprec.graph.analysis.rules import builtin_rules
from autoprec.graph.places import caller
from autoprec.graph.report import MULTIPLYING, GraphReport, Operator
from autoprec.graph.saved import SavedTensors, StorageTable, address_of
from autoprec.graph.trace import BETWEEN, SCRIPT, Call, Ref, Trace, Value, bare_name, dtype_name
from autoprec.numerics.einsum import is_matrix_product
from autoprec.optim.stepping.modes import never_compiled
from autoprec.support.living import uncollected

_SKIPPED = frozenset({"prim", "profiler"})
_NAMED_FUNCTIONS: dict[Any, str] = {
    torch.einsum: "einsum",
    torch.nn.functional.scaled_dot_product_attention: "scaled_dot_product_attention",
}
_graph_task = torch._C._current_graph_task_id
_autograd_node = torch._C._current_autograd_node
_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


@functools.cache
def _is_wrapper(cls: type) -> bool:
    """Say whether a tensor class (nested, DTensor, quantised) consists of plain tensors that its operators work on."""
    return hasattr(cls, "__tensor_flatten__") and cls is not FakeTensor


def _holds_shards(module: nn.Module) -> bool:
    """Say whether a parameter of a module's own is a rank's part of one (FSDP2, tensor parallelism)."""
    return any(hasattr(parameter, "to_local") for parameter in module._parameters.values())


def _filled(tensor: torch.Tensor) -> float:
    """Return the share of a tensor's entries that is stored: below 1 for a sparse one, whose products count as many."""
    if tensor.layout is torch.strided or not tensor.numel():
        return 1.0
    try:  # compressed rows, columns or blocks hold `values`, coordinates their own until they are coalesced
        stored = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    except RuntimeError:  # a layout of a library that stores its entries elsewhere
        return 1.0
    return min(1.0, stored.numel() / tensor.numel())


class _Functions(TorchFunctionMode):
    """Remembers which of a few torch functions is running: their operators alone do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.running = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _NAMED_FUNCTIONS or self.running or (func is torch.einsum and is_matrix_product(args)):
            return func(*args, **(kwargs or {}))
        self.running = _NAMED_FUNCTIONS[func]
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.running = ""


class StepRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager around one live step, from the first training forward to just before ``optimizer.step``.

    Args:
        model: the model as the script calls it; wrappers (DDP, compile, FSDP) are looked through.
        optimizers: their state is counted in ``memory``; state that does not exist yet is predicted.

    Attributes:
        paused: operators are not recorded.

    Tensors are not kept alive and nothing is written into the model: recording changes no bit of the step.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, *, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = ModelNames(model)
        self.optimizers = tuple(optimizers)
        self.trace = Trace()
        self._stack: list[tuple[str, int]] = []
        self._entered = contextlib.ExitStack()
        self._functions = _Functions()
        self._storages = StorageTable()
        self._saved = SavedTensors(self._storages)
        self._known: dict[tuple[Any, ...], int] = {}
        self.paused = False
        self.began_at = 0  # the number of the next autograd node when recording began
        self._last_task = -1
        self._plain: set[int] = set()  # graph tasks whose operators run without gradients
        self._after_backward = False
        self._sharded: tuple[nn.Module, str] | None = None  # entered last, its parameters not gathered yet
        self._all_fake = any(isinstance(tensor, FakeTensor) for _, tensor in self.names.tensors())
        self._register_parameters()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch's wrapper would import its compiler on the first operator (seconds)."""
        return False

    # -- entering and leaving -------------------------------------------------------------------------------------

    def _register_parameters(self) -> None:
        for name, whole in self.names.tensors():
            # the operators of a sharded layer work on this rank's part
            tensor = on_this_rank(whole)
            key = self._storages.key(tensor)
            if key not in self._known:
                origin = "parameter" if name in self.names.parameters else "buffer"
                self._known[key] = self._new_value(tensor, origin, name=name)
                self._storages.exclude(tensor)

    def name_parameters(self, names: ModelNames) -> None:
        """Take other tensors for the parameters: those of a model whose weights are new ones in each step."""
        self.names = names
        for name, tensor in names.parameters.items():
            value = self.value_of(tensor)
            if value >= 0 and self.trace.values[value].producer < 0:
                self.trace.values[value].origin, self.trace.values[value].name = "parameter", name
                self._storages.exclude(tensor)

    def push_root(self) -> None:
        """Tell the recorder that the root's forward has begun (its pre-hook passed before recording started)."""
        self._stack.append(("", _graph_task()))
        self._count("")
        self._learn_stand_ins(self.names.root, "")

    def __enter__(self) -> StepRecorder:
        entered = self._entered
        entered.callback(self._finish)
        entered.enter_context(warnings.catch_warnings())
        entered.enter_context(uncollected(within=100_000))
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        entered.callback(register_module_forward_pre_hook(self._enter_module).remove)
        entered.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
        self.began_at = _sequence_number()
        self._saved.start()
        entered.callback(self._saved.stop)
        entered.enter_context(self._functions)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, value, traceback)  # type: ignore[no-untyped-call]
        self._entered.close()

    def _finish(self) -> None:
        self._count_saved()
        self._storages.release()
        self._known.clear()

    @uncollected()
    def report(self) -> GraphReport:
        """Interpret the record: classes, layers, groups, FLOPs and memory."""
        from autoprec.graph.analysis.interpret import interpret

        made = interpret(self.trace, self.names, builtin_rules(), self.optimizers)
        return replace(made, updating=updating_operators(self.optimizers, self.names, len(made.operators)))

    def graph(self) -> torch.fx.Graph:
        """Return the step as a ``torch.fx.Graph`` (see :mod:`autoprec.graph.fxgraph`)."""
        from autoprec.graph.fxgraph import to_fx

        return to_fx(self.trace, self.report())

    # -- modules --------------------------------------------------------------------------------------------------

    def _count(self, name: str) -> None:
        self.trace.calls_of[name] = self.trace.calls_of.get(name, 0) + 1
        self._after_backward = False

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        task = _graph_task()
        name = self.names.name_of(module)
        # the user's model inside DDP's wrapper, which has its name; one that is not the model's (Fabric's, a module
        # that adds the loss) has a name of its own
        nested_root = name == "" and any(outer == "" for outer, _ in self._stack)
        self._stack.append((name, task))
        if task == -1 and not nested_root:
            self._count(name)
        self._learn_gathered()
        self._learn_stand_ins(module, name)
        self._sharded = (module, name) if _holds_shards(module) else None

    def _learn_gathered(self) -> None:
        """Know what FSDP2 has gathered in the pre-hook of the module that was entered last: it runs after ours."""
        if self._sharded is not None and not _holds_shards(self._sharded[0]):
            module, name = self._sharded
            self._sharded = None
            self._learn_stand_ins(module, name)

    def _learn_stand_ins(self, module: nn.Module, name: str) -> None:
        """Know the tensors that stand for a module's parameters during ``functional_call`` by the parameters' names."""
        for attribute, tensor in module._parameters.items():
            full = f"{name}.{attribute}" if name else attribute
            own = self.names.parameters.get(full)
            if tensor is None or own is None or tensor is own or isinstance(own, UninitializedParameter):
                continue
            key = self._storages.key(on_this_rank(tensor))
            known = self._known.get(key)
            gathered = hasattr(own, "to_local") and isinstance(tensor, nn.Parameter)  # FSDP2's, from all ranks
            if known is None or gathered or self.trace.values[known].origin in ("input", "foreign"):
                canonical = self.names.canonical(full)
                self._known[key] = self._new_value(on_this_rank(tensor), "parameter", name=canonical)
                self._storages.exclude(on_this_rank(tensor))

    def _leave_module(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if self._stack:
            self._stack.pop()
        elif self.names.name_of(module) == "" and not self.trace.calls_of.get(""):
            self._root_was_running()

    def _root_was_running(self) -> None:
        """The root's forward began before recording did: what looked like the script's operators were the root's."""
        self.trace.calls_of[""] = 1
        for call in self.trace.calls:
            if call.module == SCRIPT and call.phase == "forward":
                call.module = ""

    # -- operators ------------------------------------------------------------------------------------------------

    @never_compiled
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if any(map(_is_wrapper, types)):
            return NotImplemented  # the subclass takes it apart; its inner operators come back here
        namespace = getattr(func, "namespace", "")
        if namespace == "profiler" and args and str(args[0]).startswith("Optimizer.zero_grad"):
            self.trace.zeroed_late |= bool(self.trace.calls) and not self.trace.backwards
        if namespace in _SKIPPED or (not self._all_fake and any(issubclass(one, FakeTensor) for one in types)):
            return func(*args, **kwargs)  # DTensor asks shapes of whole tensors of fake ones: nothing is computed
        self._learn_gathered()
        before = self._recorded(func, self._before, func, args, kwargs)
        out = self._run(func, args, kwargs)
        if before is not None:
            self._recorded(func, self._after, func, before, out)
        return out

    def _recorded(self, func: Any, record: Callable[..., Any], *args: Any) -> Any:
        try:
            return record(*args)
        except Exception as error:  # recording must never end the user's script
            self._note(f"{func}: not recorded ({type(error).__name__}: {error})")
            return None

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def _note(self, text: str) -> None:
        if len(self.trace.notes) < 50 and text not in self.trace.notes:
            self.trace.notes.append(text)

    def _before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        task = _graph_task()
        node, made, within, again = "", -1, -1, task != -1 and self._runs_again(func, task)
        if task == -1:
            seq = _sequence_number() - 1
        else:
            running, seq = _autograd_node(), -1
            if self._last_task == -1:
                self._backward_begins()
            if task not in self.trace.parents:
                self.trace.parents[task] = self._last_task
            if again:
                seq = _sequence_number() - 1
                within = -1 if running is None else running._sequence_nr()
            elif running is not None:
                node = running.name()
                seq = running._sequence_nr()
                made = _sequence_number() - 1 if torch.is_grad_enabled() else -1
        self._last_task = task
        ins: list[int] = []
        named = {k: self._template(v, ins) for k, v in kwargs.items()}
        return self._template(args, ins), named, ins, *self._where(task, again), seq, task, node, made, within

    def _runs_again(self, func: Any, task: int) -> bool:
        """Say whether a forward runs again inside backward: in a module, or with gradients where backward has none."""
        if self._stack and self._stack[-1][1] != -1:
            return True
        if torch.is_grad_enabled():
            return task in self._plain
        if func is not torch.ops.aten.detach.default:  # of saved tensors, in any backward pass
            self._plain.add(task)
        return False

    def _template(self, argument: Any, ins: list[int]) -> Any:
        if isinstance(argument, torch.Tensor):
            value = self._lookup(argument)
            ins.append(value)
            return Ref(value)
        if isinstance(argument, (list, tuple)):
            items = [self._template(item, ins) for item in argument]
            return items if isinstance(argument, list) else tuple(items)
        return argument

    def _lookup(self, tensor: torch.Tensor) -> int:
        key = self._storages.key(tensor)
        found = self._known.get(key)
        if found is not None and not (type(tensor) is nn.Parameter and self.trace.values[found].origin == "op"):
            return found
        name = self.names.name_of_parameter(tensor) if type(tensor) is nn.Parameter else ""
        if found is None or name:  # a parameter that was filled during the step (lazy layers) is the parameter
            origin = "foreign" if isinstance(tensor, nn.Parameter) else "input"
            found = self._new_value(tensor, "parameter" if name else origin, name=name)
            self._known[key] = found
            self._storages.exclude(tensor)
        return found

    def _new_value(self, tensor: torch.Tensor, origin: str, name: str = "", producer: int = -1, slot: int = 0) -> int:
        shape = tuple(int(size) for size in tensor.shape)
        filled = _filled(tensor)
        count = int(tensor.element_size() * prod(shape) * filled)
        storage, dtype = address_of(tensor), dtype_name(tensor.dtype)
        self.trace.values.append(
            Value(shape, dtype, count, origin, name, producer, slot, tensor.requires_grad, storage, filled)
        )
        return len(self.trace.values) - 1

    def _after(self, func: Any, before: tuple[Any, ...], out: Any) -> None:
        args, kwargs, ins, module, phase, seq, task, node, made, within = before
        index = len(self.trace.calls)
        outs: list[int] = []
        items = out if isinstance(out, (list, tuple)) else (out,)
        for slot, item in enumerate(items):
            for tensor in item if isinstance(item, (list, tuple)) else (item,):
                if isinstance(tensor, torch.Tensor):
                    value = self._new_value(tensor, "op", producer=index, slot=slot)
                    self._known[self._storages.key(tensor)] = value
                    outs.append(value)
        op = func._schema.name if hasattr(func, "_schema") else f"higher_order::{getattr(func, '_name', func)}"
        function = self._functions.running
        twice = phase == "backward" and torch.is_grad_enabled()
        where = (module, phase, seq, task, node, function, twice, made, within)
        # in a backward pass only what ranks exchange has a line of its own, that of a communication hook, and what is
        # added up: a hook of the script may do that
        adds = "AccumulateGrad" in node and bare_name(op) in ("add", "_foreach_add")
        own = task == -1 or phase == "recompute" or adds or op.startswith("c10d::")
        line = caller(own=adds) if own else ""
        self.trace.calls.append(Call(index, func, op, args, kwargs, tuple(ins), tuple(outs), *where, line))

    def value_of(self, tensor: torch.Tensor) -> int:
        """Return the index in the trace of the value of a tensor of any shape, -1 where it was not seen."""
        return self._known.get(self._storages.key(tensor), -1)

    def _where(self, task: int, again: bool) -> tuple[str, str]:
        if task == -1:
            if self._stack:
                return self._stack[-1][0], "forward"
            return SCRIPT, "update" if self._after_backward else "forward"
        if again:
            return self._stack[-1][0] if self._stack and self._stack[-1][1] != -1 else BETWEEN, "recompute"
        return "", "backward"

    def _backward_begins(self) -> None:
        for call in reversed(self.trace.calls):  # what followed an earlier backward was a further loss, no update
            if call.phase == "backward":
                break
            if call.phase == "update":
                call.phase = "forward"
        if not self._stack:
            self._after_backward = True
        self.trace.backwards += 1
        self.trace.live_bytes = max(self.trace.live_bytes, self._storages.live_bytes())
        self._count_saved()

    def _count_saved(self) -> None:
        saved = self._saved.take()
        if sum(saved.values()) > self.trace.saved_bytes:
            self.trace.saved, self.trace.saved_bytes = saved, sum(saved.values())


#: The largest matrix on whose zeros a step is tried out that cannot run without data.
_MOST_VALUES = 1 << 20


def updating_operators(
    optimizers: Sequence[torch.optim.Optimizer], names: ModelNames, before: int = 0
) -> tuple[Operator, ...]:
    """Return the operators of optimizers' steps that multiply matrices, matrix by matrix, numbered from ``before`` on.

    A twin of the optimizer is recorded on stand-ins without data, once for each shape. Of an optimizer whose step
    cannot run on one, and of one that multiplies nothing, there are none.

    Args:
        optimizers: of the script.
        names: of the parameters.
        before: how many operators the report has already.
    """
    rules, rows, recorded = builtin_rules(), list[Operator](), dict[tuple[Any, ...], tuple[Operator, ...]]()
    for optimizer, group, matrix in multiplied_matrices(optimizers):
        key = (id(group), matrix.shape, matrix.dtype)
        if key not in recorded:
            recorded[key] = _of_twin(optimizer, group, matrix)
        reason = (
            f"of {type(optimizer).__name__}'s step: optimizer.products says in which dtype matrices are multiplied, "
            "optimizer.exp_avg how a momentum is stored"
        )
        name, first = names.name_of_parameter(matrix), before + len(rows)
        rows += (
            replace(
                row,
                name=f"{row.name.rpartition('_')[0]}_{first + index}",
                module=name.rpartition(".")[0],
                phase="optimizer",
                cls=rules.class_of(row.op) or row.cls,  # a product of two activations it is not
                precision="keep",
                reason=reason,
                weight=name,
                role="",
                inputs=tuple(first + maker for maker in row.inputs),
                sources=tuple(first + maker if maker >= 0 else maker for maker in row.sources),
            )
            for index, row in enumerate(recorded[key])
        )
    return tuple(rows)


def _of_twin(optimizer: torch.optim.Optimizer, group: dict[str, Any], matrix: nn.Parameter) -> tuple[Operator, ...]:
    """Return the operators of a step on a stand-in for a matrix, the second: the first may only make state (SOAP's)."""
    for device in ("meta", "cpu") if matrix.numel() <= _MOST_VALUES else ("meta",):
        shadow = stand_in(matrix.shape, matrix.dtype, device)
        holder, state = nn.ParameterList([shadow]), {shadow: dict[str, Any]()}
        try:
            for _ in range(2):
                with StepRecorder(holder) as recorder:
                    step_of_twin(optimizer, [(group, [shadow])], state)
        except Exception:  # someone else's optimizer may need anything at all
            continue
        found = recorder.report().operators
        return found if any(bare_name(row.op) in MULTIPLYING for row in found) else ()
    return ()


def record_step(
    model: nn.Module,
    step: Callable[[], Any],
    *,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> GraphReport:
    """Record what ``step()`` does (forward and backward, no optimizer step) and interpret it.

    Args:
        model: whose layers are told apart.
        step: runs forward and backward.
        optimizers: of the script: for the bytes of their state.
    """
    with StepRecorder(model, optimizers=optimizers) as recorder:
        step()
    return recorder.report()
