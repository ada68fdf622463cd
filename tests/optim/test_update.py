import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.optim.update import adam_update, muon_update, sgd_update

FINITE = {"allow_nan": False, "allow_infinity": False}


@settings(max_examples=40, deadline=None)
@given(
    cls=st.sampled_from([torch.optim.Adam, torch.optim.AdamW]),
    lr=st.floats(1e-5, 0.1, **FINITE),
    decay=st.sampled_from([0.0, 0.01, 0.1]),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.5)]),
    maximize=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_adam_is_torchs_bit_for_bit(cls, lr, decay, betas, maximize, seed):
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.nn.Parameter(torch.randn(5, 7, generator=generator))
    weight, first, second = parameter.detach().clone(), torch.zeros(5, 7), torch.zeros(5, 7)
    optimizer = cls([parameter], lr=lr, betas=betas, weight_decay=decay, maximize=maximize, foreach=False)
    for step in range(1, 4):
        parameter.grad = torch.randn(5, 7, generator=generator)
        optimizer.step()
        adam_update(weight, parameter.grad, first, second, float(step), optimizer.param_groups[0])
    assert torch.equal(weight, parameter)
    assert torch.equal(first, optimizer.state[parameter]["exp_avg"])
    assert torch.equal(second, optimizer.state[parameter]["exp_avg_sq"])


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.2)])
def test_sgd_is_torchs_bit_for_bit(momentum, dampening, nesterov):
    if nesterov and (momentum == 0 or dampening):
        pytest.skip("torch refuses Nesterov without momentum, or with dampening")
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(4, 4, generator=generator))
    options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": 0.01}
    optimizer = torch.optim.SGD([parameter], lr=0.1, foreach=False, **options)
    weight, buffer = parameter.detach().clone(), None
    for _ in range(4):
        parameter.grad = torch.randn(4, 4, generator=generator)
        optimizer.step()
        buffer = sgd_update(weight, parameter.grad, buffer, optimizer.param_groups[0])
    assert torch.equal(weight, parameter)
    assert (buffer is None) == (momentum == 0)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)])
@pytest.mark.parametrize("more", [{}, {"nesterov": False, "ns_steps": 3}, {"adjust_lr_fn": "match_rms_adamw"}])
def test_muon_is_torchs_bit_for_bit(shape, more):
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(*shape, generator=generator))
    optimizer = torch.optim.Muon([parameter], lr=0.02, weight_decay=0.1, **more)
    weight, buffer = parameter.detach().clone(), torch.zeros(*shape)
    for _ in range(4):
        parameter.grad = torch.randn(*shape, generator=generator)
        optimizer.step()
        muon_update(weight, parameter.grad.clone(), buffer, optimizer.param_groups[0])
    assert torch.equal(weight, parameter)
    assert torch.equal(buffer, optimizer.state[parameter]["momentum_buffer"])


def test_the_learning_rate_may_be_a_tensor():
    weight, first, second = torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
    group = {"lr": torch.tensor(0.1), "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    adam_update(weight, torch.ones(2, 2), first, second, 1.0, group)
    torch.testing.assert_close(weight, torch.full((2, 2), 0.9))
