"""The products of an optimizer's step in another dtype: those of large matrices, there alone, and off again."""

import copy

import pytest
import torch

from autoprec.optim.audit import audit_optimizer, audit_optimizers
from autoprec.optim.optimizer import rewrap_optimizer, wrap_optimizer
from autoprec.optim.stepping.products import multiplies, products_of, set_products
from autoprec.policy import OptimizerPolicy, Policy

BF16, FP32 = (Policy(optimizer=OptimizerPolicy(products=dtype)) for dtype in ("bf16", "fp32"))


@pytest.fixture
def dynamo():
    """What is compiled here is nobody else's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def newton_schulz(matrix, dtype=torch.float32, steps=5):
    """Keller Jordan's, in one file of his as ``X = G.bfloat16()``."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.to(dtype)
    x = x.mT if matrix.shape[-2] > matrix.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x.mT if matrix.shape[-2] > matrix.shape[-1] else x


class OwnMuon(torch.optim.Optimizer):
    """A script's own, which iterates in the dtype that it is told."""

    def __init__(self, parameters, lr=0.02, dtype=torch.float32, iterate=newton_schulz):
        super().__init__(parameters, {"lr": lr})
        self.dtype, self.iterate, self.seen = dtype, iterate, []

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                update = self.iterate(p.grad, self.dtype)
                self.seen.append(update.dtype)
                p.add_(update, alpha=-group["lr"])
        return loss


class Soap(torch.optim.Optimizer):
    """A preconditioner on both sides: accumulated with lerp_, which demands one dtype, and products that write."""

    def __init__(self, parameters, lr=0.02):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["left"], state["right"] = torch.eye(p.shape[0]), torch.eye(p.shape[1])
                state["left"].lerp_(torch.einsum("ij,kj->ik", p.grad, p.grad), 0.1)
                state["right"].addmm_(p.grad.T, p.grad, beta=0.9, alpha=0.1)
                update = torch.empty_like(p)
                torch.mm(state["left"], p.grad, out=update)
                p.add_(update @ state["right"], alpha=-group["lr"])


def made(kind=OwnMuon, shape=(192, 256), **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(*shape, bias=False)
    return model, kind(model.parameters(), **options)


def train(model, optimizer, steps=3):
    x = torch.randn(32, model.in_features, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model.weight.detach().clone()


def apart(one, other, start):
    return float((one - other).norm() / (one - start).norm())


KINDS = [
    (OwnMuon, {}, 15),
    (torch.optim.Muon, {"lr": 0.02}, 0),  # in bf16 by itself
    (Soap, {}, 4),
]


@pytest.mark.parametrize(("kind", "options", "products"), KINDS)
def test_large_products_are_in_the_wanted_dtype_and_results_in_their_own(kind, options, products):
    start, plain, ours = made(kind)[0].weight.detach(), made(kind, **options), made(kind, **options)
    wrap_optimizer(ours[1], BF16, model=ours[0])
    one, other = train(*plain), train(*ours)
    held = products_of(ours[1])
    assert (held.mode.count, held.steps) == (3 * products, 3)
    assert (apart(one, other, start) > 1e-4) is bool(products)
    assert apart(one, other, start) < 0.1
    wrap_optimizer(ours[1], Policy(), model=ours[0])
    assert products_of(ours[1]) is None
    assert "step" not in vars(ours[1])
    ours[0].weight.data.copy_(plain[0].weight.data)
    ours[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    assert torch.equal(train(*plain), train(*ours))


@pytest.mark.parametrize("kind", [torch.optim.Muon, lambda p: OwnMuon(p, dtype=torch.bfloat16)])
def test_what_a_script_has_in_bf16_is_multiplied_in_fp32_and_rounded_between(kind):
    start, exact = made()[0].weight.detach(), made()
    train(*exact)
    plain, ours = made(kind), made(kind)
    wrap_optimizer(ours[1], FP32, model=ours[0])
    one, other = train(*plain), train(*ours)
    assert products_of(ours[1]).mode.count == 3 * 15
    assert 1e-4 < apart(one, other, start) < 0.1
    assert {torch.bfloat16}.issuperset(getattr(ours[1], "seen", []))


def test_small_products_other_dtypes_and_what_is_trained_are_left_alone():
    for options in ({"shape": (64, 64)}, {"dtype": torch.float64}):
        model, optimizer = made(**options)
        set_products(optimizer, "bf16")
        train(model, optimizer)
        assert products_of(optimizer).mode.count == 0
    mode = products_of(optimizer).mode
    weight, x = torch.ones(256, 256, requires_grad=True), torch.ones(256, 256)
    with mode:
        out = weight @ x
        assert mode.count == 0
        out.sum().backward()
        assert mode.count == 0
        with torch.no_grad():
            assert torch.mm(weight, x).dtype == torch.float32
    assert mode.count == 1


def test_batches_of_matrices_and_results_that_are_written():
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 192, 192), torch.randn(3, 192, 192), torch.randn(3, 192, 192)
    _, optimizer = made()
    set_products(optimizer, "bf16")
    mode = products_of(optimizer).mode
    run = {
        "bmm": lambda: torch.bmm(a, b),
        "bmm.out": lambda: torch.bmm(a, b, out=torch.empty(0)),
        "baddbmm": lambda: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0),
        "baddbmm_": lambda: c.clone().baddbmm_(a, b, beta=0.5, alpha=2.0),
        "addmm": lambda: torch.addmm(c[0, 0], a[0], b[0], alpha=0.5),
        "addmm.out": lambda: torch.addmm(c[0], a[0], b[0], out=torch.empty(192, 192)),
        "einsum": lambda: torch.einsum("bij,bjk->bik", a, b),
        "linear": lambda: torch.nn.functional.linear(a, b[0]),
    }
    for name, product in run.items():
        exact, before = product(), mode.count
        with mode, torch.no_grad():
            found = product()
        assert mode.count == before + 1, name
        assert found.dtype == torch.float32
        error = float((found - exact).norm() / exact.norm())
        assert 1e-4 < error < 0.01, name


def test_a_closure_runs_outside():
    model, optimizer = made()
    set_products(optimizer, "bf16")
    x, dtypes = torch.randn(256, 192), []

    def closure():
        with torch.no_grad():
            dtypes.append(torch.equal(model(x), expected))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        expected = model(x)
    assert optimizer.step(closure).item() > 0
    expected = model(x).detach()
    assert optimizer.step(closure=closure).item() > 0
    assert dtypes == [True, True]
    assert products_of(optimizer).mode.count == 2 * 15


def test_a_step_that_fails_leaves_no_mode_behind():
    _, optimizer = made()
    set_products(optimizer, "bf16")
    with pytest.raises(AttributeError):
        optimizer.step()  # there is no gradient
    a = torch.ones(256, 256)
    torch.mm(a, a)
    assert products_of(optimizer).mode.count == 0


@pytest.mark.parametrize("made_before", [False, True])
def test_a_scheduler_may_wrap_the_step(made_before):
    model, optimizer = made()
    if made_before:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    set_products(optimizer, "bf16")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, steps=1)
    schedule.step()
    assert products_of(optimizer).mode.count == 15
    set_products(optimizer, "keep")
    train(model, optimizer, steps=1)
    assert (products_of(optimizer) is None) is made_before  # else the schedule's step is around it
    set_products(optimizer, "bf16")
    train(model, optimizer, steps=1)
    assert (products_of(optimizer).mode.count, products_of(optimizer).steps) == (15, 1)


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_what_a_step_compiles_stays_compiled_and_a_whole_step_is_not(whole, before):
    ran = []

    def backend(module, _inputs):
        def graph(*inputs):
            ran.append(1)
            return module(*inputs)

        return graph

    compiled = torch.compile(newton_schulz, backend=backend)
    model, optimizer = made(iterate=newton_schulz if whole else compiled)
    train(model, optimizer, steps=int(before))
    set_products(optimizer, "bf16")
    if whole:
        optimizer.step = torch.compile(optimizer.step, backend=backend)
    train(model, optimizer, steps=2)
    assert products_of(optimizer).mode.count == 2 * 15
    assert bool(ran) is not whole
    if not whole:
        ran.clear()
        set_products(optimizer, "keep")
        train(model, optimizer, steps=2)
        assert len(ran) >= 2


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # Inductor imports it
def test_the_products_of_inductors_code_are_seen():
    model, optimizer = made(iterate=torch.compile(newton_schulz))
    set_products(optimizer, "bf16")
    start, exact = model.weight.detach().clone(), train(*made())
    found = train(model, optimizer)
    assert products_of(optimizer).mode.count == 3 * 15
    assert 1e-4 < apart(exact, found, start) < 0.3


