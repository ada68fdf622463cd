import copy
import gc
import io

import pytest
import torch
from torch import nn

from autoprec.errors import PolicyMismatchError, UnsupportedError
from autoprec.optim.optimizer import loss_scaler_of, runtime_of, skipped_steps, wrap_optimizer
from autoprec.optim.tensor import StoredTensor
from autoprec.policy import OptimizerPolicy, Policy

LOW = [
    {"exp_avg": "bf16"},
    {"exp_avg": "e4m3"},
    {"exp_avg_sq": "fp16_scaled"},
    {"exp_avg_sq": "int8_block"},
    {"weights": "fp16_scaled"},
    {"weights": "bf16_stochastic"},
    {"weights": "bf16_kahan"},
    {"weights": "e4m3_master"},
    {"gradients": "e4m3"},
    {"weights": "fp16_scaled", "exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled", "gradients": "e4m3"},
    {"weights": "e4m3_master", "exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled", "gradients": "e4m3"},
]


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 16, generator=generator)
    return x, torch.tanh(x[:, :4] * 2 + x[:, 4:8])


def train(model, optimizer, steps, start=0, scheduler=None):
    losses = []
    for step in range(start, start + steps):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, **options)


@pytest.fixture(scope="module")
def reference():
    """The losses of 120 steps in FP32."""
    model = network()
    return train(model, adamw(model), 120)


@pytest.mark.parametrize("choice", LOW, ids=str)
def test_training_follows_fp32(choice, reference):
    model = network()
    losses = train(model, wrap_optimizer(adamw(model), OptimizerPolicy(**choice), model), 120)
    assert losses[-1] < 0.5 * losses[0]
    assert sum(losses[-20:]) == pytest.approx(sum(reference[-20:]), rel=0.05)
    assert losses != reference


def test_an_all_fp32_policy_changes_nothing():
    model = network()
    optimizer = adamw(model)
    before = set(vars(optimizer))
    assert wrap_optimizer(optimizer, Policy()) is optimizer
    assert set(vars(optimizer)) == before
    assert runtime_of(optimizer) is None


@pytest.mark.parametrize("make", [adamw, lambda m: torch.optim.Adam(m.parameters(), 3e-3, weight_decay=0.01)])
def test_lossless_storage_is_bit_identical_to_torch(make, monkeypatch):
    """With storage that loses nothing, our update is torch's: only rounding tells the two apart."""
    from autoprec.optim.codecs import CODECS, CastCodec

    monkeypatch.setitem(CODECS, ("exp_avg", "bf16"), CastCodec("fp32", torch.float32))
    plain, wrapped = network(), network()
    expected = train(plain, make(plain), 20)
    assert train(wrapped, wrap_optimizer(make(wrapped), OptimizerPolicy(exp_avg="bf16"), wrapped), 20) == expected


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"dampening": 0.1}, {"maximize": True}])
def test_sgd_momentum_is_bit_identical_with_lossless_storage(options, monkeypatch):
    from autoprec.optim.codecs import CODECS, CastCodec

    def make(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, **options)

    monkeypatch.setitem(CODECS, ("exp_avg", "bf16"), CastCodec("fp32", torch.float32))
    plain, wrapped = network(), network()
    expected = train(plain, make(plain), 5)
    assert train(wrapped, wrap_optimizer(make(wrapped), OptimizerPolicy(exp_avg="bf16"), wrapped), 5) == expected


@pytest.mark.parametrize("first", ["scheduler", "wrap"])
def test_schedulers_hooks_and_param_groups_keep_working(first):
    model = network()
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters()), "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    seen = []
    optimizer.register_step_post_hook(lambda *a: seen.append("post"))
    choice = OptimizerPolicy(weights="bf16_kahan", exp_avg="e4m3")
    if first == "wrap":
        assert wrap_optimizer(optimizer, choice, model) is optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if first == "scheduler":
        wrap_optimizer(optimizer, choice, model)
    train(model, optimizer, 3, scheduler=scheduler)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2 / 8, 1e-3 / 8]
    assert seen == ["post"] * 3
    assert type(optimizer) is torch.optim.AdamW
    assert type(model[0].weight) is StoredTensor
    assert isinstance(model[0].weight, nn.Parameter)


