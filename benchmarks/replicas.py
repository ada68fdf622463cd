"""Ground truth for search_quality.py: many copies of a small model trained at once, each under its own assignment.

One batch trains R replicas; replica r has the initial weights and data of its own seed, and runs group g under
``assignment[r, g]``. Quantisation is the emulation of :mod:`autoprec.numerics` over a leading replica dimension
(``python benchmarks/replicas.py`` checks it): operands are rounded, the product is accumulated in float32 and rounded
to bfloat16.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from replica_kernel import KINDS, round_replicas, rounded_like
from torch import Tensor

#: choice -> how (input, weight, grad_output) are rounded; ``wgrad`` exceptions are named as AutoPrec names them.
OPERANDS: dict[str, tuple[str, str, str]] = {
    "keep": ("keep", "keep", "keep"),
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8_rowwise": ("rowwise", "rowwise", "rowwise"),
    "fp8_tensorwise": ("tensorwise", "tensorwise", "tensorwise_e5m2"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "nvfp4_plain": ("nvfp4", "nvfp4", "nvfp4"),
}


@dataclass(frozen=True)
class Kinds:
    """How every replica rounds the operands of one layer ``[R]`` int8: three of fprop and dgrad, two of wgrad."""

    input: np.ndarray
    weight: np.ndarray
    grad_output: np.ndarray
    wgrad_input: np.ndarray
    wgrad_grad_output: np.ndarray

    @classmethod
    def of(cls, column: np.ndarray, choices: Sequence[str]) -> Kinds:
        """Return the kinds of one column of an assignment ``[R]``."""
        table = []
        for choice in choices:
            recipe, _, rest = choice.partition("/wgrad=")
            main, wgrad = OPERANDS[recipe], OPERANDS[rest or recipe]
            table.append([KINDS.index(name) for name in (*main, wgrad[0], wgrad[2])])
        picked = np.array(table, dtype=np.int8)[column]
        return cls(*(np.ascontiguousarray(picked[:, k]) for k in range(5)))


class QuantisedLinear(torch.autograd.Function):
    """``out[r] = input[r] @ weight[r].T`` with each replica's operands rounded as its choice says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, kinds: Kinds) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.kinds = kinds
        out = round_replicas(x, kinds.input) @ round_replicas(w, kinds.weight).mT
        return rounded_like(out, kinds.input)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        k: Kinds = ctx.kinds
        dx = round_replicas(g, k.grad_output) @ round_replicas(w, k.weight, turned=True).mT
        dw = round_replicas(g, k.wgrad_grad_output, turned=True) @ round_replicas(x, k.wgrad_input, turned=True).mT
        return rounded_like(dx, k.input), rounded_like(dw, k.input), None


