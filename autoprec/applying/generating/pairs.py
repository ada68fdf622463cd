"""The two sides of reinforcement learning: the model that trains, and the copy of it that generates (its rollout).

Both have the same weights under the same names, and a script writes those of the first into the second every so often.
Which modules they are only the script can say (:func:`autoprec.register`): a frozen reference model and the average of
past weights are copies of the model as well.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from autoprec.applying.units import clean_name, unwrap
from autoprec.errors import UsageError

_ROLLOUTS: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


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


def rollout_of(model: nn.Module) -> nn.Module | None:
    """Return the copy of a model that generates, innermost; None where the script has named none."""
    found = _ROLLOUTS.get(unwrap(model))
    return None if found is None else found()


def in_step(model: nn.Module, rollout: nn.Module) -> bool:
    """Say whether a copy has the weights that the model has now, rounded to the dtype of its own."""
    theirs = weights_of(rollout)
    return all(torch.equal(theirs[name].data, p.data.to(theirs[name])) for name, p in weights_of(model).items())
