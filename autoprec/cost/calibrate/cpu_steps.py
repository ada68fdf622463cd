"""What a whole training step on a CPU takes beside its operators alone in a hot loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.cost.calibrate.cpu_clock import CLOCK, elapsed, fit
from autoprec.cost.model import CostModel
from autoprec.graph.recorder import StepRecorder
from autoprec.policy.matching import resolve
from autoprec.policy.schema import Policy
from autoprec.precision.hardware import cpu_bf16_units, target
from autoprec.precision.recipes import BUILTIN_RECIPES


class _Reference(nn.Module):
    """A small transformer: what a real step costs beside its operators alone."""

    def __init__(self, width: int = 256, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp_norm": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "down": nn.Linear(4 * width, width),
                }
            )
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last block's output; ``x`` is ``[batch, seq, width]``."""
        batch, seq, width = x.shape
        for block in self.blocks:
            qkv = block["qkv"](block["norm"](x)).view(batch, seq, 3, 4, width // 4)  # type: ignore[index]
            q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + block["out"](y.transpose(1, 2).reshape(batch, seq, width))  # type: ignore[index]
            x = x + block["down"](nn.functional.gelu(block["up"](block["mlp_norm"](x))))  # type: ignore[index]
        return x


_IN_SITU: tuple[tuple[str, str, str], ...] = (
    ("fp32", "keep", "keep"),
    ("bf16", "bf16", "bf16"),
    ("int8", "int8_tensor", "keep"),
)


class Stage:
    """A small model, its recorded step, and what the step takes under a policy."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.AdamW(model.parameters())
        with StepRecorder(model, optimizers=(self.optimizer,)) as recorder:
            self.compute()
        self.report = recorder.report()
        self.parameters = sum(p.numel() for p in model.parameters())

    def compute(self) -> None:
        """Run forward and backward."""
        torch.autograd.backward(self.model(self.x).float().square().mean())

    def measured(self, policy: Policy) -> tuple[float, float]:
        """Return the least CPU times of forward and backward, and of the update behind them, as in a real loop."""
        apply_policy(policy, self.model)
        self.compute()
        self.optimizer.step()
        times = []
        for _ in range(2):
            self.optimizer.zero_grad()
            times.append((elapsed(self.compute, 1), elapsed(self.optimizer.step, 1)))
        remove_policy(self.model)
        computed, updated = (min(column) for column in zip(*times, strict=True))
        return CLOCK.note(computed), CLOCK.note(updated)

    def modelled(self, policy: Policy, rates: dict[str, Any]) -> float:
        plans = resolve(policy, [layer.name for layer in self.report.tunable])
        cost = CostModel(self.report, target("cpu"), cpu=rates)
        return cost.estimate(plans, activations=policy.activations).time_ms / 1e3


_NOTHING = {"fp32": 0.0, "rest": 0.0, "bf16": 0.0, "int8": 0.0}


def stages() -> list[Stage]:
    """Return models that are ruled by activations, by weights and by what is not a layer."""
    wide = nn.Sequential(nn.Linear(512, 1536), nn.ReLU(), nn.Linear(1536, 512))
    return [
        Stage(_Reference(), torch.randn(4, 96, 256)),
        Stage(wide, torch.randn(48, 512)),
        Stage(_Reference(64), torch.randn(16, 96, 64)),
    ]


def in_situ(rates: dict[str, Any], models: list[Stage]) -> dict[str, Any]:
    """Return how much longer whole steps take than their operators in a hot loop, and what weights cost beside them.

    Three models give three unknowns under fp32: a factor on layers, one on the rest (in every precision), and seconds
    per weight value (casts, gradients in fresh memory); each of the other policies has its own first and last. The
    one in bf16 is not run without units for it: a step would take seconds.
    """
    updates = []
    factors, weights = dict(_NOTHING), dict(_NOTHING)
    for name, recipe, activations in _IN_SITU:
        if name == "bf16" and cpu_bf16_units() == ():
            factors[name] = factors["fp32"]
            continue
        recipes = {} if recipe == "keep" else {recipe: BUILTIN_RECIPES[recipe]}
        policy = Policy(recipes=recipes, default=recipe, activations=activations)
        wanted = [name, "rest"] if name == "fp32" else [name]
        rows, missing = [], []
        for stage in models[: len(wanted) + 1]:
            alone = [{**_NOTHING, part: 1.0, "optimizer": 0.0} for part in wanted]
            bare = [stage.modelled(policy, {**rates, "in_situ": part, "weights": _NOTHING}) for part in alone]
            known = {**rates, "in_situ": {**factors, "optimizer": 0.0}, "weights": weights}
            rows.append([*bare, float(stage.parameters)])
            computed, updated = stage.measured(policy)
            updates += [updated] if stage is models[0] else []
            missing.append(max(1e-6, computed - stage.modelled(policy, known)))
        *found, weights[name] = fit(rows, missing)
        # below 1 is the noise of other work on the machine: a step finds less in the caches than a hot loop does
        factors |= {part: max(1.0, min(4.0, factor)) for part, factor in zip(wanted, found, strict=True)}
    per_value, per_tensor = rates["optimizer"]
    first = models[0]
    alone_s = per_value * first.parameters + per_tensor * len(list(first.model.parameters()))
    return {"in_situ": {**factors, "optimizer": max(0.5, min(4.0, min(updates) / alone_s))}, "weights": weights}
