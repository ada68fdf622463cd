"""torch's fused update, put on an optimizer that exists and off again: the same training but for roundings."""

import copy

import pytest
import torch

from autoprec.errors import UnsupportedError
from autoprec.optim.audit import audit_optimizer, audit_optimizers
from autoprec.optim.optimizer import check_optimizer, rewrap_optimizer, wrap_optimizer
from autoprec.optim.stepping.fused import fuse, is_fused, unfuse, why_not_fused
from autoprec.policy import OptimizerPolicy, Policy

FUSED = Policy(optimizer=OptimizerPolicy(update="fused"))
KINDS = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
]


def made(kind=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return model, kind(model.parameters(), **options)


def train(model, optimizer, steps=5, seed=1):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("before", [0, 3])
def test_training_is_the_same_but_for_roundings(kind, options, before):
    plain, ours = made(kind, **options), made(kind, **options)
    train(*plain, steps=before)
    train(*ours, steps=before)
    wrap_optimizer(ours[1], FUSED, model=ours[0])
    assert is_fused(ours[1])
    for one, other in zip(train(*plain), train(*ours), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    wrap_optimizer(ours[1], Policy(), model=ours[0])
    assert [group["fused"] for group in ours[1].param_groups] == [group["fused"] for group in plain[1].param_groups]
    for one, other in zip(train(*plain), train(*ours), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_groups_that_are_added_and_state_that_is_loaded_are_fused():
    model, optimizer = made(lr=1e-2)
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    fuse(optimizer)
    optimizer.load_state_dict(saved)
    assert is_fused(optimizer)
    train(model, optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert is_fused(optimizer)
    unfuse(optimizer)
    assert not any(group["fused"] for group in optimizer.param_groups)
    assert not optimizer.defaults["fused"]
    train(model, optimizer)


def test_what_the_script_fused_stays():
    _, optimizer = made(lr=1e-2, fused=True)
    wrap_optimizer(optimizer, FUSED)
    wrap_optimizer(optimizer, Policy())
    assert is_fused(optimizer)


def test_state_that_is_stored_low_goes_with_it():
    model, optimizer = made(lr=1e-2)
    policy = Policy(optimizer=OptimizerPolicy(update="fused", exp_avg="bf16"))
    wrap_optimizer(optimizer, policy, model=model)
    plain = made(lr=1e-2)
    wrap_optimizer(plain[1], Policy(optimizer=OptimizerPolicy(exp_avg="bf16")), model=plain[0])
    for one, other in zip(train(model, optimizer), train(*plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    rows = audit_optimizer(policy, optimizer, model)
    assert all(row["ok"] for row in rows.values()), rows
    assert rows["update"] == {"requested": "fused", "executed": "fused", "ok": True, "reason": ""}


def test_a_phase_may_begin_and_end_it():
    model, optimizer = made(lr=1e-2)
    rewrap_optimizer(optimizer, FUSED, model)
    assert is_fused(optimizer)
    rewrap_optimizer(optimizer, Policy(), model)
    assert not is_fused(optimizer)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop has no fused step"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable=True"),
        (lambda p: type("Own", (torch.optim.AdamW,), {})(p), "Own has no fused step"),
    ],
)
def test_what_has_no_fused_step_is_refused(make, why):
    optimizer = make([torch.nn.Parameter(torch.zeros(3))])
    assert why in why_not_fused(optimizer)
    for refuse in (lambda: wrap_optimizer(optimizer, FUSED), lambda: check_optimizer(optimizer, FUSED)):
        with pytest.raises(UnsupportedError, match="has no fused step"):
            refuse()


def test_what_is_beside_muon_is_fused():
    """The update of AdamW was not offered where Muon trains the matrices."""
    model = torch.nn.Linear(8, 4)
    pair = torch.optim.Muon([model.weight], lr=0.02), torch.optim.AdamW([model.bias], lr=1e-3)
    for optimizer in pair:
        check_optimizer(optimizer, FUSED)
        wrap_optimizer(optimizer, FUSED, model)
    for optimizer in pair:
        train(model, optimizer)
    assert [bool(optimizer.param_groups[0].get("fused")) for optimizer in pair] == [False, True]
    for order in (pair, pair[::-1]):
        assert audit_optimizers(FUSED, order, model)["optimizer.update"]["ok"]
    row = audit_optimizers(FUSED, pair[:1], model)["optimizer.update"]
    assert (row["ok"], row["reason"]) == (False, "Muon has no fused step of torch's")


def test_complex_parameters_and_other_devices_have_none():
    assert "complex64" in why_not_fused(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))]))
    assert "on meta" in why_not_fused(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3, device="meta"))]))


def test_an_audit_sees_that_it_was_taken_away():
    model, optimizer = made(lr=1e-2)
    wrap_optimizer(optimizer, FUSED, model=model)
    train(model, optimizer)
    optimizer.param_groups[0]["fused"] = False
    assert not audit_optimizer(FUSED, optimizer, model)["update"]["ok"]
