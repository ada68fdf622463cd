"""An optimizer's next step on samples is that of the optimizer itself, and changes nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.trial.inside.judging.samples import sampled
from autoprec.trial.inside.judging.stepping import Updates, is_elementwise, next_step

MAKERS: list[Any] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), amsgrad=True, weight_decay=0.1),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, lr=1e-2, maximize=True),
    lambda p: torch.optim.RMSprop(p, centered=True),
    lambda p: torch.optim.Adagrad(p),
    lambda p: torch.optim.NAdam(p),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.SGD([{"params": [one], "lr": 0.1**k} for k, one in enumerate(p)]),
]


def trained(make: Any, dtype: torch.dtype, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 8)).to(dtype)
    optimizer = make(list(model.parameters()))
    for _ in range(steps + 1):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        if _ < steps:
            optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", MAKERS)
def test_a_sample_steps_as_the_whole_does(make: Any, steps: int, dtype: torch.dtype) -> None:
    model, optimizer = trained(make, dtype, steps)
    before, state = copy.deepcopy(list(model.parameters())), copy.deepcopy(list(optimizer.state.values()))
    found = next_step(optimizer, lambda p: p.grad, 500)
    assert found is not None
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    kept = zip(state, optimizer.state.values(), strict=True)
    assert all(str(a) == str(b) for a, b in kept)
    optimizer.step()
    bits = 2e-2 if dtype is torch.bfloat16 else 1e-5  # a fused kernel rounds once
    for p in model.parameters():
        assert found[id(p)].shape == sampled(p, 500).shape
        torch.testing.assert_close(found[id(p)], sampled(p.detach(), 500), rtol=bits, atol=bits / 10)


def test_in_more_bits_nothing_is_lost() -> None:
    model, optimizer = trained(lambda p: torch.optim.SGD(p, lr=1e-6), torch.bfloat16, 1)
    weight = model[0].weight
    found = next_step(optimizer, lambda p: p.grad if p is weight else None, 1 << 14, wide=torch.float32)
    assert found is not None
    assert list(found) == [id(weight)]
    wanted = weight.detach().float() - 1e-6 * weight.grad.float()
    assert torch.equal(found[id(weight)], wanted.flatten())


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any, fails: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.fails = fails

    def step(self, closure: Any = None) -> None:
        if self.fails:
            raise RuntimeError("no step")
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


def test_another_optimizer_steps_on_whole_tensors_or_is_not_known() -> None:
    model, optimizer = trained(Own, torch.float32, 0)
    found = next_step(optimizer, lambda p: p.grad, 500)
    assert not is_elementwise(optimizer)
    assert is_elementwise(torch.optim.AdamW(model.parameters()))
    with torch.no_grad():
        optimizer.step()
    assert found is not None
    assert all(torch.equal(found[id(p)], sampled(p.detach(), 500)) for p in model.parameters())
    assert next_step(Own(list(model.parameters()), fails=True), lambda p: p.grad, 500) is None
    wide = nn.Linear(2048, 2049)
    wide.weight.grad = torch.ones_like(wide.weight)
    assert next_step(Own(list(wide.parameters())), lambda p: p.grad, 500) is None


class Sub(torch.optim.AdamW):
    pass


class Lazy(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return None


def test_a_subclass_is_known_by_its_step() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    assert is_elementwise(Sub(parameters))
    assert not is_elementwise(Lazy(parameters))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=1e-3)])
def test_what_reaches_the_weights_is_compared_as_the_script_clipped_it(make: Any) -> None:
    model, optimizer = trained(make, torch.float32, 1)
    for p in model.parameters():
        p.grad.mul_(0.01)  # the script's own, clipped
    updates = Updates([optimizer])
    grads = [p.grad * 100 for p in model.parameters()]  # played again, nothing is
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad.clone()
    updates.hold()
    assert updates.change() == 0.0
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad.mul_(1.1)
    found = updates.change()
    assert found is not None
    assert found == pytest.approx(0.1, rel=1e-4) if type(optimizer) is torch.optim.SGD else 0 < found < 0.1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_an_optimizer_on_16_bit_weights_has_an_update_of_its_own() -> None:
    _, optimizer = trained(lambda p: torch.optim.SGD(p, lr=1e-4), torch.bfloat16, 1)
    updates = Updates([optimizer])
    updates.hold()
    lost = updates.in_more_bits(torch.float32)
    assert lost is not None
    assert lost > 0.5
    _, optimizer = trained(lambda p: torch.optim.SGD(p, lr=0.0), torch.float32, 1)
    updates = Updates([optimizer])
    updates.hold()
    assert updates.change() is None  # a learning rate of 0 changes nothing
