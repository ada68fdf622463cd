"""Weights that no module holds: tensors in a dict, a list, a dataclass, or attributes of a class that is no module.

What a loss reaches, and what then changes between two backward passes, is trained. So that everything else sees a
model as any other, one is made of such tensors, with the names that the script has for them. A weight may be another
tensor in each step (``w = (w - lr * g).requires_grad_()``): :meth:`LooseWeights.follow` finds them again, by name or
by order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.graph.places import is_library
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.saved import address_of
from autoprec.trial.inside.observe.discovery import loss_parameters

#: How deep containers are looked into for a weight's name, and at how many objects.
_DEEPEST, _MOST_OBJECTS = 5, 20_000
#: Calls between a weight, or a gradient, and what the weight is after its update.
UPDATE_CALLS = 24


class LooseWeights(nn.Module):
    """A model made of tensors that no module holds; it has no forward.

    Args:
        leaves: the weights, of any shapes; by name, where that is known.
    """

    def __init__(self, leaves: Mapping[str, Tensor] | Sequence[Tensor]) -> None:
        super().__init__()
        self._take(leaves if isinstance(leaves, Mapping) else names_of(leaves))

    def _take(self, named: Mapping[str, Tensor]) -> None:
        self._parameters.clear()
        self._parameters.update(named)  # type: ignore[arg-type]  # plain tensors, which autograd trains as any other

    def follow(self, leaves: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[int, Tensor]:
        """Take what the weights are now; return it by the ``id`` of what each was.

        Args:
            leaves: those that the next loss reaches, of any shapes.
        """
        before, named = dict(self._parameters), leaves if isinstance(leaves, Mapping) else names_of(leaves)
        if before.keys() != named.keys() and len(before) == len(named):
            alike = [a is not None and a.shape == b.shape for a, b in zip(before.values(), named.values(), strict=True)]
            named = dict(zip(before, named.values(), strict=True)) if all(alike) else named
        if not before.keys() & named.keys():
            return {}  # another loss, of other weights
        self._take(named)
        return {id(old): named[name] for name, old in before.items() if old is not None and name in named}


def plain_leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that losses reach, where no module's parameter is one of them.

    Args:
        roots: what backward is called on, of any shapes.
    """
    leaves = loss_parameters(roots)
    return [] if any(isinstance(one, nn.Parameter) for one in leaves) else leaves


def are_plain_weights(roots: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Say whether gradients by these inputs are a step's: they are leaves, and no module is trained by the loss.

    Args:
        roots: losses, of shape ``[]`` or others.
        inputs: by which gradients are taken, of any shapes.
    """
    return all(one.is_leaf and one.requires_grad for one in inputs) and bool(plain_leaves(roots))


def names_of(leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return tensors by what the running script calls them: ``params.w1``, ``layers.0.bias``; else by their number.

    Args:
        leaves: of any shapes.
    """
    wanted, found = {id(one) for one in leaves}, dict[int, tuple[int, str]]()
    left = [_MOST_OBJECTS]
    for variables in _variables():
        for name, value in list(variables.items()):
            if name.isidentifier() and not name.startswith("__"):
                _visit(name, value, 0, wanted, found, left)
        if len(found) == len(wanted):
            break
    named: dict[str, Tensor] = {}
    for index, leaf in enumerate(leaves):
        name = found.get(id(leaf), (0, f"weight.{index}"))[1]
        named[name if name not in named else f"weight.{index}"] = leaf
    return named


def _variables() -> Iterator[Mapping[str, object]]:
    """Yield the variables of the script's frames that run, the innermost first, and those of their files."""
    frame, files = sys._getframe(1), list[Mapping[str, object]]()
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            yield frame.f_locals
            if all(frame.f_globals is not known for known in files):
                files.append(frame.f_globals)
        frame = frame.f_back  # type: ignore[assignment]
    yield from files


def _visit(
    name: str, value: Any, depth: int, wanted: set[int], found: dict[int, tuple[int, str]], left: list[int]
) -> None:
    """Note the name of each tensor that is wanted: the longest, as a loop's variable is not what holds it."""
    left[0] -= 1
    if isinstance(value, Tensor):
        if id(value) in wanted and found.get(id(value), (-1, ""))[0] < depth:
            found[id(value)] = depth, name
        return
    if depth == _DEEPEST or left[0] < 0:
        return
    for key, inner in _inside(value):
        _visit(f"{name}.{key}", inner, depth + 1, wanted, found, left)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in value.items() if isinstance(key, (str, int)))
    elif isinstance(value, (list, tuple)):
        yield from ((str(key), inner) for key, inner in enumerate(value))
    elif not isinstance(value, (type, nn.Module)) and not is_library(_file_of(type(value))):
        own = getattr(value, "__dict__", None)
        yield from own.items() if isinstance(own, dict) else ()
        slots = getattr(type(value), "__slots__", ())
        yield from ((one, getattr(value, one, None)) for one in ((slots,) if isinstance(slots, str) else slots))


def _file_of(cls: type) -> str:
    """Return the file of a class; of one that is Python's own a name that is a library's."""
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or ("" if cls.__module__ == "__main__" else "<")


class Watch:
    """Watches from one backward pass to the next whether leaves of a loss are trained: does a gradient reach them?"""

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._leaves = list(leaves)
        self._recorder: StepRecorder | None = None
        self._gradients: set[int] = set()

    def begin(self) -> None:
        """Begin after a backward pass, where the gradients are there."""
        self._gradients = {address_of(p.grad) for p in self._leaves if p.grad is not None}
        self._recorder = StepRecorder(nn.Module())
        self._recorder.__enter__()

    def end(self) -> None:
        """Take the watch off."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.__exit__(None, None, None)

    def trained(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """End before the next backward pass, and return the weights that were updated, as they are now; else none.

        Args:
            leaves: those that the next loss reaches, of any shapes.
        """
        recorder = self._recorder
        if recorder is None:
            return []
        values = [recorder.value_of(one) for one in leaves]
        self.end()
        trace, weights = recorder.trace, {address_of(p) for p in self._leaves}
        if any(True for _ in trace.writes(weights)):
            return list(leaves) if weights & {address_of(one) for one in leaves} else self._leaves
        sources = weights | self._gradients
        made = (call for value in values if value >= 0 for call in trace.above(value, lambda _: True, UPDATE_CALLS))
        return list(leaves) if any(trace.values[one].storage in sources for call in made for one in call.ins) else []


def loose_weights_of(optimizers: Iterable[torch.optim.Optimizer], leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that optimizers train and that a loss reaches itself: they are no copies of weights.

    Args:
        optimizers: whose tensors belong to no module.
        leaves: of the last loss, of any shapes.
    """
    reached = {id(one) for one in leaves}
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return list({id(p): p for group in groups for p in group["params"] if id(p) in reached}.values())
