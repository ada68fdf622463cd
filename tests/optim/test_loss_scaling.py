import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.errors import UnsupportedError
from autoprec.optim.loss_scaling import LossScaler, script_has_scaler
from autoprec.optim.optimizer import loss_scaler_of, wrap_optimizer
from autoprec.policy import OptimizerPolicy, Policy


class Half(nn.Module):
    """A layer whose gradient passes through FP16, as under autocast, and underflows there without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return self.linear(x).half().float()


def gradient(model, factor):
    model.zero_grad()
    x = torch.linspace(-1, 1, 32).view(8, 4)
    (model(x).sum() * factor).backward()
    return model.linear.weight.grad.clone()


def test_gradients_that_underflow_fp16_survive_and_arrive_unscaled():
    torch.manual_seed(0)
    model, factor = Half(), 2.0**-26
    assert gradient(model, factor).abs().max() == 0  # flushed
    scaler = LossScaler.install(model, [torch.optim.SGD(model.parameters(), 0.1)])
    expected = torch.linspace(-1, 1, 32).view(8, 4).sum(0).expand(4, 4) * factor
    torch.testing.assert_close(gradient(model, factor), expected, rtol=1e-3, atol=0)
    scaler.remove()
    assert gradient(model, factor).abs().max() == 0


def test_scaling_changes_no_bit_of_a_gradient_in_range():
    model = Half()
    plain = gradient(model, 1.0)
    LossScaler.install(model, []).scale = 2.0**10
    assert torch.equal(gradient(model, 1.0), plain)


def test_overflow_skips_counts_and_halves_then_growth_doubles():
    model = Half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = LossScaler.install(model, [optimizer])
    scaler.scale, scaler.growth_interval = 2.0**20, 3
    before = model.linear.weight.detach().clone()
    skipped = []
    for _ in range(12):
        gradient(model, 1.0)
        optimizer.step()
        skipped.append(scaler.skipped_steps)
        if scaler.skipped_steps == skipped[0] and len(skipped) == 1:
            assert torch.equal(before, model.linear.weight)
            assert model.linear.weight.grad is not None  # put back after the skipped step
            assert not optimizer.state
    assert skipped[0] == 1
    assert skipped[4] == 5  # 2**20 .. 2**16 overflow FP16, 2**15 does not
    assert scaler.skipped_steps == 6  # three good steps, doubled to 2**16, refused, three good steps, doubled
    assert scaler.scale == 2.0**16
    assert not torch.equal(before, model.linear.weight)


@pytest.mark.parametrize("wrap", [lambda y: (y, None), lambda y: {"a": y}, lambda y: [y]])
def test_outputs_in_containers_are_scaled(wrap):
    class Model(Half):
        def forward(self, x):
            return wrap(super().forward(x))

    model = Model()
    LossScaler.install(model, [])
    output = model(torch.ones(1, 4))
    (next(iter(output.values() if isinstance(output, dict) else output)).sum() * 2.0**-26).backward()
    assert model.linear.weight.grad.abs().min() > 0


def test_gradient_accumulation_and_evaluation_work():
    model = Half()
    plain = gradient(model, 1.0)
    LossScaler.install(model, []).scale = 8.0
    x = torch.linspace(-1, 1, 32).view(8, 4)
    model.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
    assert torch.equal(model.linear.weight.grad, 2 * plain)
    with torch.no_grad():
        model(x)


def test_a_script_with_its_own_scaler_is_left_alone():
    model = Half()
    scaler = torch.amp.GradScaler("cpu")
    assert script_has_scaler()
    ours = LossScaler.install(model, [torch.optim.SGD(model.parameters(), 0.1)])
    assert not ours.active
    assert "GradScaler" in ours.inactive_reason
    del scaler
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    assert not script_has_scaler()
    assert LossScaler.install(model, []).active
    del disabled


def test_a_scaler_that_the_script_makes_later_is_left_alone() -> None:
    """Scales of both would multiply, and the first steps overflow."""
    model = Half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = LossScaler.install(model, [optimizer])
    with torch.no_grad():
        model(torch.ones(2, 4))  # a validation before
    its = torch.amp.GradScaler("cpu", init_scale=2.0)
    its.scale(model(torch.ones(2, 4)).sum()).backward()
    assert model.linear.weight.grad is not None
    assert (model.linear.weight.grad == 4.0).all()
    assert (scaler.active, scaler.inactive_reason) == (False, "the script has its own GradScaler")
    its.step(optimizer)
    del its


@dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Plain:
    def __init__(self, loss, logits):
        self.loss, self.both = loss, {"logits": logits}


@pytest.mark.parametrize(
    ("returns", "read"),
    [
        (lambda loss, logits: logits, lambda o: (o.square().mean(), o)),
        (lambda loss, logits: (loss, logits), lambda o: o),
        (lambda loss, logits: {"loss": loss, "logits": logits}, lambda o: (o["loss"], o["logits"])),
        (Output, lambda o: (o.loss, o.logits)),
        (lambda loss, logits: [{"a": Output(loss, logits)}, (logits, None, "x")], lambda o: (o[0]["a"].loss, o[1][0])),
        (Plain, lambda o: (o.loss, o.both["logits"])),
        (lambda loss, logits: OrderedDict(loss=loss, logits=logits), lambda o: tuple(o.values())),
    ],
    ids=["tensor", "tuple", "dict", "dataclass", "nested", "object", "ordered"],
)
def test_gradients_equal_those_of_gradscaler_whatever_the_model_returns(returns: Any, read: Any) -> None:
    class Model(Half):
        def forward(self, x):
            logits = super().forward(x)
            return returns(logits.square().mean(), logits)

    def backward(scaler: Any = None) -> torch.Tensor:
        loss, logits = read(model(torch.linspace(-1, 1, 32).view(8, 4)))
        total = (loss + 0.1 * logits.abs().mean()) * 2.0**-20
        (total if scaler is None else scaler.scale(total)).backward()
        gradient, model.linear.weight.grad = model.linear.weight.grad, None
        return gradient if scaler is None else gradient / scaler.get_scale()

    torch.manual_seed(0)
    model = Model()
    expected = backward(torch.amp.GradScaler("cpu"))
    assert expected.abs().max() > 0
    installed = LossScaler.install(model, [])
    assert torch.equal(backward(), expected)
    installed.remove()


def test_a_gradient_through_the_model_twice_is_divided_where_it_leaves_by_the_input() -> None:
    model = Half()
    x = torch.linspace(-1, 1, 32).view(8, 4).requires_grad_()

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(model(x)).square().sum(), [model.linear.weight, x]))

    plain = gradients()
    LossScaler.install(model, []).scale = 2.0**6
    assert all(map(torch.equal, gradients(), plain))


def test_an_output_may_be_changed_in_place() -> None:
    class Model(Half):
        def forward(self, x):
            out = super().forward(x)
            return out, out.sum()

    model = Model()
    plain = [model(torch.ones(1, 4))[0].mul_(3).sum().backward(), model.linear.weight.grad.clone()][1]
    LossScaler.install(model, []).scale = 2.0**6
    model.zero_grad()
    model(torch.ones(1, 4))[0].mul_(3).sum().backward()
    assert torch.equal(model.linear.weight.grad, plain)


class Routed(Half):
    """Leaves auxiliary losses in attributes, as mixtures of experts do, and a state for the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, bias=False)
        self.losses: list[torch.Tensor] = []
        self.state: torch.Tensor | float = 0.0

    def forward(self, x):
        hidden = self.state = super().forward(x) + self.state
        self.aux = hidden.square().sum()
        self.losses = [hidden.abs().sum()]
        return self.head(hidden)