class Replicas:
    """A transformer whose weights carry a leading replica dimension.

    Args:
        kind: ``gpt`` (next character of the standard library's text) or ``vit`` (scikit-learn's digits).
        seeds: initial weights and data order of the members; replicas refer to them by position.
    """

    def __init__(self, kind: str, seeds: Sequence[int], *, width: int = 32, blocks: int = 4, batch: int = 4) -> None:
        self.kind, self.width, self.blocks, self.batch, self.seeds = kind, width, blocks, batch, tuple(seeds)
        self.tokens = 16
        self.data = text() if kind == "gpt" else digits()
        self.outputs = 96 if kind == "gpt" else 32
        each = [self._initial(seed) for seed in self.seeds]
        self.initial = {name: torch.stack([one[name] for one in each]) for name in each[0]}

    def _initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        d = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (96 if self.kind == "gpt" else 4, d),
            "position": (self.tokens, d),
        }
        for b in range(self.blocks):
            shapes |= {f"h.{b}.norm1": (d,), f"h.{b}.norm2": (d,)}
            shapes |= {f"h.{b}.attn.qkv": (3 * d, d), f"h.{b}.attn.proj": (d, d)}
            shapes |= {f"h.{b}.mlp.up": (4 * d, d), f"h.{b}.mlp.down": (d, 4 * d)}
        shapes |= {"norm": (d,), "head": (self.outputs, d)}

        def fresh(name: str, shape: tuple[int, ...]) -> Tensor:
            if "norm" in name:
                return torch.ones(shape)
            fan = shape[-1] if "." in name or name == "head" else 4
            return torch.randn(shape, generator=generator) / math.sqrt(fan)

        return {name: fresh(name, shape) for name, shape in shapes.items()}

    @property
    def groups(self) -> list[str]:
        """Names of the quantised layers, in model order."""
        return [name for name in self.initial if ".attn." in name or ".mlp." in name or name == "head"]

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of a step, a leading row per member."""
        pairs = [self._batch(seed, step) for seed in self.seeds]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def _batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        if self.kind == "gpt":
            (stream,) = self.data
            at = torch.randint(len(stream) - self.tokens - 1, (self.batch,), generator=generator)
            window = torch.stack([stream[i : i + self.tokens + 1] for i in at])
            return window[:, :-1], window[:, 1:]
        images, labels = self.data
        at = torch.randint(len(images), (self.batch,), generator=generator)
        return images[at], labels[at]

    def losses(
        self, p: dict[str, Tensor], x: Tensor, y: Tensor, kinds: dict[str, Kinds], calls: list[Any] | None = None
    ) -> Tensor:
        """Return the loss of every replica ``[R]`` on its own batch ``[R, b, ...]``.

        ``calls`` receives (input, weight, output) of every quantised layer, the output with its gradient kept.
        """
        r, d, b, t = len(p["head"]), self.width, self.batch, self.tokens
        if self.kind == "gpt":
            offset = p["embed"].shape[1] * torch.arange(r).view(-1, 1, 1)
            embedded = F.embedding(x + offset, p["embed"].flatten(0, 1))
        else:
            embedded = (x.flatten(1, 2) @ p["embed"]).view(r, b, t, d)
        h = (embedded + p["position"][:, None]).reshape(r, b * t, d)

        def linear(z: Tensor, name: str) -> Tensor:
            out = QuantisedLinear.apply(z, p[name], kinds[name])
            if calls is not None:
                out.retain_grad()
                calls.append((z.detach(), p[name].detach(), out))
            return out

        def norm(z: Tensor, name: str) -> Tensor:
            return F.layer_norm(z, (d,)) * p[name][:, None]

        for k in range(self.blocks):
            qkv = linear(norm(h, f"h.{k}.norm1"), f"h.{k}.attn.qkv").view(r * b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.kind == "gpt")
            h = h + linear(mixed.transpose(1, 2).reshape(r, b * t, d), f"h.{k}.attn.proj")
            up = F.gelu(linear(norm(h, f"h.{k}.norm2"), f"h.{k}.mlp.up"))
            h = h + linear(up, f"h.{k}.mlp.down")
        logits = linear(norm(h, "norm"), "head")
        if self.kind == "vit":  # every token votes: keeps the head's GEMMs at the shape of the others
            logits = logits.view(r, b, t, -1).mean(2)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(r, -1).mean(1)

    def kinds(self, assignment: np.ndarray, choices: Sequence[str]) -> dict[str, Kinds]:
        """Return, per layer, how every replica rounds."""
        return {name: Kinds.of(assignment[:, g], choices) for g, name in enumerate(self.groups)}

    def train(
        self,
        assignment: np.ndarray,
        member: np.ndarray,
        choices: Sequence[str],
        steps: int,
        stop: int | None = None,
        perturbed: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Train all replicas with AdamW, warm-up, cosine and clipping; return losses ``[R, steps]`` and the weights.

        Args:
            assignment: ``[R, G]`` columns of ``choices``.
            member: ``[R]`` position of each replica's seed.
            choices: names of the columns.
            steps: length of the schedule.
            stop: how many steps to run; all when None.
            perturbed: round the initial weights once to bfloat16, the benign perturbation of the noise floor.
        """
        at = torch.from_numpy(np.asarray(member, dtype=np.int64))
        p = {n: (w[at].bfloat16().float() if perturbed else w[at]).requires_grad_() for n, w in self.initial.items()}
        first, second = ({n: torch.zeros_like(w) for n, w in p.items()} for _ in range(2))
        kinds, out = self.kinds(assignment, choices), []
        for step in range(stop or steps):
            x, y = self.batch_at(step)
            loss = self.losses(p, x[at], y[at], kinds)
            grads = torch.autograd.grad(loss.sum(), list(p.values()))
            norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
            clip = (1.0 / norm).clamp(max=1.0)
            rate = 3e-3 * min(1.0, (step + 1) / 4) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            even1, even2 = 1 - 0.9 ** (step + 1), 1 - 0.95 ** (step + 1)
            with torch.no_grad():
                for (n, w), g in zip(p.items(), grads, strict=True):
                    g = g * clip.view(-1, *[1] * (g.ndim - 1))
                    first[n].mul_(0.9).add_(g, alpha=0.1)
                    second[n].mul_(0.95).addcmul_(g, g, value=0.05)
                    scale = torch.sqrt(second[n]).mul_(even2**-0.5).add_(1e-8)
                    w.mul_(1 - 0.01 * rate).addcdiv_(first[n], scale, value=-rate / even1)
            out.append(loss.detach())
        return torch.stack(out, 1), {n: w.detach() for n, w in p.items()}

    def gradients(
        self, weights: dict[str, Tensor], step: int, assignment: np.ndarray, choices: Sequence[str]
    ) -> Tensor:
        """Return the flat gradients ``[R, P]`` of assignments ``[R, G]`` at one member's weights (the first one's)."""
        p = {n: w.expand(len(assignment), *w.shape[1:]).clone().requires_grad_() for n, w in weights.items()}
        x, y = (each[:1].expand(len(assignment), *each.shape[1:]) for each in self.batch_at(step))
        loss = self.losses(p, x, y, self.kinds(assignment, choices))
        return torch.cat([g.flatten(1) for g in torch.autograd.grad(loss.sum(), list(p.values()))], 1)

    def one_pass_scores(self, weights: dict[str, Tensor], step: int, choices: Sequence[str]) -> np.ndarray:
        """Return ModelOpt's scores ``[G, len(choices)]`` at one member's weights, from one forward and backward pass.

        Of each layer the squared gradient of its output times the squared change of that output under each choice,
        summed (modelopt/torch/quantization/algorithms.py, ``AutoQuantizeGradientSearcher``).
        """
        p = {n: w.clone().requires_grad_() for n, w in weights.items()}
        x, y = (each[:1] for each in self.batch_at(step))
        calls: list[tuple[Tensor, Tensor, Tensor]] = []
        reference = np.zeros((1, len(self.groups)), dtype=np.int64)
        self.losses(p, x, y, self.kinds(reference, choices), calls).sum().backward()
        scores = np.zeros((len(calls), len(choices)))
        for g, (z, w, out) in enumerate(calls):
            for c in range(len(choices)):
                change = QuantisedLinear.apply(z, w, Kinds.of(np.array([c]), choices)) - out.detach()
                scores[g, c] = float((out.grad * change).square().sum())
        return scores


