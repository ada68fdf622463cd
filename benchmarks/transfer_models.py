"""Tiny GPT-like and ViT-like models for benchmarks/transfer.py, trained for a few steps, and their gradient errors.

A scan here is what ``autoprec search`` measures before its first trial, in this process: the relative error of the
whole gradient under a policy, on the same weights and batch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoprec.applying.policy import Policy
from autoprec.cost import CostModel, CostScale
from autoprec.graph.recorder import record_step
from autoprec.graph.report import GraphReport
from autoprec.policy import policy_from_dict
from autoprec.policy.space import SearchSpace, space_from_dict
from autoprec.precision.hardware import target
from autoprec.tuning.decide.problem import Problem, layer_key
from autoprec.tuning.decide.table import SensitivityTable, plan_probes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from train_gpt import GPT, read_text
from train_vit import ViT

#: Recipes of every kind of scaling: per row, per tensor, per block of 32 and of 16.
CHOICES = ("bf16", "fp8_rowwise", "fp8_tensorwise", "mxfp8", "nvfp4_plain", "fp8_rowwise/wgrad=bf16")
CONTEXT, PATCHES = 64, 17


@dataclass(frozen=True)
class Size:
    """One model and how it is trained; ``tokens`` per step, ``age`` steps before it is looked at.

    ``scaled``: initial weights and learning rates follow the width as in muP (Yang et al. 2022, arXiv 2203.03466), so
    that models of different width are in the same state after as many steps. Otherwise the GPT has one initial standard
    deviation and one learning rate at every width.
    """

    kind: str
    width: int = 64
    depth: int = 4
    tokens: int = 512
    age: int = 30
    seed: int = 0
    scaled: bool = True

    @property
    def rate(self) -> float:
        """Peak learning rate at width 64: the largest of 1e-3 and 3e-3 under which two seeds are in one state."""
        return 3e-3 if self.kind == "gpt" else 1e-3

    @property
    def batch(self) -> int:
        """Sequences or images per step."""
        return max(1, round(self.tokens / (CONTEXT if self.kind == "gpt" else PATCHES)))


@cache
def _text() -> Tensor:
    return read_text(1_000_000)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16.0 - 0.5
    return images, torch.tensor(found.target, dtype=torch.long)


def _input(name: str) -> bool:
    return name.startswith(("tokens", "positions", "patches", "first"))


def _scale_weights(model: nn.Module, width: int) -> None:
    """Give matrices a standard deviation of 0.5 / sqrt(fan in), the head less as it gets wider, inputs a constant."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        fan = parameter.shape[1:].numel()
        std = 0.3 if _input(name) else 0.5 / fan**0.5
        nn.init.normal_(parameter, std=std * (64 / width) ** 0.5 if name.startswith("head") else std)