def test_what_the_forward_leaves_in_attributes_is_scaled() -> None:
    model = Routed()

    def gradients() -> list[torch.Tensor]:
        model.state, total = 0.0, 0.0
        for _ in range(3):
            out = model(torch.linspace(-1, 1, 32).view(8, 4))
            total = total + out.sum() + model.aux + model.losses[0]
        return list(torch.autograd.grad(total, list(model.parameters())))

    plain = gradients()
    LossScaler.install(model, []).scale = 2.0**6
    assert all(map(torch.equal, gradients(), plain))


def test_a_gradient_penalty_is_scaled_as_the_loss_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(6, 4)

    def gradients() -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        out = model(given)
        (slope,) = torch.autograd.grad(out.sum(), given, create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean() + out.mean()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    plain = gradients()
    LossScaler.install(model, []).scale = 2.0**10
    for found, wanted in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


class Parts(nn.Module):
    """A model whose parts are called by scripts as well."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def _thawed(model: Parts) -> torch.Tensor:
    model.body.requires_grad_(True)
    return model(torch.ones(2, 4)).sum()


def _with_a_new_head(model: Parts) -> torch.Tensor:
    model.body.requires_grad_(True)
    torch.manual_seed(1)
    model.head = nn.Linear(8, 3)
    return model(torch.ones(2, 4)).sum()


def _by_its_parts(model: Parts) -> torch.Tensor:
    return model.head(model.features(torch.ones(2, 4))).sum()


def _of_what_a_hook_has_caught(model: Parts) -> torch.Tensor:
    caught: list[torch.Tensor] = []
    model.body.register_forward_hook(lambda module, args, out: caught.append(out))
    model(torch.ones(2, 4))
    return caught[0].sum()


def _after_an_error(model: Parts) -> torch.Tensor:
    out = model(torch.ones(2, 4))
    handle = model.head.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    handle.remove()
    model.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, 4))
    return _by_its_parts(model)


@pytest.mark.parametrize(
    "loss", [_thawed, _with_a_new_head, _by_its_parts, _of_what_a_hook_has_caught, _after_an_error]
)
def test_what_is_divided_was_multiplied(loss: Callable[[Parts], torch.Tensor]) -> None:
    found = []
    for scaled in (False, True):
        model = Parts()
        model.body.requires_grad_(loss not in (_thawed, _with_a_new_head))
        if scaled:
            LossScaler.install(model, [])
        model(torch.ones(2, 4)).sum().backward()  # a step before the script changes something
        model.zero_grad()
        loss(model).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[1], found[0])


def test_a_copy_of_a_scaled_model_divides_what_it_multiplies() -> None:
    model = Parts()
    LossScaler.install(model, [])
    copied = copy.deepcopy(model)
    for one in (model, copied):
        one(torch.ones(2, 4)).sum().backward()
    torch.testing.assert_close([p.grad for p in copied.parameters()], [p.grad for p in model.parameters()])


def test_weights_of_a_functional_call_are_divided_once_or_refused() -> None:
    model = Parts()
    plain = [g.clone() for g in torch.autograd.grad(model(torch.ones(2, 4)).sum(), [*model.parameters()])]
    LossScaler.install(model, [])
    given = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, given, (torch.ones(2, 4),)).sum().backward()
    torch.testing.assert_close([one.grad for one in given.values()], plain)
    with pytest.raises(UnsupportedError, match="more than once"):
        torch.func.functional_call(model, {name: one * 2 for name, one in given.items()}, (torch.ones(2, 4),))


@pytest.mark.parametrize("overflow", [False, True])
def test_optimizers_of_one_model_share_a_scale_that_changes_once_a_step(overflow: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    policy = Policy(activations="fp16", loss_scaling="dynamic")
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
    for optimizer in optimizers:
        wrap_optimizer(optimizer, policy, model)
    scaler = loss_scaler_of(optimizers[0])
    assert loss_scaler_of(optimizers[1]) is scaler
    loss = model(torch.randn(2, 4)).sum() * (float("inf") if overflow else 1.0)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    counted = (scaler.scale, scaler.skipped_steps, scaler.good_steps)
    assert counted == ((2.0**15, 1, 0) if overflow else (2.0**16, 0, 1))
    wrap_optimizer(optimizers[0], OptimizerPolicy())
    assert scaler.active
    wrap_optimizer(optimizers[1], OptimizerPolicy())
    assert not scaler.active


def test_a_sharded_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 writes gradients of shards by itself: they stayed multiplied."""

    class FullyShardedDataParallel(nn.Linear):
        pass

    with pytest.raises(UnsupportedError, match="sharded"):
        LossScaler.install(nn.Sequential(FullyShardedDataParallel(2, 2)), [])
    monkeypatch.setattr("autoprec.optim.loss_scaling.is_sharded", lambda _model: True)
    with pytest.raises(UnsupportedError, match="sharded"):
        LossScaler.install(nn.Linear(2, 2), [])


def test_an_attribute_that_leads_to_all_of_torch_is_left_alone() -> None:
    """``fully_shard`` keeps its state in one."""
    model = Half()
    cycle: dict[str, Any] = {}
    cycle["again"] = cycle
    model.__dict__["__composable_api_state_key"] = cycle
    LossScaler.install(model, [])
    model(torch.randn(2, 4)).sum().backward()


def test_what_is_refused_leaves_the_optimizer_as_it_was() -> None:
    model = Half()
    optimizer = torch.optim.NAdam(model.parameters())
    with pytest.raises(UnsupportedError, match="NAdam"):
        wrap_optimizer(
            optimizer,
            Policy(activations="fp16", loss_scaling="dynamic", optimizer=OptimizerPolicy(exp_avg="bf16")),
            model,
        )
    assert loss_scaler_of(optimizer) is None
