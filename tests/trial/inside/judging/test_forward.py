"""Lines of forward and backward: what is seen in a recorded step, and what is not taken for a fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.trial.inside.judging.forward import Step, seen
from autoprec.trial.inside.judging.shadow import ShadowRecorder
from benchmarks.precision.running import found_in_text

BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.middle = nn.Linear(32, 64), nn.Linear(64, 8), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self.up(x)).to(self.down.weight.dtype))


def codes(
    middle: Callable[[Tensor], Tensor], *, dtype: torch.dtype = BF16, autocast: bool = False, wide: bool = True
) -> set[str]:
    """Return the codes of what a step of a small network shows, whose middle is ``middle``."""
    torch.manual_seed(0)
    model = Net(middle).to(torch.float32 if autocast else dtype)
    x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
    with ShadowRecorder(model) as recorder:
        with torch.autocast("cpu", dtype, enabled=autocast):
            logits = model(x if autocast else x.to(dtype))
        F.cross_entropy(logits.float() if wide else logits, y).backward()
    return {one.code for one in seen(Step(recorder, recorder.report(), scaled=True))}


@pytest.mark.parametrize(
    "middle",
    [
        F.gelu,
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.layer_norm(x - x.mean(-1, keepdim=True), x.shape[-1:]),  # whose means are nothing but rounding
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype),
        lambda x: F.softmax(x, -1, dtype=torch.float32),
        lambda x: F.dropout(x, 0.5) + x,
        lambda x: x.masked_fill(x > 1, -torch.inf).softmax(-1),
        lambda x: torch.where(x > 0, x, x.exp()),
    ],
)
@pytest.mark.parametrize("autocast", [True, False])
def test_ordinary_rounding_is_not_a_fault(middle: Callable[[Tensor], Tensor], autocast: bool) -> None:
    assert codes(middle, autocast=autocast) == set()


@pytest.mark.parametrize(
    ("middle", "code"),
    [
        (lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), "norm-16bit"),
        (lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(), "norm-16bit"),
        (lambda x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt(), "norm-16bit"),
        (lambda x: (lambda e: e / e.sum(-1, keepdim=True))(x.exp()), "softmax-16bit"),
        (lambda x: ((x + 50) - 50) * 2, "reduction-16bit"),
        (
            lambda x: (x + 30).square().mean(-1, keepdim=True) - (x + 30).mean(-1, keepdim=True).square() + x,
            "reduction-16bit",
        ),
        (lambda x: x.double().sin(), "wide-part"),
        (lambda x: torch.fft.rfft(x.float(), 126).abs(), "wide-part"),
    ],
)
def test_what_is_written_by_hand_in_bfloat16_is_seen(middle: Callable[[Tensor], Tensor], code: str) -> None:
    assert code in codes(middle)


@pytest.mark.parametrize(
    ("dtype", "middle"), [(torch.float16, lambda x: (x * 500).square() / 1e6), (torch.float16, lambda x: x * 7e4)]
)
def test_overflow_is_seen_where_it_begins(dtype: torch.dtype, middle: Callable[[Tensor], Tensor]) -> None:
    assert "overflow-16bit" in codes(middle, dtype=dtype)


def test_a_loss_of_rounded_logits_is_seen_and_autocast_is_told_from_a_cast() -> None:
    assert codes(F.gelu, wide=False) == {"loss-16bit"}
    assert codes(F.gelu, autocast=True, wide=False) == {"loss-16bit"}
    assert codes(F.gelu, dtype=torch.float32, wide=False) == set()


@pytest.mark.parametrize(
    ("loss", "classes"),
    [
        (lambda z, y: F.nll_loss(
            F.log_softmax(z, -1),
            y), [8]),
        (lambda z, y: F.nll_loss(
            z.log_softmax(-1).view(64, 8).float(),
            y), [8]),
        (lambda z, y: -(
            F.log_softmax(z, -1)
        ).gather(1, y[:, None]).mean(), [8]),
        (lambda z, y: F.kl_div(
            F.log_softmax(z, -1),
            F.one_hot(y, 8).to(z.dtype), reduction="batchmean"), [8]),
        (lambda z, y: F.cross_entropy(z, y), [8]),
        (lambda z, y: F.cross_entropy(z, y)
            + F.cross_entropy(z * 2, y), [8, 8]),
        (lambda z, y: F.mse_loss(z, F.one_hot(y, 8).to(z.dtype)), [1]),
        (lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 8).to(z.dtype)), [1]),
        (lambda z, y: F.nll_loss(
            F.log_softmax(z.float(), -1),
            y), []),
    ],
)  # fmt: skip
def test_one_loss_is_said_once_where_its_digits_go(
    loss: Callable[[Tensor, Tensor], Tensor], classes: list[int]
) -> None:
    torch.manual_seed(0)
    model = Net(F.gelu).to(BF16)
    x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
    with ShadowRecorder(model) as recorder:
        loss(model(x.to(BF16)), y).backward()
    found = [one for one in seen(Step(recorder, recorder.report())) if one.code == "loss-16bit"]
    assert [one.figures["classes"] for one in found] == classes
    assert all("nll" not in one.operator and one.where not in one.also for one in found)


@pytest.mark.parametrize(
    "expression",
    [
        lambda a, b: 16 * a - 2 * b - 8 * (a + b) + a + b - 6 * a + 9 * b,
        lambda a, b: (a + 40) + (b + 40) + (a + b) - (a + b + 80),
        lambda a, b: torch.rsub(a, b) + (a + 90) + (b + 90) + a - 180,
    ],
)
def test_a_polynomial_is_not_a_running_sum(expression: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(BF16)
    with ShadowRecorder(model) as recorder:
        out = model(torch.randn(64, 8, dtype=BF16))
        expression(out.detach(), out.detach().roll(1, 0)).sum()
        out.sum().backward()
    assert "accumulator-16bit" not in {one.code for one in seen(Step(recorder, recorder.report()))}


@pytest.mark.parametrize(
    "update",
    [
        lambda state, grad: state.addcmul_(grad, grad, value=0.001),  # Adam's second moment
        lambda state, grad: state.mul_(0.9).add_(grad.square()),
        lambda state, grad: state.lerp_(grad * grad, 0.001),
        lambda state, grad: state.add_(grad.pow(3)),
        lambda state, grad: state.addcdiv_(grad * grad, grad.abs() + 1e-8),
    ],
)
def test_the_state_of_another_optimizer_in_fp32_loses_no_digits_of_its_own(
    update: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(BF16)
    with ShadowRecorder(model) as recorder:
        out = model(torch.randn(64, 8, dtype=BF16))
        near = out.detach() * 1e-4 + 100.2
        grad = near.float() - 100.2
        update(torch.zeros(64, 8), grad)
        out.sum().backward()
    found = [one for one in seen(Step(recorder, recorder.report())) if one.code == "reduction-16bit"]
    assert [one.operator for one in found] == ["aten::sub"]


_NEAR = """
import torch
from torch import nn
torch.manual_seed(0)
net, near = nn.Linear(32, 32), nn.Parameter(10 + 0.1 * torch.randn(16, 32))
optimizer = torch.optim.SGD([*net.parameters(), near], lr=0.1)
for step in range(3):
    with torch.autocast("cpu", torch.bfloat16):
        z, c = net(torch.randn(64, 32)) * 0.1 + 10, near.to(torch.bfloat16)
        logits = -(z.square().sum(1)[:, None] + c.square().sum(1) - 2 * z @ c.T)
    y = torch.randint(0, 16, (64,))
    LOSS
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "loss",
    [
        "loss = nn.functional.cross_entropy(logits.float(), y)",
        "loss = nn.functional.nll_loss(logits.float().log_softmax(-1), y)",
        "logits = logits.float(); loss = (logits.logsumexp(-1) - logits.gather(-1, y[:, None])[:, 0]).mean()",
        "loss = nn.functional.multi_margin_loss(logits.float(), y)",
        "loss = nn.functional.cross_entropy(logits.float() / 2, y, label_smoothing=0.1)",
    ],
)
def test_a_loss_of_what_was_lost_before_it_is_not_named(loss: str) -> None:
    found = found_in_text(_NEAR.replace("LOSS", loss))
    assert [(one.code, int(one.place.rpartition(":")[2])) for one in found] == [("reduction-16bit", 10)]