def test_a_closure_runs_once_per_step():
    model = network()
    optimizer = wrap_optimizer(adamw(model), OptimizerPolicy(exp_avg="e4m3"), model)
    calls = []

    def closure():
        optimizer.zero_grad()
        x, y = batch(0)
        loss = (model(x) - y).square().mean()
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1


@pytest.mark.parametrize("choice", LOW, ids=str)
def test_resume_through_files_continues_bit_identically(choice):
    choice = OptimizerPolicy(**choice)
    model = network()
    optimizer = wrap_optimizer(adamw(model), choice, model)
    train(model, optimizer, 8)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = train(model, optimizer, 8, start=8)

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert {type(v) for v in saved["model"].values()} == {torch.Tensor}
    resumed = network()
    again = wrap_optimizer(adamw(resumed), choice, resumed)
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert train(resumed, again, 8, start=8) == expected


@pytest.mark.parametrize("choice", LOW, ids=str)
def test_checkpoints_go_to_plain_adamw_and_back(choice):
    choice, model = OptimizerPolicy(**choice), network()
    optimizer = wrap_optimizer(adamw(model), choice, model)
    train(model, optimizer, 5)
    document = copy.deepcopy(optimizer.state_dict())
    plain_model = network()
    plain = adamw(plain_model)
    plain_model.load_state_dict(model.state_dict())
    plain.load_state_dict(document)
    for state in plain.state.values():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(type(v) is torch.Tensor and v.dtype == torch.float32 for v in state.values())
    losses = train(plain_model, plain, 5, start=5)
    assert losses == pytest.approx(train(model, optimizer, 5, start=5), rel=0.02)
    # and back: what a plain run saved loads into a wrapped optimizer
    optimizer.load_state_dict(plain.state_dict())
    assert train(model, optimizer, 3, start=10)[-1] < 1.0


@pytest.mark.parametrize("choice", LOW, ids=str)
def test_unwrap_restores_a_plain_optimizer(choice):
    model = network()
    optimizer = wrap_optimizer(adamw(model), OptimizerPolicy(**choice), model)
    train(model, optimizer, 3)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    wrap_optimizer(optimizer, OptimizerPolicy())
    assert runtime_of(optimizer) is None
    assert not any(isinstance(v, StoredTensor) for s in optimizer.state.values() for v in s.values())
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        torch.testing.assert_close(parameter.detach(), values[name] + 0.0, rtol=0.07, atol=1e-2)
    train(model, optimizer, 3, start=3)


def test_wrapping_mid_run_keeps_the_state_so_far():
    model = network()
    optimizer = adamw(model)
    train(model, optimizer, 5)
    expected = copy.deepcopy(optimizer.state[model[0].weight]["exp_avg"])
    wrap_optimizer(optimizer, OptimizerPolicy(exp_avg="e4m3"), model)
    held = optimizer.state[model[0].weight]["exp_avg"]
    assert isinstance(held, StoredTensor)
    torch.testing.assert_close(held.decode(), expected, rtol=0.07, atol=float(expected.abs().max()) / 400)
    assert float(optimizer.state[model[0].weight]["step"]) == 5


def test_runs_are_paired_the_global_generator_is_not_touched():
    model = network()
    before = torch.get_rng_state()
    train(model, wrap_optimizer(adamw(model), OptimizerPolicy(weights="bf16_stochastic"), model), 3)
    assert torch.equal(before, torch.get_rng_state())


