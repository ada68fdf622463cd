"""Functions that Dynamo leaves to Python, with what they call."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.optim.stepping.modes import never_compiled


@pytest.fixture(autouse=True)
def dynamo():
    """What is compiled here is nobody else's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def doubled(x):
    return x * 2


def test_a_function_and_what_it_calls_are_not_compiled():
    seen = []

    def backend(module, _inputs):
        seen.append(module)
        return module

    def outer(x):
        return doubled(x) + 1

    compiled = torch.compile(never_compiled(outer), backend=backend)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert not seen


def test_a_dispatch_method_is_not_compiled():
    seen = []

    class Mode(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls):
            return False

        @never_compiled
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode():
        out = torch.compile(doubled, backend=lambda module, _: seen.append(module) or module)(torch.ones(3))
    assert torch.equal(out, torch.full((3,), 2.0))
    assert not seen