_SHIFTED = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1000))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    logits, y = net(torch.randn(64, 32)).bfloat16(), torch.randint(0, 1000, (64, 1))
    shifted = logits - TOP
    loss = -(shifted - shifted.exp().sum(-1, keepdim=True).log()).gather(-1, y).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "top", ["logits.amax(-1, keepdim=True)", "logits.max(-1, keepdim=True).values", "logits.mean(-1, keepdim=True)"]
)
def test_a_gradient_whose_terms_cancel_is_not_said_to_be_lost(top: str) -> None:
    """A softmax's shift has no gradient: what rounding leaves of it was said to be off by thousands of percent."""
    found = found_in_text(_SHIFTED.replace("TOP", top))
    assert found
    assert [(one.code, one.grade) for one in found if one.seen.figures.get("gradient", 0.0) > 0.1] == []


_DOUBLE = """
import numpy, torch
from torch import nn
torch.manual_seed(0)
x = torch.from_numpy(numpy.ones((8, 16)))
net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
CAST
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    y = x.to(net[0].weight.dtype)
    loss = net(y).square()
    LATER
    optimizer.zero_grad()
    loss.mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("cast", "later", "line"),
    [
        ("net.double()", "", 7),
        ("net = net.double()", "", 7),
        ("net.to(torch.float64)", "", 7),
        ("net.float().to(dtype=torch.double)", "", 7),
        ("", "loss = loss.double().sqrt()", 12),
        ("", "loss = loss.to(torch.float64) / 3", 12),
        ("", "loss = loss * torch.ones(4, dtype=torch.float64)", 12),
        ("net.double()", "loss = loss.float()", 7),
    ],
)
def test_the_line_that_makes_a_part_wide_is_named(cast: str, later: str, line: int) -> None:
    (found,) = found_in_text(_DOUBLE.replace("CAST", cast).replace("LATER", later))
    assert (found.code, int(found.place.rpartition(":")[2])) == ("wide-part", line)


_CLIPPED = """
import torch
from torch import nn

