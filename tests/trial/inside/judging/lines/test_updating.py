"""What an update by hand loses before it reaches the weights."""

import warnings

import pytest

from benchmarks.precision.running import found_in_text

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
half = torch.DTYPE
net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 10)).to(half)
P = PARAMS
momenta = [torch.zeros_like(p, dtype=torch.float32) for p in P]
def loss_of(x, y):
    h = torch.relu(x @ P[0].t() + P[1]) @ P[2].t() + P[3]
    return F.cross_entropy(h.float(), y) * 4096
for step in range(5):
    x, y = torch.randn(64, 512).to(half), torch.randint(0, 10, (64,))
    gs = torch.autograd.grad(loss_of(x, y), P)
    NORM
    with torch.no_grad():
        for p, m, g in zip(P, momenta, gs):
            UPDATE
"""
HELD = {
    "a module's": "list(net.parameters())",
    "tensors": "[p.detach().clone().requires_grad_() for p in net.parameters()]",
}
SCALED = "p.sub_(4.0 * g * torch.clamp(1.0 / (total + 1e-6), max=1.0))"
OVERFLOWS = {
    "a sum of squares": "total = sum((g ** 2).sum() for g in gs) ** 0.5  # here",
    "stacked": "total = torch.stack([g.pow(2).sum() for g in gs]).sum().sqrt()  # here",
    "products": "total = torch.sqrt(sum((g * g).sum() for g in gs))  # here",
    "two lines": "squares = [g.square().sum() for g in gs]  # here\n    total = sum(squares).sqrt()",
    "flat": "flat = torch.cat([g.flatten() for g in gs])\n    total = (flat * flat).sum().sqrt()  # here",
}
SAFE = {
    "fp32": "total = sum((g.float() ** 2).sum() for g in gs) ** 0.5",
    "torch's own": "total = torch.stack([g.norm() for g in gs]).norm()",
    "scaled first": "total = sum(((g / 64).float() ** 2).sum() for g in gs) ** 0.5 * 64",
    "none": "total = torch.ones(())",
}


def told(
    norm: str, update: str = SCALED, *, held: str = "tensors", dtype: str = "float16"
) -> dict[str, tuple[str, str]]:
    """Return severity and text of the line of each finding but those of what the weights then are, by code."""
    text = SCRIPT.replace("NORM", norm).replace("UPDATE", update).replace("PARAMS", HELD[held]).replace("DTYPE", dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scripts' own
        found = found_in_text(text)
    lines = text.splitlines()
    rows = {one.code: (one.severity, lines[int(one.place.rpartition(":")[2]) - 1].strip()) for one in found}
    return {code: row for code, row in rows.items() if code != "updates-lost"}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("norm", OVERFLOWS)
def test_a_norm_of_gradients_that_overflows_is_named(norm: str, held: str) -> None:
    (line,) = (one.strip() for one in OVERFLOWS[norm].splitlines() if "# here" in one)
    assert told(OVERFLOWS[norm], held=held) == {"overflow-16bit": ("error", line)}


@pytest.mark.parametrize("norm", SAFE)
def test_a_norm_in_fp32_is_not_named(norm: str) -> None:
    assert told(SAFE[norm]) == {}


def test_bfloat16_has_the_range_for_it() -> None:
    assert "overflow-16bit" not in told(OVERFLOWS["a sum of squares"], dtype="bfloat16")


def test_a_number_that_python_computes_with_reaches_the_weights_and_one_that_is_logged_does_not() -> None:
    norm = OVERFLOWS["a sum of squares"]
    python = "p.sub_(4.0 * g * min(1.0, 1.0 / (total.item() + 1e-6)))"
    assert told(norm, python) == {"overflow-16bit": ("error", norm)}
    assert told(norm + "\n    logged = total * 2", "p.sub_(0.001 * g)") == {"overflow-16bit": ("warning", norm)}


RUNNING = {
    "numbers": "for v in gs[1][:300].float().abs().tolist(): total = total + v",
    "tensors": "for v in gs[1][:300].abs().unbind(): total += v",
    "norms of rows": "for v in gs[0][:300].norm(dim=1): total = total.add(v)",
}


@pytest.mark.parametrize("how", RUNNING)
def test_a_running_sum_in_16_bits_is_named(how: str) -> None:
    first = "total = torch.zeros((), dtype=half)\n    "
    found = told(first + RUNNING[how], "p.sub_(4.0 * g * (1.0 / (total + 1.0)))", dtype="bfloat16")
    assert found["reduction-16bit"] == ("warning", RUNNING[how])
    wide = first.replace("dtype=half", "dtype=torch.float32") + RUNNING[how]
    assert "reduction-16bit" not in told(wide, "p.sub_(4.0 * g * (1.0 / (total + 1.0)))", dtype="bfloat16")


@pytest.mark.parametrize(
    "update",
    [
        "m.mul_(0.9).add_(g); p.sub_(1e-3 * g / (g.abs() + 1e-8))",
        "p.sub_(1e-3 * g / (g * g).sqrt().add(1e-10))",
        "p.sub_(1e-3 * g / g.abs().clamp_min(1e-8))",
        "p.sub_((1e-3 * g).div(torch.add(g.abs(), 1e-8)))",
        "d = g.abs(); d += 1e-8; p.sub_(1e-3 * g / d)",
    ],
)
def test_an_epsilon_that_is_zero_is_named(update: str) -> None:
    assert told("pass", update)["eps-zero"] == ("error", update)
    assert told("pass", update.replace("g.abs()", "g.float().abs()").replace("(g * g)", "(g * g).float()")) == {}


OWN = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
half = torch.DTYPE
class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            s = self.state[p]
            v = s["v"] = s.get("v", torch.zeros_like(p)).mul(0.9).addcmul(p.grad, p.grad, value=0.1)
            UPDATE
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(half)
optimizer = Own(net.parameters())
for step in range(3):
    loss = F.cross_entropy(net(torch.randn(16, 32).to(half)).float(), torch.randint(0, 8, (16,))) * 128
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "update",
    [
        "p.addcdiv_(p.grad, v.sqrt().add_(1e-8), value=-1e-2)",
        "p.sub_(1e-2 * p.grad / (v.sqrt() + 1e-8))",
        "p.sub_(1e-2 * p.grad / v.add(1e-10).sqrt())",
        "p.sub_(1e-2 * p.grad / v.sqrt().clamp_min(1e-8))",
        "p.sub_(1e-2 * p.grad / torch._foreach_add([v.sqrt()], 1e-8)[0])",
    ],
)
def test_an_epsilon_of_an_optimizer_of_its_own_is_named_where_it_is_added(update: str) -> None:
    def eps(dtype: str) -> list[int]:
        found = found_in_text(OWN.replace("UPDATE", update).replace("DTYPE", dtype))
        return [int(one.place.rpartition(":")[2]) for one in found if one.code == "eps-zero"]

    assert eps("float16") == [OWN.splitlines().index("            UPDATE") + 1]
    assert eps("bfloat16") == []
