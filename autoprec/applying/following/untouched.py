"""Run passes on a live model and leave no trace of them: gradients, buffers, random streams and layers as before."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.applying.following.recorded import eager, random_state, set_random_state


@contextlib.contextmanager
def untouched(root: nn.Module, parameters: Sequence[nn.Parameter], device: torch.device) -> Iterator[None]:
    """Put back, whatever ends the body, what forward and backward change.

    Every module's class and attributes (policies come and go; a counter of the script's own), buffers (running
    statistics), gradients (also where they are views of a bucket that is reduced again), and the random streams of
    torch, Python and NumPy. Compiled code is not used meanwhile. Weights and optimizers are not looked after: nothing
    here steps. What a forward does outside of the model (a line it prints, a hook that logs) happens once more.
    """
    modules = [(m, type(m), dict(m.__dict__), dict(m._buffers)) for m in root.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in root.buffers()]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
    streams, numbers = random_state(device), random.getstate()
    numpy: Any = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        with eager():
            yield
    finally:
        for module, cls, attributes, held in modules:
            if type(module) is not cls:
                module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(held)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
            for parameter, gradient, copied in gradients:
                parameter.grad = gradient
                if gradient is not None and copied is not None:
                    gradient.copy_(copied)
        set_random_state(streams, device)
        random.setstate(numbers)
        if drawn is not None:
            numpy.random.set_state(drawn)