def text() -> tuple[Tensor]:
    """Return characters of the standard library's own source files as classes 0..95."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    joined = "".join(f.read_text(encoding="utf-8", errors="ignore") for f in files)
    return (torch.tensor([min(max(ord(c) - 31, 0), 95) for c in joined]),)


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits as 16 patches of 2x2 pixels, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 8 - 1
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
    return patches, torch.tensor(found.target)


def check() -> None:
    """Compare the batched rounding with autoprec.numerics on random operands."""
    from autoprec.numerics.quantize import dequantize, quantize, spec_of
    from autoprec.precision.recipes import BUILTIN_RECIPES

    torch.manual_seed(0)
    x = torch.randn(3, 64, 96) * torch.logspace(-3, 3, 96)
    for name, (kind, _, _) in OPERANDS.items():
        if name == "keep":
            continue
        kinds = np.full(len(x), KINDS.index(kind), dtype=np.int8)
        spec = spec_of(BUILTIN_RECIPES[name], "fprop", "input")
        theirs = torch.stack([dequantize(quantize(one, spec)) for one in x])
        turned = torch.stack([dequantize(quantize(one.mT.contiguous(), spec)) for one in x])
        error = max(
            float((ours - other).abs().max() / other.abs().max())
            for ours, other in ((round_replicas(x, kinds), theirs), (round_replicas(x, kinds, turned=True), turned))
        )
        print(f"{name:16s} largest difference {error:.2e}")
        if error > 1e-6:
            raise SystemExit(f"{name}: the batched rounding differs from autoprec.numerics")


if __name__ == "__main__":
    check()
