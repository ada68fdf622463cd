"""What a policy has put on a model, held so that it can be taken off and put back without building anything anew.

Executions, classes and compiled calls stay the same objects, so delayed scales go on where they were and Dynamo finds
the graphs it has made of them.
"""

from __future__ import annotations

from torch import nn

from autoprec.applying import compiling, swap
from autoprec.applying.around import loading
from autoprec.applying.generating import recast
from autoprec.applying.generating.pairs import rollout_of

_KEYS = (loading.ATTRIBUTE, swap.ROOT, "forward", "_compiled_call_impl")


class Prepared:
    """The state of a model's modules, and of its copy's that generates, as far as a policy changes it, as it is now."""

    def __init__(self, root: nn.Module) -> None:
        self._root, self._execution = root, compiling.execution_of(root)
        self._rollout = rollout_of(root)
        self._dtypes = None if self._rollout is None else recast.dtypes_of(self._rollout)
        modules = [*root.modules(), *(() if self._rollout is None else self._rollout.modules())]
        self._modules = [(m, type(m), {key: m.__dict__[key] for key in _KEYS if key in m.__dict__}) for m in modules]

    def put(self) -> None:
        """Give every module what it had when this was made."""
        compiling.exchange_execution(self._root, self._execution)
        if self._rollout is not None:
            recast.put_dtypes(self._rollout, self._dtypes)
        for module, cls, held in self._modules:
            if type(module) is not cls:
                module.__class__ = cls
            for key in _KEYS:
                module.__dict__.pop(key, None)
            module.__dict__.update(held)
