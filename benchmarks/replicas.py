"""Ground truth for search_quality.py: many copies of a small model trained at once, each under its own assignment.

One batch trains R replicas with the same initial weights and data; replica r runs group g under ``assignment[r, g]``.
Quantisation is the emulation of :mod:`autoprec.numerics` written over a leading replica dimension (a check against it
runs with ``python benchmarks/replicas.py --check``): operands are rounded, the product is accumulated in float32 and
rounded to bfloat16.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from autoprec.numerics.rounding import decode, encode, round_e2m1
from autoprec.numerics.scaling import power_of_2_floor

Rows = dict[str, Tensor]


def _fp8(x: Tensor, scale: Tensor) -> Tensor:
    return decode(encode(x * scale, "e4m3"), torch.bfloat16).float() / scale


def rowwise(x: Tensor) -> Tensor:
    """E4M3 with one power-of-two scale per slice along the last axis."""
    amax = x.abs().amax(-1, keepdim=True)
    return _fp8(x, power_of_2_floor(torch.where(amax > 0, 448.0 / amax, 1.0)))


def tensorwise(x: Tensor, kind: str = "e4m3") -> Tensor:
    """E4M3 or E5M2 with one scale per replica."""
    limit = 448.0 if kind == "e4m3" else 57344.0
    amax = x.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(amax > 0, limit / amax, 1.0)
    return decode(encode(x * scale, kind), torch.bfloat16).float() / scale


def mxfp8(x: Tensor) -> Tensor:
    """E4M3 with one power-of-two scale per 32 values along the last axis (rounded up, as MX encodes it)."""
    groups = x.unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2(torch.where(amax > 0, amax, 1.0) / 448.0))
    return _fp8(groups, torch.exp2(-exponent)).flatten(-2)


def nvfp4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale per 16 values and one float32 scale per replica."""
    groups = x.unflatten(-1, (-1, 16))
    amax = groups.abs().amax(-1, keepdim=True)
    tensor = amax.amax((-3, -2, -1), keepdim=True) / (448.0 * 6.0)
    tensor = torch.where(tensor > 0, tensor, 1.0)
    scale = (amax / 6.0 / tensor).clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn).float() * tensor
    return (round_e2m1(groups / scale) * scale).flatten(-2)


