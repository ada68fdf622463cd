"""Tiny GPT-like and ViT-like models for transfer.py, trained for a few steps, and their gradient errors.

A scan here is what ``autoprec search`` measures before its first trial, in this process: the relative error of the
whole gradient under a policy, on the same weights and batch.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autoprec import Policy
from autoprec.cost import CostModel, CostScale
from autoprec.graph.recorder import record_step
from autoprec.graph.report import GraphReport
from autoprec.policy import policy_from_dict
from autoprec.policy.space import SearchSpace, space_from_dict
from autoprec.precision.hardware import target
from autoprec.tuning.decide.problem import Problem, layer_key
from autoprec.tuning.decide.table import SensitivityTable, plan_probes, square_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
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


#: (steps after ``Size.age``, batch): the weights and batches on which an error is measured. Two batches of one step
#: differ by 1.15x, the same model ten steps on by 1.5x: what is asked at one step only is mostly of that step.
INSTANTS = ((-10, 0), (0, 1), (10, 2), (20, 3))
#: One step, two batches: what a scan asks by default.
ONCE = ((0, 1), (0, 0))
#: Others, for what must not be measured on the same weights and batches.
BETWEEN = ((-5, 4), (15, 5))
Instants = Sequence[tuple[int, int]]


class Trained:
    """A model as it is after any number of steps, and the gradients of whatever policy is put on it."""

    def __init__(self, size: Size) -> None:
        """Build a model; it is trained in float32 when it is asked."""
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
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        self.size = size
        self._states = {0: (model, optimizer)}
        self._exact: dict[tuple[int, int], list[Tensor]] = {}

    def at(self, age: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and its optimizer after ``age`` steps."""
        if age not in self._states:
            nearest = max(other for other in self._states if other < age)
            self._states[age] = copy.deepcopy(self._states[nearest])
            self._train(*self._states[age], age - nearest, nearest)
        return self._states[age]

    def _loss(self, model: nn.Module, step: int) -> Tensor:
        """Return the loss on a batch of its own."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.size.seed + 1) + step)
        if self.size.kind == "gpt":
            at = torch.randint(len(_text()) - CONTEXT - 1, (self.size.batch, 1), generator=generator)
            window = _text()[at + torch.arange(CONTEXT + 1)]
            out: Tensor = model(window[:, :-1], window[:, 1:])
            return out
        images, labels = _digits()
        at = torch.randint(len(images), (self.size.batch,), generator=generator)
        return nn.functional.cross_entropy(model(images[at]), labels[at])

    def _train(self, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int) -> list[float]:
        """Train for some steps, warming up over the first ten of all; return the losses."""
        losses = []
        for step in range(first, first + steps):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min(1.0, (step + 1) / 10)
            loss = self._loss(model, step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def _gradient(self, age: int, batch: int, policy: Mapping[str, Any] | None = None) -> list[Tensor]:
        """Return the gradient on a batch under a policy document."""
        model, _ = self.at(age)
        model.zero_grad()
        applied = policy_from_dict(dict(policy), cls=Policy) if policy is not None else None
        if applied is not None:
            applied.apply(model, backend="emulated")
        try:
            self._loss(model, -1 - batch).backward()
        finally:
            if applied is not None:
                applied.remove(model)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def error(self, policy: Mapping[str, Any], instant: tuple[int, int]) -> float:
        """Return the relative gradient error of a policy at (steps after ``Size.age``, batch)."""
        age, batch = self.size.age + instant[0], instant[1]
        if (age, batch) not in self._exact:
            self._exact[age, batch] = self._gradient(age, batch)
        exact, found = self._exact[age, batch], self._gradient(age, batch, policy)
        difference = sum(float((a - b).double().square().sum()) for a, b in zip(exact, found, strict=True))
        return float(np.sqrt(difference / sum(float(a.double().square().sum()) for a in exact)))

    def noise(self, batches: int = 4) -> float:
        """Return the relative standard deviation of the gradient between mini-batches, as a search measures it."""
        each = [self._gradient(self.size.age, 100 + k) for k in range(batches)]
        found = [torch.cat([g.flatten() for g in gradient]) for gradient in each]
        mean = torch.stack(found).mean(0)
        spread = sum(float((g - mean).square().sum()) for g in found) / (batches - 1)
        return float(np.sqrt(spread / float(found[0].square().sum())))

    def divergence(self, policy: Mapping[str, Any], steps: int) -> float:
        """Return the mean relative loss gap over further steps, paired with the same steps as written."""
        plain, other = (copy.deepcopy(self.at(self.size.age)) for _ in range(2))
        policy_from_dict(dict(policy), cls=Policy).apply(other[0], backend="emulated")
        exact, found = (self._train(*one, steps, self.size.age) for one in (plain, other))
        return float(np.mean([abs(a - b) / abs(a) for a, b in zip(exact, found, strict=True)]))

    def report(self) -> GraphReport:
        """Record one step."""
        model, optimizer = self.at(1)  # the optimizer has its state after a step
        model.zero_grad()
        return record_step(model, lambda: self._loss(model, -1).backward(), optimizers=(optimizer,))


def space(choices: Sequence[str] = CHOICES) -> SearchSpace:
    """Return the space in which every layer may choose among all recipes."""
    document = {"schema": "autoprec.space/1", "name": "transfer", "baseline": "bf16", "activations": ["bf16"]}
    return space_from_dict({**document, "choices": [{"match": "*", "choices": list(choices)}]})


class Store:
    """Measured values, one JSON line each, so that an interrupted benchmark goes on where it was."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._known: dict[str, float] = {row["id"]: row["value"] for row in map(json.loads, lines)}

    def value(self, size: Size, what: str, asked: Any, measure: Callable[[], float]) -> float:
        """Return what is stored of ``what`` on a model, or measure and store it; ``asked`` is any plain data."""
        text = json.dumps([asdict(size), what, asked], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key not in self._known:
            self._known[key] = measure()
            if self._path is not None:
                row = {"id": key, "model": str(size), "what": what, "value": self._known[key]}
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
        return self._known[key]


@dataclass
class Looked:
    """A model with its recorded step, problem and cost on a target, and, once scanned, its table.

    It is trained when something is measured that the store does not have.
    """

    size: Size
    report: GraphReport
    cost: CostModel
    problem: Problem
    trained: Trained
    store: Store = field(default_factory=Store)
    table: SensitivityTable | None = None

    @classmethod
    def at(
        cls, size: Size, device: str = "b200", scale: str = "width=32,tokens=64", store: Store | None = None
    ) -> Looked:
        """Record a model; it is costed at ``scale`` times its shapes, where a GPU can gain."""
        trained = Trained(size)
        report = trained.report()
        cost = CostModel(report, target(device), scale=CostScale.parse(scale))
        problem = Problem.build(report, space(), cost.can_run)
        return cls(size, report, cost, problem, trained, store or Store())

    def error(self, document: Mapping[str, Any], instants: Instants = INSTANTS) -> float:
        """Return the relative gradient error of a policy, root mean square over instants."""
        acts = _acts(document)
        each = [
            self.store.value(self.size, "error", [acts, instant], partial(self.trained.error, document, instant))
            for instant in instants
        ]
        return float(np.sqrt(np.mean(np.square(each))))

    def noise(self) -> float:
        """Return :meth:`Trained.noise`."""
        return self.store.value(self.size, "noise", None, self.trained.noise)

    def divergence(self, document: Mapping[str, Any], steps: int) -> float:
        """Return :meth:`Trained.divergence`."""
        measure = partial(self.trained.divergence, document, steps)
        return self.store.value(self.size, "divergence", [_acts(document), steps], measure)

    def scan(self, instants: Instants = INSTANTS) -> SensitivityTable:
        """Ask every group under every choice, as a search does on a small model."""
        probes = plan_probes(self.problem)
        errors = {probe.id: self.error(probe.policy, instants) for probe in probes}
        squares = {name: square_of({"gradient_error": error}) for name, error in errors.items()}
        found = SensitivityTable.of(self.problem, squares, self.noise())
        self.table = replace(found, passes=len(probes) * len(instants))
        return self.table

    def document(self, choices: Mapping[str, str], activations: str = "keep") -> dict[str, Any]:
        """Return the policy document of choices per group, everything else as written."""
        params = self.problem.quiet() | {"activations": activations}
        return self.problem.render(params | {layer_key(g): c for g, c in choices.items()}).to_dict()


def _acts(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a policy document changes a gradient."""
    return {name: value for name, value in document.items() if name not in ("evidence", "model", "guard")}
