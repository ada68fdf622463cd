"""The two sides of reinforcement learning: the model that trains, and the copy of it that generates (its rollout).

Both have the same weights under the same names, and a script writes those of the first into the second every so often.
The script says which modules they are (:func:`autoprec.register`), or has but one copy of the model. Of several none is
taken: a frozen reference model and the average of past weights are copies as well.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy

from autoprec.applying.units import clean_name, unwrap
from autoprec.errors import UsageError
from autoprec.support.living import living

_ROLLOUTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
#: Models whose copy the script has not named.
_RECOGNISED: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by the names that policies use."""
    return {clean_name(name): parameter for name, parameter in unwrap(model).named_parameters()}


def pair(model: nn.Module, rollout: nn.Module) -> None:
    """Note that ``rollout`` is the copy of ``model`` that generates.

    Raises:
        UsageError: it is not a module of its own with parameters of the same names and shapes.
    """
    root, copied = unwrap(model), unwrap(rollout)
    fix = "autoprec.register(policy=model, rollout=copy.deepcopy(model)), whose weights the script copies over"
    if not {id(one) for one in root.modules()}.isdisjoint(map(id, copied.modules())):
        raise UsageError("rollout is the model, or shares layers with it: there is one side only", fix=fix)
    mine, theirs = weights_of(root), weights_of(copied)
    other = mine.keys() ^ theirs.keys()
    wrong = sorted(other) or [name for name, one in mine.items() if one.shape != theirs[name].shape]
    if wrong or not mine:
        what = f"they differ in {', '.join(wrong[:4])}" if wrong else "the model has none"
        raise UsageError(f"policy and rollout have parameters of the same names and shapes, and {what}", fix=fix)
    _ROLLOUTS[root] = weakref.ref(copied)
    _RECOGNISED.discard(root)


def rollout_of(model: nn.Module) -> nn.Module | None:
    """Return the copy of a model that generates, innermost; None where the script has named none."""
    found = _ROLLOUTS.get(unwrap(model))
    return None if found is None else found()


def copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the living modules, innermost, that :func:`pair` would take for copies of a model.

    Args:
        model: whose copies are looked for, on any device; one without data (meta, fake) is not a copy.
    """
    root = unwrap(model)
    mine = weights_of(root)
    own = {id(one) for one in root.modules()}
    found: dict[int, nn.Module] = {}
    for module in living(nn.Module):
        copied = unwrap(module)
        theirs = weights_of(copied) if own.isdisjoint(map(id, copied.modules())) else {}
        if mine and theirs.keys() == mine.keys() and all(_real_copy(theirs[name], one) for name, one in mine.items()):
            found[id(copied)] = copied
    return [*found.values()]


def _real_copy(one: nn.Parameter, other: nn.Parameter) -> bool:
    hollow = is_lazy(one) or one.is_meta or isinstance(one, FakeTensor)
    return not hollow and one is not other and one.shape == other.shape


def recognise(model: nn.Module) -> nn.Module | None:
    """Return the copy of a model that generates: as the script named it, or else the only copy that there is.

    The latter is noted, as :func:`pair` would.
    """
    named = rollout_of(model)
    if named is None and len(copies := copies_of(model)) == 1:
        pair(model, copies[0])
        _RECOGNISED.add(unwrap(model))
        return copies[0]
    return named


def is_recognised(model: nn.Module) -> bool:
    """Say whether the copy of a model that generates is known by :func:`recognise` alone."""
    return unwrap(model) in _RECOGNISED


def in_step(model: nn.Module, rollout: nn.Module) -> bool:
    """Say whether a copy has the weights that the model has now, rounded to the dtype of its own."""
    theirs = weights_of(rollout)
    return all(torch.equal(theirs[name].data, p.data.to(theirs[name])) for name, p in weights_of(model).items())