def bf16(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.bfloat16().float()


Quantiser = Callable[[Tensor], Tensor]
#: choice -> quantiser of (input, weight, grad_output); ``wgrad`` exceptions are named as AutoPrec names them.
QUANTISERS: dict[str, tuple[Quantiser, Quantiser, Quantiser]] = {
    "bf16": (bf16, bf16, bf16),
    "fp8_rowwise": (rowwise, rowwise, rowwise),
    "fp8_tensorwise": (tensorwise, tensorwise, lambda x: tensorwise(x, "e5m2")),
    "mxfp8": (mxfp8, mxfp8, mxfp8),
    "nvfp4_plain": (nvfp4, nvfp4, nvfp4),
}


def _parts(choice: str) -> tuple[str, str]:
    """Return (recipe of fprop and dgrad, recipe of wgrad)."""
    recipe, _, rest = choice.partition("/wgrad=")
    return recipe, rest or recipe


class QuantisedLinear(torch.autograd.Function):
    """``out[r] = input[r] @ weight[r].T`` with each replica's operands rounded as its choice says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rows: Rows) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rows = rows
        out = torch.empty(x.shape[0], x.shape[1], w.shape[1])
        for choice, r in rows.items():
            if choice == "keep":
                out[r] = x[r] @ w[r].mT
                continue
            qi, qw, _ = QUANTISERS[_parts(choice)[0]]
            out[r] = bf16(qi(x[r]) @ qw(w[r]).mT)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        dx, dw = torch.empty_like(x), torch.empty_like(w)
        for choice, r in ctx.rows.items():
            gr, xr, wr = g[r], x[r], w[r]
            if choice == "keep":
                dx[r], dw[r] = gr @ wr, gr.mT @ xr
                continue
            main, weight_grad = _parts(choice)
            _, qw, qg = QUANTISERS[main]
            dx[r] = bf16(qg(gr) @ qw(wr.mT).mT)
            qi, _, qg = QUANTISERS[weight_grad]
            dw[r] = bf16(qg(gr.mT) @ qi(xr.mT).mT)
        return dx, dw, None


class Replicas:
    """A transformer whose weights carry a leading replica dimension.

    Args:
        kind: ``gpt`` (next character of the standard library's text) or ``vit`` (scikit-learn's digits).
        seed: initial weights and data order.
    """

    def __init__(self, kind: str, seed: int, *, width: int = 32, blocks: int = 4, batch: int = 4) -> None:
        self.kind, self.width, self.blocks, self.batch, self.seed = kind, width, blocks, batch, seed
        self.tokens = 16
        self.data = text() if kind == "gpt" else digits()
        self.outputs = 96 if kind == "gpt" else 32
        generator = torch.Generator().manual_seed(seed)
        d = width
        shapes: dict[str, tuple[int, ...]] = {
            "embed": (96, d) if kind == "gpt" else (4, d),
            "position": (self.tokens, d),
        }
        for b in range(blocks):
            shapes |= {
                f"h.{b}.norm1": (d,),
                f"h.{b}.norm2": (d,),
                f"h.{b}.attn.qkv": (3 * d, d),
                f"h.{b}.attn.proj": (d, d),
            }
            shapes |= {f"h.{b}.mlp.up": (4 * d, d), f"h.{b}.mlp.down": (d, 4 * d)}
        shapes |= {"norm": (d,), "head": (self.outputs, d)}
        self.initial = {
            n: torch.ones(s)
            if "norm" in n
            else torch.randn(s, generator=generator) / math.sqrt(s[-1] if "." in n or n == "head" else 4)
            for n, s in shapes.items()
        }

    @property
    def groups(self) -> list[str]:
        """Names of the quantised layers, in model order."""
        return [name for name in self.initial if ".attn." in name or ".mlp." in name or name == "head"]

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of a step, the same for every replica."""
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + step)
        if self.kind == "gpt":
            (stream,) = self.data
            at = torch.randint(len(stream) - self.tokens - 1, (self.batch,), generator=generator)
            window = torch.stack([stream[i : i + self.tokens + 1] for i in at])
            return window[:, :-1], window[:, 1:]
        images, labels = self.data
        at = torch.randint(len(images), (self.batch,), generator=generator)
        return images[at], labels[at]

    def losses(self, p: dict[str, Tensor], x: Tensor, y: Tensor, rows: dict[str, Rows]) -> Tensor:
        """Return the loss of every replica ``[R]``."""
        r, d, b, t = len(p["head"]), self.width, self.batch, self.tokens
        embedded = p["embed"][:, x] if self.kind == "gpt" else torch.einsum("btk,rkd->rbtd", x, p["embed"])
        h = (embedded + p["position"][:, None]).reshape(r, b * t, d)

        def linear(z: Tensor, name: str) -> Tensor:
            return QuantisedLinear.apply(z, p[name], rows[name])

        def norm(z: Tensor, name: str) -> Tensor:
            return F.layer_norm(z, (d,)) * p[name][:, None]

        for k in range(self.blocks):
            qkv = linear(norm(h, f"h.{k}.norm1"), f"h.{k}.attn.qkv").view(r * b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.kind == "gpt")
            h = h + linear(mixed.transpose(1, 2).reshape(r, b * t, d), f"h.{k}.attn.proj")
            up = F.gelu(linear(norm(h, f"h.{k}.norm2"), f"h.{k}.mlp.up"))
            h = h + linear(up, f"h.{k}.mlp.down")
        h = norm(h, "norm")
        if self.kind == "vit":  # every token votes: keeps the head's GEMMs at the shape of the others
            logits = linear(h, "head").view(r, b, t, -1).mean(2)
            return F.cross_entropy(logits.flatten(0, 1), y.repeat(r), reduction="none").view(r, -1).mean(1)
        logits = linear(h, "head")
        return F.cross_entropy(logits.flatten(0, 1), y.reshape(-1).repeat(r), reduction="none").view(r, -1).mean(1)

    def rows(self, assignment: np.ndarray, choices: Sequence[str]) -> dict[str, Rows]:
        """Return, per layer, which replicas run which choice."""
        out: dict[str, Rows] = {}
        for g, name in enumerate(self.groups):
            column = assignment[:, g]
            out[name] = {choices[c]: torch.from_numpy(np.flatnonzero(column == c)) for c in np.unique(column)}
        return out

    def train(
        self, assignment: np.ndarray, choices: Sequence[str], steps: int, stop: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Train all replicas with AdamW, warm-up, cosine and clipping; return losses ``[R, steps]`` and the weights."""
        count = len(assignment)
        p = {n: w.expand(count, *w.shape).clone().requires_grad_() for n, w in self.initial.items()}
        first, second = ({n: torch.zeros_like(w) for n, w in p.items()} for _ in range(2))
        rows, out = self.rows(assignment, choices), []
        for step in range(stop or steps):
            loss = self.losses(p, *self.batch_at(step), rows)
            grads = torch.autograd.grad(loss.sum(), list(p.values()))
            norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
            clip = (1.0 / norm).clamp(max=1.0)
            rate = 3e-3 * min(1.0, (step + 1) / 4) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            with torch.no_grad():
                for (n, w), g in zip(p.items(), grads, strict=True):
                    g = g * clip.view(-1, *[1] * (g.ndim - 1))
                    first[n].mul_(0.9).add_(g, alpha=0.1)
                    second[n].mul_(0.95).addcmul_(g, g, value=0.05)
                    m, v = first[n] / (1 - 0.9 ** (step + 1)), second[n] / (1 - 0.95 ** (step + 1))
                    w.sub_(rate * (m / (v.sqrt() + 1e-8) + 0.01 * w))
            out.append(loss.detach())
        return torch.stack(out, 1), {n: w.detach()[:1] for n, w in p.items()}

    def gradients(
        self, weights: dict[str, Tensor], step: int, assignment: np.ndarray, choices: Sequence[str]
    ) -> Tensor:
        """Return the flat gradients ``[R, P]`` of all replicas at given weights."""
        p = {n: w.expand(len(assignment), *w.shape[1:]).clone().requires_grad_() for n, w in weights.items()}
        loss = self.losses(p, *self.batch_at(step), self.rows(assignment, choices))
        return torch.cat([g.flatten(1) for g in torch.autograd.grad(loss.sum(), list(p.values()))], 1)


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
    """Compare the batched quantisers with autoprec.numerics on random operands."""
    from autoprec.numerics.quantize import quantize_dequantize
    from autoprec.recipes import BUILTIN_RECIPES

    torch.manual_seed(0)
    x = torch.randn(3, 64, 96) * torch.logspace(-3, 3, 96)
    for name, (qi, _, _) in QUANTISERS.items():
        ours = qi(x)
        theirs = torch.stack([quantize_dequantize(one, BUILTIN_RECIPES[name]) for one in x])
        error = float((ours - theirs).abs().max() / theirs.abs().max())
        print(f"{name:16s} largest difference {error:.2e}")
        if error > 1e-6:
            raise SystemExit(f"{name}: the batched quantiser differs from autoprec.numerics")


if __name__ == "__main__":
    check()
