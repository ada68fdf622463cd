"""A step played again with lines lifted: what the gradient owes to each."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.trial.inside.isolate.answering import Unanswered
from autoprec.trial.inside.judging.lifting import Lift
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.lifted import LiftedLines
from autoprec.trial.protocol import LiftSpec
from benchmarks.precision.running import stopped_at_first_step

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self, *, sums: bool) -> None:
        super().__init__()
        self.up, self.down, self.sums = nn.Linear(32, 256), nn.Linear(256, 8), sums

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up(x))
        if self.sums:
            total = torch.zeros_like(x[:, 0])
            for column in range(256):
                total = total + x[:, column].abs()  # the line that loses most
            x = x / total[:, None]
        return self.down(x)


def lifted(dtype: torch.dtype, *, sums: bool = False, wide: bool = True, autocast: bool = False) -> LiftedLines:
    """Return what lifting says of one step of a small network."""
    torch.manual_seed(0)
    hooks, answers = Hooks(), list[Any]()
    hooks.install()
    try:
        model = Net(sums=sums).to(torch.float32 if autocast else dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = Found([model], [optimizer], list(model.parameters()))
        Lift(LiftSpec(), found, hooks, answers.append).start()
        before = [p.detach().clone() for p in model.parameters()]
        x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
        with torch.autocast("cpu", dtype, enabled=autocast):
            logits = model(x if autocast else x.to(dtype))
        loss = F.cross_entropy(logits.float() if wide else logits, y)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        hooks.events.gradients_ready(optimizer)
    finally:
        hooks.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    (answer,) = answers
    assert isinstance(answer, LiftedLines), answer
    return answer


def line_of(where: str) -> str:
    file, _, line = where.rpartition(":")
    with open(file) as stream:
        return stream.read().splitlines()[int(line) - 1].strip()


def test_the_line_that_loses_most_comes_first_and_the_noise_is_nothing() -> None:
    answer = lifted(BF16, sums=True)
    assert line_of(answer.rows[0]["where"]).startswith("optimizer = ")  # whose weights are in bfloat16
    answer = replace(answer, rows=answer.rows[1:])
    assert line_of(answer.rows[0]["where"]).startswith("total = total + x[:, column].abs()")
    assert answer.rows[0]["gradient"] > 3 * answer.rows[1]["gradient"]
    assert answer.rows[0]["error"] > 0.02
    assert answer.noise is not None
    assert 0 < answer.noise < 0.1 * answer.rows[0]["gradient"]
    assert answer.every is not None
    assert answer.every >= 0.5 * answer.rows[0]["gradient"]
    assert answer.every_update is not None


@pytest.mark.parametrize("autocast", [True, False])
def test_the_loss_is_lifted_at_its_own_line_outside_the_model(autocast: bool) -> None:
    rows = {line_of(row["where"]): row for row in lifted(BF16, wide=False, autocast=autocast).rows}
    loss = next(row for line, row in rows.items() if line.startswith("loss = F.cross_entropy"))
    assert loss["gradient"] > 1e-4
    cast = [row for row in lifted(BF16, autocast=autocast).rows if "cross_entropy" in line_of(row["where"])]
    assert all(row["gradient"] < 1e-6 for row in cast)  # its backward rounds the gradient once, as it has to


def test_a_script_in_fp32_is_lifted_to_fp64_and_owes_nothing_to_it() -> None:
    answer = lifted(torch.float32, sums=True)
    assert answer.wide == "fp64"
    assert answer.every is not None
    assert 0 < answer.every < 1e-5
    assert (answer.rows, answer.left > 0) == ((), True)  # where all together change nothing, none is lifted alone


def test_a_step_that_cannot_be_played_is_said_to_be() -> None:
    model = Net(sums=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    answers: list[Any] = []
    lift = Lift(LiftSpec(), Found([model], [optimizer], list(model.parameters())), Hooks(), answers.append)
    lift.start()
    lift.gradients_ready(optimizer)
    assert isinstance(answers[0], Unanswered)
    assert "no loss of the model was seen" in answers[0].why


ODD = """
import torch, torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
MADE
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 8)
    def forward(self, x):
        h = self.a(x)
        MIDDLE
        return self.b(h)
net = Net().to(torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for step in range(2):
    x, y = torch.randn(16, 32).to(next(net.parameters()).dtype), torch.randint(0, 8, (16,))
    out = net(x)
    LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOSS, GATE = "loss = F.cross_entropy(out.float(), y)", "h = h * h.sigmoid() * h.mean(-1, keepdim=True)"
SCRIPTED = """@torch.jit.script
def gate(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x * x * 0.5 + x)"""
KERNEL = """@torch.library.custom_op("odd::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).contiguous()
twice.register_autograd(lambda ctx, grad: grad * 2)"""
AGAIN = "h = torch.utils.checkpoint.checkpoint(lambda h: h * h.sigmoid() * h.mean(), h, use_reentrant=False)"
SUMS = """total = torch.zeros_like(h[:, 0])
        for k in range(64): total += h[:, k].abs()
        h = h / (total[:, None] + 1)"""
NESTED = """(slope,) = torch.autograd.grad(out.sum(), net.a.weight, create_graph=True)
    loss = out.float().square().mean() + slope.float().square().mean()"""


@pytest.mark.filterwarnings("ignore")  # the scripts' own
@pytest.mark.parametrize(
    ("made", "middle", "loss", "change", "lifts"),
    [
        ("", GATE, LOSS, {}, GATE),
        ("", GATE, LOSS, {"to(torch.bfloat16)": "float()", "out = net(x)":
         "out = torch.autocast('cpu', torch.bfloat16)(net)(x).float()"}, GATE),
        ("", SUMS, LOSS, {}, "for k in range(64)"),
        (SCRIPTED, "h = gate(h)", LOSS, {}, "h = gate(h)"),
        (KERNEL, "h = torch.ops.odd.twice(h) * h.sigmoid() + h.mean()", LOSS, {}, "h = torch.ops"),
        ("import torch.utils.checkpoint", AGAIN, LOSS, {}, "h = torch.utils"),
        ("", GATE, NESTED, {}, GATE),
        ("", GATE, LOSS, {"out = net(x)": "out = torch.func.functional_call(net, dict(net.named_parameters()), (x,))"},
         GATE),
        ("", GATE, "loss = F.cross_entropy(out, y)", {"to(torch.bfloat16)": "double()"}, ""),
    ],
)  # fmt: skip
def test_odd_scripts_are_lifted_or_said_not_to_be(
    made: str, middle: str, loss: str, change: dict[str, str], lifts: str, tmp_path: Path
) -> None:
    text = ODD.replace("MADE", made).replace("MIDDLE", middle).replace("LOSS", loss)
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "odd.py").write_text(text)
    answers: list[Any] = []

    def arrived(found: Found, hooks: Hooks, end: Callable[[], None]) -> None:
        def done(answer: Any) -> None:
            answers.append(answer)
            end()

        Lift(LiftSpec(), found, hooks, done).start()

    stopped_at_first_step(tmp_path / "odd.py", (), arrived)
    (answer,) = answers
    assert isinstance(answer, LiftedLines), answer
    told = [line_of(row["where"]) for row in answer.rows if row["gradient"]]
    assert any(line.startswith(lifts) for line in told) if lifts else (told, answer.left, answer.alike) == ([], 0, 0)
