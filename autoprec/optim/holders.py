"""Which modules hold the parameters of an optimizer: found among what is alive, in whatever order a script builds it.

An optimizer is given parameters, not models. It may train several, copies of one, or one that a policy is applied to
later, so what depends on them is not asked of one model that somebody named.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from autoprec.support.living import living


def tables_among(parameters: Iterable[Tensor]) -> set[int]:
    """Return the ids of embedding tables (also of tied ones): their rows are looked up, not multiplied.

    ``parameters`` have any shapes and dtypes.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = (*living(nn.Embedding), *living(nn.EmbeddingBag))
    return {id(p) for module in modules for p in _own(module) if id(p) in wanted}


def models_holding(parameters: Iterable[Tensor]) -> list[nn.Module]:
    """Return the outermost living modules that hold any of these parameters, in the order of the parameters.

    Looks at every object that is alive: for what is asked once. ``parameters`` have any shapes and dtypes.
    """
    order = {id(parameter): index for index, parameter in reversed(list(enumerate(parameters)))}
    first: dict[int, int] = {}
    around: dict[int, list[nn.Module]] = {}
    alive = living(nn.Module)
    for module in alive:
        for child in module.__dict__.get("_modules", {}).values():
            around.setdefault(id(child), []).append(module)
        held = [order[id(p)] for p in _own(module) if id(p) in order]
        if held:
            first[id(module)] = min(held)
    reached, todo = dict(first), list(first)
    while todo:
        inner = todo.pop()
        for outer in around.get(inner, ()):
            if reached.get(id(outer), len(order)) > reached[inner]:
                reached[id(outer)] = reached[inner]
                todo.append(id(outer))
    found = [module for module in alive if id(module) in reached and id(module) not in around]
    return sorted(found, key=lambda module: reached[id(module)])


def _own(module: nn.Module) -> list[Tensor]:
    return [parameter for parameter in module.__dict__.get("_parameters", {}).values() if parameter is not None]
