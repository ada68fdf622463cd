"""The raw record of one step: values, operator calls and the modules that made them, before any interpretation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

#: Module name of operators outside every module: the loss in the script, gradient clipping, metrics.
SCRIPT = "<script>"
#: Of a call that runs again inside backward, outside the modules that run again with it.
BETWEEN = "<between>"
#: Module of matrix products with a weight of a model that is not the recorded one.
OTHER_MODEL = "<another model>"
#: Phases in which the model's own code runs (``update`` is what the script does between backward and step).
FORWARD_PHASES = ("forward", "recompute")

_DTYPES = {
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float64": "fp64",
    "torch.float8_e4m3fn": "e4m3",
    "torch.float8_e5m2": "e5m2",
    "torch.float4_e2m1fn_x2": "e2m1",
}


def dtype_name(dtype: object) -> str:
    """Return the short name of a torch dtype: fp32, bf16, e4m3, int64, ..."""
    text = str(dtype)
    return _DTYPES.get(text) or text.removeprefix("torch.")


@functools.cache
def bare_name(op: str) -> str:
    """Return an operator's name without namespace and in-place underscore: ``mul`` of ``aten::mul_``."""
    bare = op.rpartition("::")[2]
    return bare[:-1] if bare.endswith("_") and not bare.endswith("__") else bare


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor argument, by the index of its value in the trace."""

    value: int


@dataclass(slots=True)
class Value:
    """One tensor of the step at one moment (writing into a tensor makes a new value).

    ``origin`` is op, parameter, buffer, foreign (a parameter of another model) or input; ``name`` the parameter's or
    buffer's; ``producer`` the index of the call that made it, -1 for one that came from outside; ``storage`` tells
    memory apart that views share; ``filled`` is the share of entries that a sparse tensor stores.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    origin: str
    name: str = ""
    producer: int = -1
    slot: int = 0
    grad: bool = False
    storage: int = 0
    filled: float = 1.0


@dataclass(slots=True)
class Call:
    """One operator call; ``args`` and ``kwargs`` hold :class:`Ref` in place of tensors.

    ``node`` is the autograd node that ran it (backward only); ``function`` the torch function it came from, where that
    is one of those that hide what they do (einsum, scaled_dot_product_attention); ``differentiable`` is true in a
    backward pass that is itself differentiated (``create_graph=True``), and ``made`` is then the sequence number of the
    autograd node that the call left for the second backward pass (-1 elsewhere); ``within`` that of the node for which
    a checkpointed forward runs again; ``where`` is the ``file:line`` of the script or of its libraries that made the
    call, empty in a backward pass; ``name`` is :func:`bare_name`'s.
    """

    index: int
    func: Any
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    module: str
    phase: str
    seq: int
    task: int
    node: str = ""
    function: str = ""
    differentiable: bool = False
    made: int = -1
    within: int = -1
    where: str = ""
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = bare_name(self.op)


