"""A small GPT trained by Muon in fp32, an optimizer of the script's own: Jordan's SingleDeviceMuonWithAuxAdam."""

import torch
from gpt6 import GPT, LENGTH
from task import Task, next_token, tokens


def orthogonal(x):
    """Return the nearest orthogonal matrix, nearly, by Newton-Schulz iterations."""
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


class Muon(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                first = state.setdefault("exp_avg", torch.zeros_like(p)).lerp_(p.grad, 0.05)
                if group["use_muon"]:
                    update = p.grad.lerp(first, 0.95)
                    update = orthogonal(update) if p.size(0) <= p.size(1) else orthogonal(update.T).T
                else:
                    second = state.setdefault("exp_avg_sq", torch.zeros_like(p)).lerp_(p.grad.square(), 0.05)
                    update = first / (second.sqrt() + 1e-8)
                p.sub_(update, alpha=group["lr"])


def make():
    """Return what is trained, and on what."""
    model, groups = GPT(256, 4, 3), {True: [], False: []}
    for name, p in model.named_parameters():
        groups[name.startswith("blocks.") and p.ndim == 2].append(p)
    groups = [{"params": found, "use_muon": muon, "lr": 0.01 if muon else 3e-4} for muon, found in groups.items()]
    return Task(model, Muon(groups, {}), tokens(32, LENGTH + 1), next_token)