def test_embeddings_keep_their_dtype_when_the_model_is_known():
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10)
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    optimizer = torch.optim.AdamW(model.parameters())
    wrap_optimizer(optimizer, OptimizerPolicy(weights="fp16_scaled"), model)
    assert type(embedding.weight) is nn.Parameter
    assert type(head.weight) is StoredTensor
    wrap_optimizer(optimizer, OptimizerPolicy())
    assert type(head.weight) is nn.Parameter


def test_a_parameter_with_hooks_is_emulated_with_the_same_numerics():
    model, hooked = network(), network()
    choice = OptimizerPolicy(weights="bf16_kahan")
    expected = train(model, wrap_optimizer(adamw(model), choice, model), 10)
    for parameter in hooked.parameters():
        parameter.register_hook(lambda gradient: gradient)
    optimizer = wrap_optimizer(adamw(hooked), choice, hooked)
    assert train(hooked, optimizer, 10) == expected
    assert type(hooked[0].weight) is nn.Parameter
    assert runtime_of(optimizer).weights.emulated == {"gradient hooks are registered on it": 2}


def test_a_non_finite_gradient_skips_the_step_and_is_counted():
    model = network()
    optimizer = wrap_optimizer(adamw(model), OptimizerPolicy(exp_avg="e4m3"), model)
    train(model, optimizer, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model[3].bias.grad[0] = float("inf")
    optimizer.step()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert skipped_steps(optimizer) == 1
    train(model, optimizer, 2)
    assert skipped_steps(optimizer) == 1


@pytest.mark.parametrize(
    ("optimizer", "choice", "error", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), {"exp_avg": "bf16"}, UnsupportedError, "RMSprop"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {"exp_avg": "bf16"}, UnsupportedError, "amsgrad"),
        (lambda p: torch.optim.SGD(p, 0.1, 0.9), {"exp_avg_sq": "int8_block"}, PolicyMismatchError, "SGD has none"),
        (lambda p: torch.optim.SGD(p, 0.1), {"exp_avg": "bf16"}, PolicyMismatchError, "without momentum"),
    ],
)
def test_combinations_that_cannot_work_are_refused(optimizer, choice, error, message):
    model = network()
    made = optimizer(model.parameters())
    with pytest.raises(error, match=message) as caught:
        wrap_optimizer(made, OptimizerPolicy(**choice), model)
    assert caught.value.fix
    assert type(model[0].weight) is nn.Parameter


def muon_pair(model):
    """Muon for the matrices and AdamW for the rest, as its authors ask for; the head is the rest's."""
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and name != "3.weight"]
    rest = [p for p in model.parameters() if all(p is not one for one in matrices)]
    return torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)