torch.manual_seed(0)
heads = nn.ModuleList(nn.Linear(32, 4) for _ in range(150)).to(torch.DTYPE)
optimizer = torch.optim.SGD(heads.parameters(), lr=1.0)
for step in range(3):
    x, y = torch.randn(64, 32).to(torch.DTYPE), torch.randint(4, (64,))
    optimizer.zero_grad()
    loss = sum(nn.functional.cross_entropy(head(x).float(), y) for head in heads)
    (SCALE * loss).backward()
    gs = [p.grad for p in heads.parameters()]
    NORM
    for g in gs if CLIPS else []:
        g.mul_((1e-3 / (norm + 1e-3)).clamp(max=1.0))
    optimizer.step()
"""


def _clipped(norm: str, dtype: str = "bfloat16", scale: str = "1", clips: str = "True") -> dict[str, list[Any]]:
    """Return severity and text of the line of each finding about what follows backward, by code."""
    words = {"NORM": norm, "DTYPE": dtype, "SCALE": scale, "CLIPS": clips}
    text = _CLIPPED
    for word, said in words.items():
        text = text.replace(word, said)
    seen, lines = dict[str, list[Any]](), text.splitlines()
    for one in found_in_text(text):
        if one.code in ("accumulator-16bit", "overflow-16bit", "reduction-16bit"):
            line = lines[int(one.place.rpartition(":")[2]) - 1].strip()
            seen.setdefault(one.code, []).append((one.severity, line))
    return seen


_SUM = "norm = sum((g ** 2).sum() for g in gs).sqrt()"
_LOOP = "total = torch.zeros((), dtype=gs[0].dtype)\n    for g in gs: total += g.pow(2).sum()\n    norm = total.sqrt()"
_LINES = "squares = [g.pow(2).sum() for g in gs]\n    total = sum(squares)\n    norm = total ** 0.5"
_FLAT = "flat = torch.cat([g.flatten() for g in gs])\n    norm = (flat * flat).sum().sqrt()"


@pytest.mark.parametrize(
    ("norm", "line"),
    [
        (_SUM, 0),
        (_LOOP, 1),
        (_LINES, 1),
        (_SUM.replace("g ** 2", "g * g"), 0),
        (_SUM.replace("(g ** 2).sum()", "g.norm() ** 2"), 0),
    ],
)
def test_a_norm_of_gradients_that_16_bits_add_up_is_named_once(norm: str, line: int) -> None:
    assert _clipped(norm) == {"accumulator-16bit": [("error", norm.split("\n")[line].strip())]}


@pytest.mark.parametrize("norm", [_SUM, _LOOP, _LINES, _FLAT, _SUM.replace("g ** 2", "g * g")])
def test_squares_of_gradients_that_overflow_are_named_and_not_what_follows(norm: str) -> None:
    (found,) = _clipped(norm, "float16", "8192").values()
    ((severity, line),) = found
    assert severity == "error"
    assert any(word in line for word in ("** 2", "g * g", "pow(2)", "flat * flat"))


@pytest.mark.parametrize("norm", [_SUM, _LINES])
def test_a_norm_that_is_logged_alone_is_no_error(norm: str) -> None:
    (bfloat16,) = _clipped(norm, clips="False")["accumulator-16bit"]
    (float16,) = _clipped(norm, "float16", "8192", clips="False")["overflow-16bit"]
    assert (bfloat16[0], float16[0]) == ("warning", "warning")


@pytest.mark.parametrize(
    "norm",
    [
        "norm = sum((g.float() ** 2).sum() for g in gs).sqrt()",
        "norm = torch.stack([g.norm() for g in gs]).norm()",
        "norm = nn.utils.get_total_norm(gs)",
        "norm = torch.stack([g.abs().max() for g in gs]).max()",
        "norm = torch.cat([g.flatten() for g in gs]).float().square().sum().sqrt()",
    ],
)
def test_a_norm_of_gradients_in_fp32_is_not_named(norm: str) -> None:
    assert _clipped(norm) == {}


HOOKED = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
acc = {p: torch.zeros_like(p, dtype=torch.DTYPE) for p in net.parameters()}
def hook(p):
    KEEP
    p.grad = None
for p in net.parameters():
    p.register_post_accumulate_grad_hook(hook)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(2):
    for _ in range(16):
        F.cross_entropy(net(torch.randn(16, 32)), torch.randint(0, 8, (16,))).backward()
    for p, a in acc.items():
        p.grad = a.float() / 16
        a.zero_()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "keep",
    [
        "acc[p].add_(p.grad.to(acc[p].dtype))",
        "acc[p].add_(p.grad)",
        "acc[p] += p.grad.to(acc[p].dtype)",
        "acc[p].data.add_(p.grad, alpha=1.0)",
        "torch._foreach_add_([acc[p]], [p.grad.to(acc[p].dtype)])",
    ],
)
def test_a_sum_of_gradients_in_a_hook_is_named_by_the_hook_s_line(keep: str) -> None:
    text = HOOKED.replace("KEEP", keep)
    found = [(one.code, int(one.place.rpartition(":")[2])) for one in found_in_text(text.replace("DTYPE", "bfloat16"))]
    assert found == [("accumulator-16bit", text.splitlines().index(f"    {keep}") + 1)]
    assert found_in_text(text.replace("DTYPE", "float32")) == []
