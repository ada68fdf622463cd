"""Names of a model's modules and parameters, as policy globs see them: wrappers looked through, ties known."""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from autoprec.applying.units import clean_name, tunable_units, unwrap


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a sharded tensor (FSDP2, tensor parallelism) that this rank holds; others as they are.

    Args:
        tensor: of any shape and dtype.

    Returns:
        The same tensor, or the local shard: of a shape of its own, of the same dtype.
    """
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@functools.cache
def _made_at(cls: Any, attribute: str) -> str:
    """Return ``file:line`` of an attribute's assignment in the source of a class, else of the class."""
    try:
        lines, first = inspect.getsourcelines(cls)
        file = inspect.getsourcefile(cls) or ""
    except (OSError, TypeError):  # made by exec, or in C
        return ""
    if "site-packages" in file:
        return ""
    assigned = re.compile(rf"\bself\.{re.escape(attribute)}\b\s*(:[^=]+)?=|[\"']{re.escape(attribute)}[\"']")
    at = next((number for number, line in enumerate(lines) if assigned.search(line)), 0)
    return f"{file}:{max(first, 1) + at}"


class ModelNames:
    """One pass over a model: names, parameters, ties and what a policy can be applied to."""

    def __init__(self, model: nn.Module) -> None:
        self.root = unwrap(model)
        self.modules: dict[str, nn.Module] = {}
        self._names: dict[int, str] = {}
        outer: nn.Module | None = model
        while outer is not None and outer is not self.root:
            self._names[id(outer)] = ""
            children = list(outer._modules.values())
            outer = children[0] if children else None
        for name, module in self.root.named_modules(remove_duplicate=False):
            clean = clean_name(name)
            self._names.setdefault(id(module), clean)
            self.modules[clean] = module  # the innermost of a wrapper chain wins
        self.parameters: dict[str, nn.Parameter] = {}
        self.aliases: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, parameter in self.root.named_parameters(remove_duplicate=False):
            clean = clean_name(name)
            self.parameters[clean] = parameter
            self.aliases[clean] = first.setdefault(id(parameter), clean)
        self._parameter_names = first
        self.tied = {canonical for name, canonical in self.aliases.items() if name != canonical}

    def name_of(self, module: nn.Module) -> str:
        """Return a module's name; ``<ClassName>`` for one outside the model (a loss module)."""
        return self._names.get(id(module), f"<{type(module).__name__}>")

    def applicable(self) -> dict[str, str]:
        """Return what a policy can be applied to: name -> kind (see :class:`autoprec.applying.units.Unit`)."""
        return {name: unit.kind for name, unit in tunable_units(self.root).items()}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over parameters, each once under its first name, then buffers; of any shape and dtype."""
        for name, parameter in self.parameters.items():
            if self.aliases[name] == name and not isinstance(parameter, UninitializedParameter):
                yield name, parameter
        for name, buffer in self.root.named_buffers():
            yield clean_name(name), buffer

    def canonical(self, name: str) -> str:
        """Return the first name of a parameter that has several (tied weights); other names as they are."""
        return self.aliases.get(name, name)

    def own_parameter(self, module: str, parameter: str) -> str:
        """Return the name under which ``module`` itself holds a parameter, empty when it does not."""
        holder = self.modules.get(module)
        if holder is None:
            return ""
        prefix = f"{module}." if module else ""
        for attribute, _ in holder.named_parameters(recurse=False):  # also of scripted modules
            if self.canonical(f"{prefix}{attribute}") == parameter:
                return f"{prefix}{attribute}"
        return ""

    def name_of_parameter(self, tensor: torch.Tensor) -> str:
        """Return a parameter's first name, empty for another tensor (lazy layers make theirs during the step).

        Args:
            tensor: of any shape and dtype; known by its identity, not by its values.
        """
        return self._parameter_names.get(id(tensor), "")

    def held(self) -> float:
        """Return the share of the parameters that this rank holds: below 1 where ranks share them."""
        made = [p for n, p in self.parameters.items() if self.aliases[n] == n]
        made = [p for p in made if not isinstance(p, UninitializedParameter)]
        whole = sum(p.numel() for p in made)
        return sum(on_this_rank(p).numel() for p in made) / whole if whole else 1.0

    def defined_at(self, name: str) -> str:
        """Return ``file:line`` where the class that holds a layer makes it; empty where that is a library's.

        Of a layer in a container of torch's (``mlp.0``) it is where the container is made.
        """
        while name:
            name, _, attribute = name.rpartition(".")
            holder: Any = type(self.modules.get(name))
            if holder is not type(None) and not holder.__module__.startswith("torch."):
                return _made_at(holder, attribute)
        return ""

    def identity(self) -> dict[str, object]:
        """Return class, number of parameters (ties once) and a fingerprint of names, shapes and dtypes."""
        made = {n: p for n, p in self.parameters.items() if not isinstance(p, UninitializedParameter)}
        rows = [f"{n}:{tuple(p.shape)}:{p.dtype}" for n, p in made.items()]
        count = sum(int(p.numel()) for n, p in made.items() if self.aliases[n] == n)
        digest = hashlib.sha256("\n".join(rows).encode()).hexdigest()
        return {"class": type(self.root).__name__, "parameters": count, "fingerprint": f"sha256:{digest[:32]}"}
