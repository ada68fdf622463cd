"""What a script's own code does to its weights."""

import pytest
import torch
from torch import nn

from autoprec.trial.inside.judging.by_hand import UpdateRecorder
from benchmarks.precision.running import found_in_text

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(torch.DTYPE)
rests = [torch.zeros_like(p) for p in net.parameters()]
wide = [p.detach().float().clone() for p in net.parameters()]
for step in range(4):
    for _ in range(BACKWARDS):
        x, y = torch.randn(64, 32), torch.randint(4, (64,))
        loss = F.cross_entropy(net(x.to(torch.DTYPE)).float(), y)
        loss.backward()
    with torch.no_grad():
        ps, gs = list(net.parameters()), [p.grad for p in net.parameters()]
        UPDATE
    net.zero_grad()
"""
LOOP = "for p, c, w in zip(ps, rests, wide):\n            "


def told(update: str, dtype: str = "bfloat16", backwards: int = 1) -> dict[str, tuple[str, str]]:
    """Return severity and text of the line of each finding, by code."""
    text = SCRIPT.replace("UPDATE", update).replace("BACKWARDS", str(backwards)).replace("DTYPE", dtype)
    lines = text.splitlines()
    found = found_in_text(text)
    return {one.code: (one.severity, lines[int(one.place.rpartition(":")[2]) - 1].strip()) for one in found}


@pytest.mark.parametrize(
    "update",
    [
        LOOP + "p.sub_(1e-3 * p.grad)",
        LOOP + "p -= 1e-3 * p.grad",
        LOOP + "p.data.add_(p.grad, alpha=-1e-3)",
        LOOP + "p.data = p.data - 1e-3 * p.grad",
        LOOP + "p.copy_(p - 1e-3 * p.grad)",
        LOOP + "p.copy_((p.float() - 1e-3 * p.grad.float()).to(p.dtype))",
        LOOP + "p.sub_(1e-3 * (p.grad + 1e-4 * p))",
        "torch._foreach_add_(ps, gs, alpha=-1e-3)",
    ],
)
def test_an_update_by_hand_that_16_bits_lose_is_named(update: str) -> None:
    assert told(update) == {"updates-lost": ("error", SCRIPT.splitlines()[6].replace("DTYPE", "bfloat16"))}


def test_micro_batches_are_waited_for() -> None:
    assert list(told(LOOP + "p.sub_(1e-3 * p.grad)", backwards=3)) == ["updates-lost"]
    assert told(LOOP + "p.sub_(50 * p.grad)", backwards=3) == {}


def test_fp16_weights_lose_updates_as_well() -> None:
    assert "updates-lost" in told(LOOP + "p.sub_(1e-4 * p.grad)", "float16")


@pytest.mark.parametrize(
    "update",
    [
        LOOP + "p.mul_(1 - 1e-4).sub_(50 * p.grad)",
        LOOP + "p.data.mul_(1 - 1e-4).sub_(50 * p.grad)",
        LOOP + "p.sub_(p, alpha=1e-4).sub_(50 * p.grad)",
        LOOP + "p.sub_(1e-4 * p).sub_(50 * p.grad)",
        LOOP + "p.copy_(p * (1 - 1e-4) - 50 * p.grad)",
        LOOP + "p.data = p.data * (1 - 1e-4) - 50 * p.grad",
        "torch._foreach_mul_(ps, 1 - 1e-4); torch._foreach_sub_(ps, [50 * g for g in gs])",
    ],
)
def test_a_decay_that_returns_the_weights_as_they_were_is_named(update: str) -> None:
    assert told(update) == {"decay-lost": ("error", update.removeprefix(LOOP))}


@pytest.mark.parametrize(
    "update",
    [
        LOOP + "p.mul_(1 - 1e-2).sub_(50 * p.grad)",  # which reaches them
        LOOP + "p.sub_(50 * (p.grad + 1e-2 * p))",
        LOOP + "w.mul_(1 - 1e-4).sub_(1e-3 * p.grad.float()); p.copy_(w)",  # fp32 masters
        LOOP + "u = c - 1e-3 * p.grad; old = p.clone(); p.add_(u); c.copy_(u - (p - old))",  # Kahan
        "for i, p in enumerate(ps):\n            u = rests[i] - 1e-3 * p.grad; old = p.clone(); p += u; "
        "rests[i] = u - (p - old)",
        LOOP + "w = p.float() + c.float() - 1e-3 * p.grad.float(); p.copy_(w); c.copy_(w - p.float())",  # a second half
        LOOP + "w = p.float() + c.float() - 1e-3 * p.grad.float(); h = w.bfloat16(); c.copy_(w - h.float()); "
        "p.copy_(h)",
        LOOP + "w = p.float() - 1e-3 * p.grad.float(); b = w.view(torch.int32) + "
        "torch.randint(0, 1 << 16, w.shape, dtype=torch.int32); p.copy_((b & -65536).view(torch.float32))",
        "print(sum(float((p * 0.9999).sum()) for p in ps)); torch._foreach_sub_(ps, [50 * g for g in gs])",
    ],
)
def test_what_reaches_the_weights_or_is_kept_for_them_is_not_named(update: str) -> None:
    assert told(update) == {}


def test_fp32_is_left_alone() -> None:
    assert told(LOOP + "p.mul_(1 - 1e-4).sub_(1e-3 * p.grad)", "float32") == {}


OPTIMIZER = """
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).to(torch.bfloat16)
optimizer = torch.optim.MADE
for step in range(4):
    loss = 50 * F.cross_entropy(net(torch.randn(64, 32).bfloat16()).float(), torch.randint(4, (64,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    AFTER
"""


@pytest.mark.parametrize(
    ("made", "after", "lost"),
    [
        ("AdamW(net.parameters(), 0.03)", "", True),
        ("AdamW(net.parameters(), 0.03, foreach=True)", "", True),
        ("AdamW(net.parameters(), 0.03, weight_decay=0.0)", "", False),
        ("AdamW(net.parameters(), 0.03, weight_decay=0.3)", "", False),  # 0.991 is another number
        ("AdamW(net.parameters(), 0.03, fused=True)", "", False),  # which rounds once
        ("Adam(net.parameters(), 0.03, weight_decay=0.01)", "", False),  # part of the gradient
        ("SGD(net.parameters(), 1.0, weight_decay=1e-4)", "", False),
        ("SGD(net.parameters(), 1.0)", "for p in net.parameters(): p.data.mul_(1 - 1e-4)", True),
    ],
)
def test_a_decay_beside_an_optimizer_is_named(made: str, after: str, lost: bool) -> None:
    found = {one.code: one for one in found_in_text(OPTIMIZER.replace("MADE", made).replace("AFTER", after))}
    assert ("decay-lost" in found) is lost
    assert not lost or "of them as they are" in found["decay-lost"].message


def test_weights_that_a_script_exchanges_have_been_updated() -> None:
    model = nn.Linear(4, 4).bfloat16()
    with UpdateRecorder(model) as recorder:
        assert not recorder.has_updated
        model.weight.data = model.weight.data * 2
        assert recorder.has_updated
        assert recorder.line_of(list(model.parameters())).startswith(__file__)
    with UpdateRecorder(model) as recorder, torch.no_grad():
        model.bias.add_(1)
        assert recorder.has_updated
        assert len(recorder.writes) == 1