@dataclass(slots=True)
class Trace:
    """Everything a recorded step left behind.

    ``parents`` maps a nested autograd graph task (reentrant checkpointing) to the task it ran in; ``calls_of`` counts
    forward calls of each module; ``saved_bytes`` and ``live_bytes`` are what the backward pass found alive, ``saved``
    the bytes of each storage among them; ``zeroed_late`` says that ``zero_grad`` ran between forward and backward.
    """

    values: list[Value] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    calls_of: dict[str, int] = field(default_factory=dict)
    backwards: int = 0
    saved_bytes: int = 0
    saved: dict[int, int] = field(default_factory=dict)
    live_bytes: int = 0
    zeroed_late: bool = False
    notes: list[str] = field(default_factory=list)
    guesses: int = 0
    source: str = "real"
    _consumers: dict[int, list[Call]] = field(default_factory=dict, repr=False)

    def drop_before(self, first: int) -> None:
        """Forget the calls before one: what they made came from outside."""
        for value in self.values:
            if 0 <= value.producer < first:
                value.producer, value.origin = -1, "input"
            elif value.producer >= 0:
                value.producer -= first
        self.calls = self.calls[first:]
        for call in self.calls:
            call.index -= first
        self._consumers.clear()

    def inputs(self, call: Call) -> list[Value]:
        """Return the tensors that a call reads."""
        return [self.values[index] for index in call.ins]

    def outputs(self, call: Call) -> list[Value]:
        """Return the tensors that a call makes."""
        return [self.values[index] for index in call.outs]

    def producer(self, value: int) -> Call | None:
        """Return the call that made a value, None for a value from outside."""
        index = self.values[value].producer
        return self.calls[index] if index >= 0 else None

    def created(self, storage: int) -> Call | None:
        """Return the call that made a storage, None for one from outside: a view of it reads it as well."""
        for call in self.calls:
            if any(value.storage == storage for value in self.outputs(call)):
                return None if any(value.storage == storage for value in self.inputs(call)) else call
        return None

    def argument(self, call: Call, position: int) -> int | None:
        """Return the value index of a tensor argument, None when that argument is not a tensor."""
        if position >= len(call.args):
            return None
        argument = call.args[position]
        return argument.value if isinstance(argument, Ref) else None

    def consumers(self) -> dict[int, list[Call]]:
        """Return the calls that read each value; of a whole step, as what is found once is kept."""
        if not self._consumers:
            for call in self.calls:
                for value in set(call.ins):
                    self._consumers.setdefault(value, []).append(call)
        return self._consumers

    def writes(self, storages: Container[int]) -> Iterator[Call]:
        """Yield the calls that write in place into one of some storages."""
        for call in self.calls:
            if call.op.endswith("_") and any(self.values[one].storage in storages for one in call.outs or call.ins):
                yield call

    def made_of(self, roots: Iterable[int]) -> set[int]:
        """Return the calls that values are made of, by index: those that write into what another reads as well.

        Args:
            roots: indices of the values.
        """
        writers: dict[int, list[Call]] = {}
        for call in self.calls:
            read = {value.storage for value in self.inputs(call)}
            for value in self.outputs(call):  # what is made may become a parameter's data
                if call.op.endswith("_") or value.storage not in read:
                    writers.setdefault(value.storage, []).append(call)
        found: set[int] = set()
        left = list(roots)
        while left:
            index = left.pop()
            made = self.producer(index)
            for call in (*writers.pop(self.values[index].storage, ()), *((made,) if made is not None else ())):
                if call.index not in found:
                    found.add(call.index)
                    left += call.ins
        return found

    def above(self, value: int, passes: Callable[[Call], bool], depth: int = 8) -> Iterator[Call]:
        """Iterate over the calls a value comes from, walking up through those that ``passes``.

        Args:
            value: index of the tensor to begin with.
            passes: says whether the walk goes on through a call.
            depth: most calls from the tensor.
        """
        frontier, seen = [value], set()
        for _ in range(depth):
            following: list[int] = []
            for item in frontier:
                call = self.producer(item)
                if call is None or call.index in seen:
                    continue
                seen.add(call.index)
                yield call
                if passes(call):
                    following.extend(call.ins)
            frontier = following

    def below(self, value: int, passes: Callable[[Call], bool], depth: int = 6) -> Iterator[tuple[Call, int]]:
        """Iterate over (call, value it reads) downstream of a value, through those that ``passes``, never backward.

        Args:
            value: index of the tensor to begin with.
            passes: says whether the walk goes on through a call.
            depth: most calls from the tensor.
        """
        frontier, seen, consumers = [value], set(), self.consumers()
        for _ in range(depth):
            following: list[int] = []
            for item in frontier:
                for call in consumers.get(item, ()):
                    if call.index in seen or call.phase == "backward":
                        continue
                    seen.add(call.index)
                    yield call, item
                    if passes(call):
                        following.extend(call.outs)
            frontier = following

    def in_phase(self, *phases: str) -> Iterator[Call]:
        """Iterate over the calls of some phases (``forward``, ``backward``, ...), in their order."""
        return (call for call in self.calls if call.phase in phases)
