"""Do the sensitivities of a small stand-in carry over to a larger model? Gradient errors along width, depth and tokens.

The assumption behind ``--cost-scale``, for benchmarks/cost/cost_model.py.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.cost import cpu_models

RECIPES: dict[str, dict[str, Any]] = {
    "fp8 row": {"format": "fp8", "scaling": {"granularity": "row"}},
    "fp8 tensor e5m2": {"format": "fp8", "operands": {"grad_output": "e5m2"}},
    "mxfp8": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4"},
}
LAYERS = ["h.*.q", "h.*.k", "h.*.v", "h.*.o", "h.*.up", "h.*.down", "head"]
#: axis -> (label, width, blocks, sequences of 64 tokens) of the models compared, the stand-in first
AXES: dict[str, list[tuple[str, int, int, int]]] = {
    "width": [("64", 64, 3, 8), ("128", 128, 3, 8), ("256", 256, 3, 8)],
    "depth": [("2 blocks", 64, 2, 8), ("4 blocks", 64, 4, 8), ("8 blocks", 64, 8, 8)],
    "tokens per step": [("x1", 64, 3, 8), ("x4", 64, 3, 32)],
}


def errors(width: int, depth: int, batch: int) -> list[float]:
    """Relative error of the gradient with one kind of layer in one recipe, per recipe and kind, after 15 steps."""
    from autoprec.applying.policy import apply_policy, remove_policy
    from autoprec.policy import policy_from_dict

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = cpu_models.Decoder(width, depth, width // 32, 128, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.arange(batch * 65).remainder(97).view(batch, 65) + torch.randint(0, 31, (batch, 65))

    def gradient() -> torch.Tensor:
        model.zero_grad()
        model(text[:, :-1], text[:, 1:]).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    for _ in range(15):
        gradient()
        optimizer.step()
    reference = gradient()
    out = []
    for recipe in RECIPES.values():
        for glob in LAYERS:
            document = {"schema": "autoprec.policy/1", "recipes": {"r": recipe}}
            apply_policy(policy_from_dict({**document, "layers": [{"match": glob, "recipe": "r"}]}), model)
            out.append(float((gradient() - reference).norm() / reference.norm()))
            remove_policy(model)
    return out


def tables() -> dict[str, dict[str, list[float]]]:
    """Axis -> model -> errors of every recipe and kind of layer."""
    known: dict[tuple[int, int, int], list[float]] = {}
    out: dict[str, dict[str, list[float]]] = {}
    for axis, models in AXES.items():
        for label, *sizes in models:
            key = (sizes[0], sizes[1], sizes[2])
            if key not in known:
                known[key] = errors(*key)
            out.setdefault(axis, {})[label] = known[key]
    return out


def drift(small: list[float], large: list[float]) -> float:
    """Median ratio of the errors of the large model to those of the small one."""
    return statistics.median(b / a for a, b in zip(small, large, strict=True))