def pair_losses(model, pair, steps=8):
    found = []
    for step in range(steps):
        x, y = batch(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        for optimizer in pair:
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_muon_with_nothing_asked_is_the_original_bit_for_bit():
    plain, wrapped = network(), network()
    pair = muon_pair(wrapped)
    for optimizer in pair:
        wrap_optimizer(optimizer, OptimizerPolicy(), wrapped)
    assert pair_losses(plain, muon_pair(plain)) == pair_losses(wrapped, pair)


def test_muons_momentum_is_stored_low_and_its_products_are_left_as_they_are():
    plain, stored = network(), network()
    reference = pair_losses(plain, muon_pair(plain))
    pair = muon_pair(stored)
    for optimizer in pair:  # second moments are AdamW's, so Muon is not asked for one
        wrap_optimizer(optimizer, OptimizerPolicy(exp_avg="bf16", exp_avg_sq="int8_block"), stored)
    losses = pair_losses(stored, pair)
    assert losses != reference
    assert losses == pytest.approx(reference, rel=0.02)
    held = [value for state in pair[0].state.values() for value in state.values()]
    assert held
    assert all(isinstance(value, StoredTensor) and value.codec.name == "bf16" for value in held)
    saved = pair[0].state_dict()["state"][0]["momentum_buffer"]
    assert type(saved) is torch.Tensor
    assert saved.dtype is torch.float32
    again = network()
    loaded = wrap_optimizer(muon_pair(again)[0], OptimizerPolicy(exp_avg="bf16"), again)
    loaded.load_state_dict(pair[0].state_dict())
    assert torch.equal(loaded.state[loaded.param_groups[0]["params"][0]]["momentum_buffer"].decode(), saved)


def test_weights_that_muon_trains_may_be_stored_low():
    model = network()
    pair = muon_pair(model)
    for optimizer in pair:
        wrap_optimizer(optimizer, OptimizerPolicy(weights="fp16_scaled", exp_avg="e4m3"), model)
    losses = pair_losses(model, pair, 40)
    assert losses[-1] < 0.7 * losses[0]


def test_muon_alone_has_no_second_moment_and_adamw_beside_it_may_have_no_matrix():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with pytest.raises(PolicyMismatchError, match="a second moment, and Muon has none"):
        wrap_optimizer(torch.optim.Muon(model.parameters()), OptimizerPolicy(exp_avg_sq="int8_block"), model)
    both = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    vectors = torch.optim.AdamW([p for p in both.parameters() if p.dim() == 1])
    wrap_optimizer(vectors, OptimizerPolicy(exp_avg="bf16"), both)
    both(torch.ones(2, 8)).sum().backward()
    vectors.step()
    assert not any(isinstance(v, StoredTensor) for state in vectors.state.values() for v in state.values())


def test_another_muon_than_torchs_is_refused_with_its_name():
    class Muon(torch.optim.SGD):
        def step(self, closure=None):
            return None

    model = network()
    with pytest.raises(UnsupportedError, match=r"torch's Adam, AdamW, SGD and Muon, not for .*Muon"):
        wrap_optimizer(Muon(model.parameters(), 0.1), OptimizerPolicy(exp_avg="bf16"), model)


def test_flattened_and_sharded_parameters_are_refused():
    flat = nn.Parameter(torch.zeros(100))
    with pytest.raises(UnsupportedError, match="no parameter is a matrix"):
        wrap_optimizer(torch.optim.AdamW([flat]), OptimizerPolicy(exp_avg="bf16"))

    class Sharded(nn.Parameter):
        def to_local(self):
            return self

    shard = Sharded(torch.zeros(4, 4))
    with pytest.raises(UnsupportedError, match="sharded"):
        wrap_optimizer(torch.optim.AdamW([shard]), OptimizerPolicy(exp_avg="bf16"))


def test_the_script_may_use_its_own_grad_scaler_and_clipping():
    model = network()
    optimizer = wrap_optimizer(adamw(model), OptimizerPolicy(weights="fp16_scaled", gradients="e4m3"), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for step in range(60):
        x, y = batch(step)
        optimizer.zero_grad()
        scaler.scale(loss := (model(x) - y).square().mean()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert float(norm) < 10
    assert losses[-1] < 0.5 * losses[0]


def test_gradient_accumulation_adds_stored_gradients():
    model, plain = network(), network()
    wrap_optimizer(adamw(model), OptimizerPolicy(gradients="e4m3"), model)

    def accumulate():
        for net in (model, plain):
            for step in range(3):
                x, y = batch(step)
                (net(x) - y).square().mean().backward()

    with pytest.warns(UserWarning, match="after every micro-step") as told:
        accumulate()
    assert len(told) == 1
    assert isinstance(model[0].weight.grad, StoredTensor)
    expected = plain[0].weight.grad
    assert float((model[0].weight.grad.decode() - expected).norm() / expected.norm()) < 0.05


def test_loss_scaling_is_installed_from_the_policy():
    gc.collect()  # a scaler that another test leaves in a cycle is one of the script's own until then
    policy = Policy(recipes={"fp16": {"format": "fp16"}}, default="fp16", loss_scaling="dynamic")
    model = network()
    optimizer = wrap_optimizer(adamw(model), policy, model)
    assert loss_scaler_of(optimizer).active
    wrap_optimizer(optimizer, OptimizerPolicy())
    assert loss_scaler_of(optimizer) is None


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}, {"maximize": False}])
def test_implementations_of_torch_make_no_difference(options):
    model, other = network(), network()
    choice = OptimizerPolicy(weights="bf16_kahan", exp_avg="e4m3", exp_avg_sq="fp16_scaled")
    expected = train(model, wrap_optimizer(adamw(model), choice, model), 10)
    losses = train(other, wrap_optimizer(adamw(other, **options), choice, other), 10)
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_fused_optimizer_and_the_scripts_grad_scaler_agree_on_overflow():
    model = network()
    optimizer = wrap_optimizer(adamw(model, fused=True), OptimizerPolicy(exp_avg="e4m3"), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    scaler.scale((model(batch(0)[0]) * torch.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    plain = network()
    for net, made in ((model, optimizer), (plain, adamw(plain))):
        x, y = batch(1)
        net.zero_grad()
        loss = (net(x) - y).square().mean()
        if net is model:
            scaler.scale(loss).backward()
            scaler.step(made)
        else:
            loss.backward()
            made.step()
    torch.testing.assert_close(model[3].bias.detach(), plain[3].bias.detach(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(model[0].weight.detach(), plain[0].weight.detach(), rtol=1e-2, atol=1e-3)


def test_gradients_zeroed_in_place_stay_stored():
    model = network()
    optimizer = wrap_optimizer(adamw(model), OptimizerPolicy(gradients="e4m3"), model)
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad(set_to_none=False)
        (model(x) - y).square().mean().backward()
        optimizer.step()
    assert isinstance(model[0].weight.grad, StoredTensor)
    optimizer.zero_grad(set_to_none=False)
    assert model[0].weight.grad.decode().abs().sum() == 0


def test_parameters_added_later_are_stored_too():
    model, late = network(), nn.Linear(8, 8)
    optimizer = wrap_optimizer(adamw(model), OptimizerPolicy(exp_avg="e4m3"), model)
    optimizer.add_param_group({"params": list(late.parameters())})
    late(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert isinstance(optimizer.state[late.weight]["exp_avg"], StoredTensor)
    assert type(optimizer.state[late.bias]["exp_avg"]) is torch.Tensor


@pytest.mark.parametrize("choice", [{"weights": "bf16_kahan"}, {"exp_avg": "e4m3"}, {"gradients": "e4m3"}], ids=str)
@pytest.mark.parametrize("through", ["step", "function"])
def test_a_compiled_step_goes_on_training(choice, through):
    """Dynamo calls ``_init_group`` once, when it traces a step: what is updated there would be updated once."""
    plain, model = network(), network()
    optimizers = [wrap_optimizer(adamw(one), OptimizerPolicy(**choice)) for one in (plain, model)]
    expected = train(plain, optimizers[0], 4)
    step = optimizers[1].step
    optimizers[1].step = torch.compile(step if through == "step" else lambda: step(), backend="eager")
    assert train(model, optimizers[1], 4) == expected
    wrap_optimizer(optimizers[0], OptimizerPolicy())
    assert optimizers[0].step.__func__ is torch.optim.AdamW.step


def test_an_optimizer_that_holds_another_names_it():
    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.base_optimizer = torch.optim.SGD(self.param_groups)

    with pytest.raises(UnsupportedError, match=r"wrap_optimizer\(optimizer\.base_optimizer\)"):
        wrap_optimizer(Sam(network().parameters()), OptimizerPolicy(weights="bf16_kahan"))


def test_a_step_that_was_compiled_before_is_refused():
    optimizer = adamw(model := network())
    step = torch.compile(optimizer.step, backend="eager")
    wrap_optimizer(optimizer, OptimizerPolicy(exp_avg="e4m3"))
    model(batch(0)[0]).sum().backward()
    with pytest.raises(Exception, match=r"before torch\.compile takes optimizer\.step"):
        step()
