"""Running statistics that no buffer holds, and averages that an optimizer's hook keeps."""

import pytest

from benchmarks.precision.running import found_in_text

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
half = torch.DTYPE
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.stats, self.gain = [torch.zeros(64).to(half), torch.ones(64).to(half)], nn.Parameter(torch.ones(64))
    def forward(self, x):
        m, v = x.mean(0), x.var(0)
        seen = m.detach().to(half)
        mean = self.stats[0]
        LINE
        return (x - m) * torch.rsqrt(v + 1e-5) * self.gain
net = nn.Sequential(nn.Linear(32, 64), Norm(), nn.ReLU(), nn.Linear(64, 8))
shadow = {n: p.detach().to(half).clone() for n, p in net.named_parameters()}
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
HOOK
for step in range(3):
    loss = F.cross_entropy(net(torch.randn(64, 32)), torch.randint(0, 8, (64,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MOVES = [
    "mean.mul_(0.999).add_(seen, alpha=1e-3)",
    "mean.lerp_(seen, 1e-3)",
    "mean += 1e-3 * (seen - mean)",
    "mean.copy_(0.999 * mean + 0.001 * seen)",
    "self.stats[1].sub_(1e-3 * (self.stats[1] - v.detach().to(half)))",
    "torch._foreach_lerp_(self.stats, [seen, v.detach().to(half)], 1e-3)",
]


def told(line: str = "pass", hook: str = "", dtype: str = "bfloat16") -> list[tuple[str, str]]:
    text = SCRIPT.replace("LINE", line).replace("HOOK", hook).replace("DTYPE", dtype)
    lines = text.splitlines()
    return [(one.code, lines[int(one.place.rpartition(":")[2]) - 1].strip()) for one in found_in_text(text)]


@pytest.mark.parametrize("line", MOVES)
def test_statistics_in_a_list_are_named_as_a_buffer_s_are(line: str) -> None:
    assert told(line) == [("statistics-16bit", line)]
    assert told(line, dtype="float32") == []


@pytest.mark.parametrize(
    "line",
    [
        "mean.zero_().add_(seen)",  # of this step alone
        "mean.copy_(seen)",
        "x = x + 0 * mean.mul_(0.999).add_(seen, alpha=1e-3).float()",  # part of the model
        "m2 = seen.clone(); m2.mul_(0.999).add_(seen, alpha=1e-3)",  # made within
    ],
)
def test_what_is_no_statistic_is_not_named(line: str) -> None:
    assert told(line) == []


HOOK = """
def average(optimizer, args, kwargs):
    for n, p in net.named_parameters():
        UPDATE
optimizer.register_step_post_hook(average)
"""


@pytest.mark.parametrize(
    "update",
    [
        "shadow[n] += 1e-3 * (p.detach().to(half) - shadow[n])",
        "shadow[n].lerp_(p.detach().to(half), 1e-3)",
        "shadow[n].mul_(0.999).add_(p.detach(), alpha=1e-3)",
        "shadow[n].copy_(0.999 * shadow[n] + 0.001 * p.detach().to(half))",
        "torch._foreach_lerp_([shadow[n]], [p.detach().to(half)], 1e-3)",
    ],
)
def test_an_average_that_a_hook_of_the_optimizer_keeps_is_named(update: str) -> None:
    hook = HOOK.replace("UPDATE", update)
    assert told(hook=hook) == [("ema-16bit", update)]
    assert told(hook=hook, dtype="float32") == []
    twice = hook.replace("average", "again") + hook
    assert told(hook=twice) == [("ema-16bit", update)] * 2


IN_FORWARD = """
def average(module, args):
    with torch.no_grad():
        for n, p in net.named_parameters():
            UPDATE
net.register_forward_pre_hook(average)
"""


@pytest.mark.parametrize(
    "update",
    [
        "shadow[n].mul_(0.999).add_(p.to(half), alpha=1e-3)",
        "shadow[n].lerp_(p.to(half), 1e-3)",
        "shadow[n] += 1e-3 * (p.to(half) - shadow[n])",
        "shadow[n].copy_(0.999 * shadow[n] + 0.001 * p.detach().to(half))",
        "torch._foreach_lerp_([shadow[n]], [p.to(half)], 1e-3)",
    ],
)
def test_an_average_of_weights_that_a_forward_keeps_is_no_statistic(update: str) -> None:
    hook = IN_FORWARD.replace("UPDATE", update)
    assert told(hook=hook) == [("ema-16bit", update)]
    assert told(hook=hook, dtype="float32") == []