@dataclass
class Trained:
    """A model after some steps, and the gradients of whatever policy is put on it."""

    size: Size
    model: nn.Module
    optimizer: torch.optim.Optimizer
    reference: dict[int, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, size: Size) -> Trained:
        """Build a model and train it for ``size.age`` steps in float32."""
        torch.manual_seed(size.seed)
        heads = max(1, size.width // 32)
        model: nn.Module = (
            GPT(size.width, size.depth, heads, CONTEXT) if size.kind == "gpt" else ViT(size.width, size.depth, heads)
        )
        if size.scaled:
            _scale_weights(model, size.width)
        slow = 64 / size.width if size.scaled else 1.0
        hidden = [p for n, p in model.named_parameters() if p.ndim >= 2 and not _input(n)]
        others = [p for n, p in model.named_parameters() if p.ndim < 2 or _input(n)]
        groups = [{"params": hidden, "lr": size.rate * slow}, {"params": others, "lr": size.rate}]
        made = cls(size, model, torch.optim.AdamW(groups, betas=(0.9, 0.95)))
        for group in made.optimizer.param_groups:
            group["peak"] = group["lr"]
        made.train(size.age)
        return made

    def loss(self, step: int) -> Tensor:
        """Return the loss on a batch of its own."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.size.seed + 1) + step)
        if self.size.kind == "gpt":
            at = torch.randint(len(_text()) - CONTEXT - 1, (self.size.batch, 1), generator=generator)
            window = _text()[at + torch.arange(CONTEXT + 1)]
            out: Tensor = self.model(window[:, :-1], window[:, 1:])
            return out
        images, labels = _digits()
        at = torch.randint(len(images), (self.size.batch,), generator=generator)
        return nn.functional.cross_entropy(self.model(images[at]), labels[at])

    def train(self, steps: int, first: int = 0) -> list[float]:
        """Train for some steps, warming up over the first ten; return the losses."""
        losses = []
        for step in range(first, first + steps):
            for group in self.optimizer.param_groups:
                group["lr"] = group["peak"] * min(1.0, (step + 1) / 10)
            loss = self.loss(step)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def gradient(self, batch: int, policy: Mapping[str, Any] | None = None) -> list[Tensor]:
        """Return the gradient on a batch under a policy document."""
        self.model.zero_grad()
        if policy is None:
            self.loss(-1 - batch).backward()
            return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        applied = policy_from_dict(dict(policy), cls=Policy)
        applied.apply(self.model, backend="emulated")
        try:
            self.loss(-1 - batch).backward()
        finally:
            applied.remove(self.model)
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def error(self, policy: Mapping[str, Any], batches: int = 2) -> float:
        """Return the relative gradient error of a policy: root mean square over batches."""
        squares = []
        for batch in range(batches):
            if batch not in self.reference:
                self.reference[batch] = self.gradient(batch)
            exact, found = self.reference[batch], self.gradient(batch, policy)
            difference = sum(float((a - b).double().square().sum()) for a, b in zip(exact, found, strict=True))
            squares.append(difference / sum(float(a.double().square().sum()) for a in exact))
        return float(np.sqrt(np.mean(squares)))

    def noise(self, batches: int = 4) -> float:
        """Return the relative standard deviation of the gradient between mini-batches, as a search measures it."""
        found = [torch.cat([g.flatten() for g in self.gradient(100 + k)]) for k in range(batches)]
        mean = torch.stack(found).mean(0)
        spread = sum(float((g - mean).square().sum()) for g in found) / (batches - 1)
        return float(np.sqrt(spread / float(found[0].square().sum())))

    def report(self) -> GraphReport:
        """Record one step."""
        self.model.zero_grad()
        return record_step(self.model, lambda: self.loss(-1).backward(), optimizers=(self.optimizer,))


def space(choices: Sequence[str] = CHOICES) -> SearchSpace:
    """Return the space in which every layer may choose among all recipes."""
    document = {"schema": "autoprec.space/1", "name": "transfer", "baseline": "bf16", "activations": ["bf16"]}
    return space_from_dict({**document, "choices": [{"match": "*", "choices": list(choices)}]})


@dataclass
class Looked:
    """A model with its recorded step, problem and cost on a target, and, once scanned, its table."""

    trained: Trained
    report: GraphReport
    cost: CostModel
    problem: Problem
    table: SensitivityTable | None = None

    @classmethod
    def at(cls, size: Size, device: str = "b200", scale: str = "width=32,tokens=64") -> Looked:
        """Train and record a model; it is costed at ``scale`` times its shapes, where a GPU can gain."""
        trained = Trained.of(size)
        report = trained.report()
        cost = CostModel(report, target(device), scale=CostScale.parse(scale))
        return cls(trained, report, cost, Problem.build(report, space(), cost.can_run))

    def scan(self, batches: int = 2) -> SensitivityTable:
        """Ask every group under every choice, as a search does on a small model."""
        rows = [
            {"id": probe.id, "gradient_error": self.trained.error(probe.policy, batches)}
            for probe in plan_probes(self.problem)
        ]
        payload = {"probes": rows, "gradient_noise": self.trained.noise()}
        self.table = replace(SensitivityTable.from_probes(self.problem, payload), passes=len(rows) * batches)
        return self.table

    def document(self, choices: Mapping[str, str], activations: str = "keep") -> dict[str, Any]:
        """Return the policy document of choices per group, everything else as written."""
        params = self.problem.quiet() | {"activations": activations}
        return self.problem.render(params | {layer_key(g): c for g, c in choices.items()}).to_dict()