@pytest.mark.usefixtures("dynamo")
def test_a_step_that_was_compiled_before_is_told_of():
    model, optimizer = made()
    step = torch.compile(optimizer.step, backend="eager")
    wrap_optimizer(optimizer, BF16, model=model)
    optimizer.step = step
    train(model, optimizer)
    row = audit_optimizer(BF16, optimizer, model)["products"]
    assert (row["ok"], row["executed"]) == (False, "nothing yet")
    assert "compiled before the optimizer was wrapped" in row["reason"]


def test_stored_momentum_goes_with_it():
    model, optimizer = made(torch.optim.Muon)
    policy = Policy(optimizer=OptimizerPolicy(products="fp32", exp_avg="bf16"))
    wrap_optimizer(optimizer, policy, model=model)
    train(model, optimizer)
    rows = audit_optimizer(policy, optimizer, model)
    assert all(row["ok"] for row in rows.values()), rows
    assert rows["products"] == {"requested": "fp32", "executed": "fp32", "ok": True, "reason": "15 products a step"}
    rewrap_optimizer(optimizer, BF16, model)
    train(model, optimizer)
    assert products_of(optimizer).mode.count == 0  # Muon's own are in bf16
    wrap_optimizer(optimizer, Policy(), model=model)
    assert products_of(optimizer) is None


def test_of_several_optimizers_one_that_multiplies_is_enough():
    model, muon = made()
    rest = torch.nn.Linear(4, 4)
    adamw = torch.optim.AdamW(rest.parameters())
    assert (multiplies(adamw), multiplies(muon), multiplies(torch.optim.Muon(model.parameters()))) == (0, 1, 1)

    def audited(*optimizers):
        return audit_optimizers(BF16, optimizers, model)["optimizer.products"]

    for optimizer in (adamw, muon):
        wrap_optimizer(optimizer, BF16, model=model)
    assert "step" not in vars(adamw)
    assert audited(adamw, muon)["executed"] == "nothing yet"
    train(model, muon)
    for order in ((adamw, muon), (muon, adamw)):
        assert audited(*order) == {
            "requested": "bf16", "executed": "bf16", "ok": True, "reason": "15 products a step"
        }  # fmt: skip
    assert not audited(adamw)["ok"]
    assert "no optimizer here multiplies" in audited(adamw)["reason"]
    small, own = made(shape=(8, 8))
    wrap_optimizer(own, BF16)
    train(small, own)
    assert "large enough to gain" in audited(own)["reason"]
    assert not audited()["ok"]
