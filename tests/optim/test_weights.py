import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from autoprec.errors import AutoPrecWarning
from autoprec.optim.optimizer import runtime_of, wrap_optimizer
from autoprec.optim.tensor import StoredTensor
from autoprec.optim.weights import StoredWeights
from autoprec.policy import OptimizerPolicy

KAHAN = OptimizerPolicy(weights="bf16_kahan")


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"table": nn.Embedding(5, 4), "linear": nn.Linear(4, 3), "conv": nn.Conv1d(3, 2, 2)})


def test_matrices_are_stored_vectors_and_embeddings_are_not():
    net = model()
    weights = StoredWeights.install(list(net.parameters()), KAHAN)
    kinds = {name: isinstance(p, StoredTensor) for name, p in net.named_parameters()}
    assert kinds == {
        "table.weight": False,
        "linear.weight": True,
        "linear.bias": False,
        "conv.weight": True,
        "conv.bias": False,
    }
    assert not weights.emulated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_a_model_in_sixteen_bits_every_weight_is_stored_beside(dtype):
    net = model().to(dtype)
    weights = StoredWeights.install(list(net.parameters()), KAHAN)
    assert weights.beside.keys() == {id(p) for p in net.parameters()}
    assert list(weights.emulated.values()) == [5]


def test_a_tied_embedding_stays_plain():
    net = model()
    net["head"] = nn.Linear(4, 5, bias=False)
    net["head"].weight = net["table"].weight
    StoredWeights.install(list(net.parameters()), KAHAN)
    assert type(net["head"].weight) is nn.Parameter


def test_identity_attributes_and_gradient_survive_the_exchange_and_the_return():
    layer = nn.Linear(4, 3)
    parameter = layer.weight
    parameter.no_decay = True
    parameter.grad = torch.ones(3, 4)
    before = parameter.detach().clone()
    weights = StoredWeights.install([parameter], KAHAN)
    assert layer.weight is parameter
    assert isinstance(parameter, StoredTensor)
    assert parameter.no_decay
    assert torch.equal(parameter.grad, torch.ones(3, 4))
    assert parameter.requires_grad
    weights.remove()
    assert layer.weight is parameter
    assert type(parameter) is nn.Parameter
    assert parameter.no_decay
    torch.testing.assert_close(parameter.detach(), before, rtol=2**-16, atol=0)


def held_by_a_graph(layer):
    return layer(torch.ones(1, 4)).sum()


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda layer: layer.weight.register_hook(lambda g: g), "gradient hooks"),
        (lambda layer: layer.weight.register_post_accumulate_grad_hook(lambda p: None), "gradient hooks"),
        (held_by_a_graph, "gradient accumulator"),
        (lambda layer: layer.bfloat16(), "torch.bfloat16"),
    ],
)
def test_where_it_cannot_be_exchanged_the_reason_is_kept(prepare, reason):
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    alive = prepare(layer)
    exact = layer.weight.detach().float().clone()
    weights = StoredWeights.install([layer.weight], KAHAN)
    assert [text for text in weights.emulated if reason in text], weights.emulated
    assert not isinstance(layer.weight, StoredTensor)
    assert layer.weight in weights
    torch.testing.assert_close(weights.read(layer.weight), exact, rtol=2**-16, atol=0)
    assert torch.equal(layer.weight.detach().float(), exact.bfloat16().float())
    weights.write(layer.weight, exact + 1, torch.Generator())
    torch.testing.assert_close(weights.checkpoint(layer.weight)["weight_exact"], exact + 1, rtol=2**-15, atol=0)
    weights.remove()
    assert alive is not None


def test_gradients_are_stored_as_they_arrive():
    layer = nn.Linear(4, 3)
    weights = StoredWeights.install(list(layer.parameters()), OptimizerPolicy(gradients="e4m3"))
    layer(torch.ones(2, 4)).sum().backward()
    assert isinstance(layer.weight.grad, StoredTensor)
    assert type(layer.bias.grad) is torch.Tensor
    weights.remove()
    layer.zero_grad()
    layer(torch.ones(2, 4)).sum().backward()
    assert type(layer.weight.grad) is torch.Tensor


@pytest.mark.parametrize("stored", ["fp32", "bf16_kahan"])
def test_a_frozen_weight_stores_its_gradients_once_it_trains(stored):
    """Gradual unfreezing gives the optimizer all parameters from the start."""
    layer = nn.Linear(4, 3).requires_grad_(False)
    weights = StoredWeights.install([*layer.parameters()], OptimizerPolicy(gradients="e4m3", weights=stored))
    assert not layer.weight.requires_grad
    layer.requires_grad_(True)
    layer(torch.ones(2, 4)).sum().backward()
    assert isinstance(layer.weight.grad, StoredTensor)
    weights.remove()


@pytest.mark.parametrize("how", ["tied", "flat"])
def test_memory_that_is_shared_stays_shared(how):
    """Scripts tie weights by ``data``, or keep all of them in one flat vector: both see what is learned."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    weights = [layer.weight for layer in model]
    flat = torch.randn(128)
    for weight, values in zip(weights, (flat[:64], flat[:64] if how == "tied" else flat[64:]), strict=True):
        weight.data = values.view(8, 8)
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), KAHAN)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
    assert torch.equal(flat[:64].view(8, 8), weights[0])
    assert torch.equal((flat[:64] if how == "tied" else flat[64:]).view(8, 8), weights[1])
    assert [*runtime_of(optimizer).weights.emulated.values()] == [2]


@pytest.mark.parametrize("left_out", ["a hook takes the step", "no step is taken"])
def test_gradients_that_went_are_not_accumulated(left_out):
    layer = nn.Linear(4, 3)
    if left_out == "a hook takes the step":
        layer.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    weights = StoredWeights.install(list(layer.parameters()), OptimizerPolicy(gradients="e4m3"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            layer(torch.ones(2, 4)).sum().backward()
            layer.zero_grad()
    assert weights.gradients_stored == (0 if left_out == "a hook takes the step" else 3)
    layer(torch.ones(2, 4)).sum().backward()
    with pytest.warns(AutoPrecWarning, match="accumulation") if left_out == "no step is taken" else nullcontext():
        layer(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "choice",
    [
        {"weights": "bf16_kahan"},
        {"weights": "bf16_stochastic", "exp_avg": "bf16"},
        {"weights": "e4m3_master", "gradients": "e4m3"},
        {"gradients": "bf16"},
        {"weights": "fp16_scaled", "gradients": "e4m3", "exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"},
    ],
    ids=str,
)
def test_a_group_that_is_added_later_trains_as_one_that_was_there_before(choice, dtype):
    ends = []
    for later in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[:-2], lr=1e-2, eps=1e-4)
        if later:
            wrap_optimizer(optimizer, OptimizerPolicy(**choice), model)
        optimizer.add_param_group({"params": parameters[-2:]})
        if not later:
            wrap_optimizer(optimizer, OptimizerPolicy(**choice), model)
        for step in range(4):
            x = torch.randn(32, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            optimizer.zero_grad()
            (model(x) - x[:, :4]).float().square().mean().backward()
            optimizer.step()
        held = [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
        ends.append([*(p.detach().float().clone() for p in model.parameters()), *held])
    assert len(ends[0]) == len(ends[1])
    assert all(map(torch.equal, *ends))
    wrap_optimizer(optimizer, OptimizerPolicy())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    assert type(optimizer.param_groups[-1]["params"][0]) is nn.Parameter
