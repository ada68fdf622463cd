"""Functions that Dynamo leaves to Python, with or without what they call."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.optim.stepping.modes import never_compiled, not_compiled_itself


@pytest.fixture(autouse=True)
def dynamo():
    """What is compiled here is nobody else's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def doubled(x):
    return x * 2


@pytest.mark.parametrize(("keep_out", "graphs"), [(never_compiled, 0), (not_compiled_itself, 1)])
def test_what_a_function_calls_is_compiled_or_not(keep_out, graphs):
    seen = []

    def backend(module, _inputs):
        seen.append(module)
        return module

    def outer(x):
        return doubled(x) + 1

    compiled = torch.compile(keep_out(outer), backend=backend)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 3.0))
    assert len(seen) == graphs


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
