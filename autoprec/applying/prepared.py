"""What a policy has put on a model, held so that it can be taken off and put back without building anything anew.

Executions, classes and compiled calls stay the same objects, so delayed scales go on where they were and Dynamo finds
the graphs it has made of them.
"""

from __future__ import annotations

import torch
from torch import nn

from autoprec.applying import compiling, swap

_KEYS = (swap.ATTRIBUTE, swap.ROOT, compiling.ATTRIBUTE, "forward", "_compiled_call_impl")


class Prepared:
    """The state of a model's modules as far as a policy changes it, as it is now."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modules = [
            (m, type(m), {key: m.__dict__[key] for key in _KEYS if key in m.__dict__}) for m in root.modules()
        ]

    def put(self) -> None:
        """Give every module what it had when this was made."""
        was = self._root.__dict__.get(compiling.ATTRIBUTE, ("keep", 0))[0]
        for module, cls, held in self._modules:
            if type(module) is not cls:
                module.__class__ = cls
            for key in _KEYS:
                module.__dict__.pop(key, None)
            module.__dict__.update(held)
        now = self._root.__dict__.get(compiling.ATTRIBUTE, ("keep", 0))[0]
        if "eager" in (was, now):
            torch.compiler.set_stance("force_eager" if now == "eager" else "default")
