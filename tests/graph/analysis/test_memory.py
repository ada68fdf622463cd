"""Memory of a step: parameters, gradients and saved tensors exact; optimizer state exact before it exists."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec.graph.analysis.memory import newton_schulz, optimizer_bytes
from autoprec.graph.recorder import record_step
from autoprec.graph.report import GraphReport, NewtonSchulz


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        torch.optim.Adagrad,
        torch.optim.Adafactor,
        torch.optim.RMSprop,
    ],
)
def test_optimizer_state_is_predicted_exactly(make):
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8))
    model[0].bias.requires_grad_(False)
    optimizer = make(model.parameters())
    seen = []
    handle = register_optimizer_step_pre_hook(lambda *_: seen.append(1))
    predicted = optimizer_bytes(optimizer)
    handle.remove()
    assert not seen
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    assert predicted == optimizer_bytes(optimizer)


def test_muons_state_is_predicted_and_its_products_are_counted():
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Conv1d(4, 8, 3))
    muon = torch.optim.Muon([model[0].weight, model[2].weight], ns_steps=3)
    assert optimizer_bytes(muon) == 2 * 16 * 32 * 4
    (found,) = newton_schulz([muon, torch.optim.AdamW(model[1].parameters())])
    assert found == NewtonSchulz(16, 32, 3, 2)
    assert found.flops == 2 * 3 * 2 * (16 * 32 * 16 + 16 * 16 * 16 + 16 * 16 * 32)

    class MuonWithAuxAdam(torch.optim.SGD):
        """Keller Jordan's: groups say whose they are, and convolutions are flattened."""

    groups = [{"params": [model[3].weight], "use_muon": True}, {"params": [model[0].weight], "use_muon": False}]
    assert newton_schulz([MuonWithAuxAdam(groups, lr=0.1)]) == (NewtonSchulz(8, 12, 5, 1),)


def test_a_step_that_muon_ends_says_what_it_multiplies():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
    report = record_step(model, lambda: model(torch.randn(4, 16)).sum().backward(), optimizers=[muon])
    assert any(note.startswith("Muon makes the updates of 2 matrices orthogonal") for note in report.notes)
    assert GraphReport.from_json(report.to_json()).newton_schulz == report.newton_schulz != ()


def test_operators_of_muons_step_are_listed_matrix_by_matrix_and_are_those_that_run():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(8, 8, bias=False))
    plain = record_step(model, lambda: model(torch.randn(4, 16)).sum().backward())
    model.zero_grad()
    muon = torch.optim.Muon([model[0].weight, model[1].weight], ns_steps=3)
    report = record_step(model, lambda: model(torch.randn(4, 16)).sum().backward(), optimizers=[muon])
    assert (report.operators, report.total_flops) == (plain.operators, plain.total_flops)
    assert not muon.state
    rows = report.updating
    assert {(row.weight, row.module) for row in rows} == {("0.weight", "0"), ("1.weight", "1")}
    assert {(row.phase, row.precision) for row in rows} == {("optimizer", "keep")}
    assert all("of Muon's step: optimizer.products says" in row.reason for row in rows)
    products = [row for row in rows if row.cls == "gemm"]
    assert len(products) == 2 * 3 * 3
    assert {dtype for row in products for dtype in row.dtypes} == {"bf16"}
    assert products[0].shapes == ((16, 32), (32, 16))
    assert sum(row.flops for row in rows) == sum(shape.flops for shape in report.newton_schulz)
    listed = report.to_json()["operators"]
    assert [listed[maker]["op"] for maker in products[0].inputs] == ["aten::div_", "aten::permute"]
    assert GraphReport.from_json(report.to_json()) == report
    muon.step()  # which makes the momentum
    with Ran() as ran:
        muon.step()
    assert Counter(row.op for row in rows) == Counter(op for op in ran.ops if not op.startswith("profiler::"))


class Ran(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Preconditioned(torch.optim.Optimizer):
    """As SOAP: the first step makes state alone, and a number of its data is read."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "left" in state and p.grad.abs().max().item() >= 0:
                p.sub_(state["left"] @ p.grad * torch.rand(()))
            state["left"] = torch.eye(p.shape[0])


def test_other_optimizers_that_multiply_are_tried_on_zeros_and_none_that_steps_with_another():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    base = torch.optim.SGD(model[1].parameters(), lr=1.0)

    class Lookahead(torch.optim.Optimizer):
        def __init__(self):
            self.base = base
            super().__init__(model[1].parameters(), {})

        def step(self):
            self.base.step()

    optimizers = [Preconditioned(model[0].parameters()), Lookahead(), torch.optim.AdamW([model[0].bias])]
    before = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(4, 16)
    torch.manual_seed(0)
    report = record_step(model, lambda: model(x).sum().backward(), optimizers=optimizers[:1])
    drawn = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(3))
    (product,) = report.step_products()
    assert (product.m, product.k, product.n, product.dtype) == (32, 32, 16, "fp32")
    assert {row.weight for row in report.updating} == {"0.weight"}
    again = record_step(model, lambda: model(torch.randn(4, 16)).sum().backward(), optimizers=optimizers[1:])
    assert again.updating == ()
    assert all(map(torch.equal, before[:2], model.parameters()))


def test_another_muon_whose_step_needs_data_has_no_operators_and_its_products_are_counted():
    class Muon(torch.optim.SGD):
        def step(self, closure=None):
            assert self.param_groups[0]["params"][0].grad.sum().item() >= 0

    model = nn.Linear(8, 8)
    report = record_step(
        model, lambda: model(torch.ones(2, 8)).sum().backward(), optimizers=[Muon([model.weight], 0.1)]
    )
    assert (report.updating, len(report.newton_schulz)) == ((), 1)


def test_an_optimizer_nobody_can_predict_is_left_out():
    class Odd(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

        def step(self, closure=None):
            raise RuntimeError("needs the real thing")

    model = nn.Linear(4, 4)
    report = record_step(model, lambda: model(torch.randn(2, 4)).sum().backward(), optimizers=[Odd(model.parameters())])
    assert "optimizer" not in report.memory


def test_saved_tensors_are_counted_once_without_parameters_and_batch():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(32, 8)
    memory = record_step(model, lambda: model(x).sum().backward()).memory
    assert memory["parameters"] == memory["gradients"] == 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert memory["saved_for_backward"] == 4 * 32 * 16  # tanh's output, which the next layer saves too


def test_frozen_parameters_have_no_gradients():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    memory = record_step(model, lambda: model(torch.randn(2, 8)).sum().backward()).memory
    assert memory["parameters"] == 2 * memory["gradients"]
