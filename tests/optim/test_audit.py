import pytest
import torch
from torch import nn

from autoprec.optim.audit import audit_optimizer, audit_optimizers, optimizer_hints
from autoprec.optim.optimizer import wrap_optimizer
from autoprec.policy import OptimizerPolicy, Policy
from tests.levels import LEVELS


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_that_was_wrapped_is_executed(name):
    model, policy = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), LEVELS[name]
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters()), policy, model)
    step(model, optimizer)
    found = audit_optimizer(policy, optimizer, model)
    assert all(entry["ok"] for entry in found.values()), found
    sent = found.get("communication")  # nothing is distributed here
    assert (sent is None) == (policy.communication.gradients == "fp32")


@pytest.mark.parametrize("name", ["msamp-o2", "bf16-kahan", "amp-fp16"])
def test_a_level_that_was_not_wrapped_is_a_mismatch(name):
    model, policy = nn.Sequential(nn.Linear(8, 8)), LEVELS[name]
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    found = audit_optimizer(policy, optimizer, model)
    assert not all(entry["ok"] for entry in found.values())
    assert {entry["executed"] for entry in found.values()} <= {"fp32", "none", "-"}


def test_what_muon_does_not_keep_is_asked_of_the_optimizer_beside_it():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    policy = Policy(optimizer=OptimizerPolicy(exp_avg="bf16", exp_avg_sq="int8_block"))
    muon = torch.optim.Muon([model[0].weight])
    adamw, vectors = torch.optim.AdamW([model[1].weight]), torch.optim.AdamW([model[0].bias, model[1].bias])
    for optimizer in (muon, adamw, vectors):
        wrap_optimizer(optimizer, policy, model)
        step(model, optimizer)
    rows = audit_optimizer(policy, muon, model)
    assert (rows["exp_avg"]["executed"], rows["exp_avg"]["ok"]) == ("bf16", True)
    assert (rows["exp_avg_sq"]["executed"], rows["exp_avg_sq"]["ok"]) == ("-", True)
    assert audit_optimizer(policy, vectors, model)["exp_avg"]["reason"].startswith("AdamW trains no matrix")
    found = audit_optimizers(policy, (muon, adamw, vectors), model)
    assert {part: row["ok"] for part, row in found.items()} == {"optimizer.exp_avg": True, "optimizer.exp_avg_sq": True}


def test_before_the_first_step_it_says_so():
    model, policy = nn.Linear(8, 8), LEVELS["msamp-o2"]
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters()), policy, model)
    found = audit_optimizer(policy, optimizer)
    assert found["weights"]["ok"]
    assert found["exp_avg"]["executed"] == "nothing yet"


def test_gradients_that_were_cleared_since_still_count():
    model, policy = nn.Linear(8, 8), LEVELS["msamp-o1"]
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters()), policy, model)
    step(model, optimizer)
    optimizer.zero_grad()
    assert audit_optimizer(policy, optimizer)["gradients"]["ok"]
    plain = torch.optim.AdamW(model.parameters())
    assert audit_optimizer(LEVELS["amp-bf16"], plain)["gradients"]["ok"]


def test_communication_in_one_process_has_a_row_that_says_so():
    model, policy = nn.Linear(8, 8), LEVELS["msamp-o2"]
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters()), policy, model)
    row = audit_optimizer(policy, optimizer, model)["communication"]
    assert (row["requested"], row["executed"], row["ok"]) == ("fp8", "-", True)
    assert "one process" in row["reason"]


def test_emulated_storage_says_why():
    model, policy = nn.Linear(8, 8), LEVELS["bf16-kahan"]
    model.weight.register_hook(lambda gradient: gradient)
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters()), policy, model)
    found = audit_optimizer(policy, optimizer)["weights"]
    assert found["ok"]
    assert found["reason"] == "1 emulated: gradient hooks are registered on it"


def test_sgd_momentum_counts_as_first_moment():
    model = nn.Linear(8, 8)
    policy = Policy.model_validate({"schema": "autoprec.policy/1", "optimizer": {"exp_avg": "e4m3"}})
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), policy, model)
    step(model, optimizer)
    assert audit_optimizer(policy, optimizer)["exp_avg"] == {
        "requested": "e4m3",
        "executed": "e4m3",
        "ok": True,
        "reason": "",
    }


def test_the_scripts_own_scaler_counts():
    scaler = torch.amp.GradScaler("cpu")
    model, policy = nn.Linear(8, 8), LEVELS["amp-fp16"]
    optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters()), policy, model)
    found = audit_optimizer(policy, optimizer)["loss_scaling"]
    assert found["ok"]
    assert "GradScaler" in found["reason"]
    del scaler


@pytest.mark.parametrize(("name", "decay", "told"), [("te", 0.0, True), ("te", 0.1, False), ("amp-bf16", 0.0, False)])
def test_a_quantised_model_without_weight_decay_gets_a_hint(name, decay, told):
    model, policy = nn.Linear(8, 8), LEVELS[name]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=decay)
    assert "weight_decay" not in audit_optimizer(policy, optimizer, model), "nobody asked for it"
    found = optimizer_hints(policy, optimizer)
    assert bool(found) == told
    assert not told or "weights and logits grow" in found[0]


def test_state_that_an_optimizer_does_not_keep_was_not_executed():
    """SGD has no second moments: the audit said that they were held in fp32."""
    model, policy = nn.Linear(8, 8), Policy()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    step(model, optimizer)
    found = audit_optimizer(policy, optimizer, model)
    assert found["exp_avg"]["executed"] == "fp32"
    row = found["exp_avg_sq"]
    assert (row["executed"], row["ok"], row["reason"]) == ("-", True, "SGD keeps no such state")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.float32])
def test_what_is_left_alone_is_named_by_the_dtype_it_has(dtype):
    weight = nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    short = {torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    rows = audit_optimizer(Policy(), optimizer)
    for part in ("weights", "gradients", "exp_avg", "exp_avg_sq"):
        row = rows[part]
        asked = "fp32" if dtype is torch.float32 else "keep"
        assert (row["requested"], row["executed"], row["ok"]) == (asked, short.get(dtype, "complex64"), True)
        assert bool(row["reason"]) == (dtype is not torch.float32)
    optimizer.zero_grad()
    assert audit_optimizer(Policy(), optimizer)["gradients"]["executed"] == rows["gradients"]["executed"]


def test_state_that_is_asked_for_and_is_the_scripts_own_is_a_mismatch():
    model = nn.Linear(4, 4, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    row = audit_optimizer(Policy(optimizer=OptimizerPolicy(exp_avg="e4m3")), optimizer)["exp_avg"]
    assert (row["executed"], row["ok"]) == ("fp64", False)
