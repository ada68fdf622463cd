"""Ground truth for quality.py: many copies of a small model trained at once, each under its own assignment.

One batch trains R replicas; replica r has the initial weights and data of its own seed, and runs group g under
``assignment[r, g]``. Quantisation is the emulation of :mod:`autoprec.numerics` over a leading replica dimension
(``python benchmarks/search/replicas.py`` checks it): operands are rounded, the product is accumulated in
float32 and rounded to bfloat16.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.search.replica_kernel import KINDS, round_replicas, rounded_like

#: choice -> how (input, weight, grad_output) are rounded; ``wgrad`` exceptions are named as AutoPrec names them.
OPERANDS: dict[str, tuple[str, str, str]] = {
    "keep": ("keep", "keep", "keep"),
    "fp32": ("keep", "keep", "keep"),
    "tf32": ("tf32", "tf32", "tf32"),
    "fp16": ("fp16", "fp16", "fp16"),
    "bf16": ("bf16", "bf16", "bf16"),
    "fp8_rowwise": ("rowwise", "rowwise", "rowwise"),
    "fp8_tensorwise": ("tensorwise", "tensorwise", "tensorwise_e5m2"),
    "mxfp8": ("mxfp8", "mxfp8", "mxfp8"),
    "nvfp4_plain": ("nvfp4", "nvfp4", "nvfp4"),
    "nvfp4": ("nvfp4", "nvfp4_2d", "nvfp4_sr"),
}
#: recipe -> how (input, grad_output) of the weight gradient are rounded, where that differs.
WGRAD = {"nvfp4": ("nvfp4_rht", "nvfp4_rht_sr")}
#: A layer's product again, under other roundings, and what it was: (name, run, output).
Call = tuple[str, Callable[["Kinds"], Tensor], Tensor]
#: Weights, and how the operands of each layer are rounded, by name; where a forward's calls go.
Weights, Roundings, Calls = dict[str, Tensor], dict[str, "Kinds"], list[Call] | None


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
            pair = WGRAD.get(rest or recipe, (wgrad[0], wgrad[2]))
            table.append([KINDS.index(name) for name in (*main, *pair)])
        picked = np.array(table, dtype=np.int8)[column]
        return cls(*(np.ascontiguousarray(picked[:, k]) for k in range(5)))

    def repeated(self, times: int) -> Kinds:
        """Return the kinds of ``times`` matrices per replica (the experts of a layer) ``[R * times]``."""
        return Kinds(*(np.repeat(getattr(self, field.name), times) for field in fields(self)))


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


@dataclass(frozen=True)
class LayerShape:
    """One quantised layer: its GEMM ``[m, k] x [k, n]``, and what the graph says of it.

    ``count`` matrices share the ``m`` rows (experts); one matrix is multiplied by ``calls`` times (a recurrence).
    """

    m: int
    n: int
    k: int
    count: int = 1
    calls: int = 1
    flags: tuple[str, ...] = ()
    kind: str = "linear"


class Replicas:
    """A transformer whose weights carry a leading replica dimension; other models override four methods.

    Args:
        seeds: initial weights and data order of the members; replicas refer to them by position.
        data: ``text`` (next character of the standard library's own source) or ``digits`` (scikit-learn's).
        width, blocks, batch, tokens: sizes of the model and of a step.
        ratio: hidden size of the MLPs over ``width``.
        parameters: name -> values of ``optimizer.*`` and ``communication.*``, the columns after the layers' own.
    """

    #: Images are cut into patches of this many pixels (rows, columns).
    patch = (2, 2)

    def __init__(
        self,
        seeds: Sequence[int],
        *,
        data: str = "text",
        width: int = 32,
        blocks: int = 4,
        batch: int = 4,
        tokens: int = 16,
        ratio: int = 4,
        parameters: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.width, self.blocks, self.batch, self.tokens, self.ratio = width, blocks, batch, tokens, ratio
        self.seeds, self.parameters = tuple(seeds), dict(parameters or {})
        self.on_text = data == "text"
        self.data = text() if self.on_text else digits(*self.patch)
        self.outputs, self.inputs = (96, 96) if self.on_text else (32, self.patch[0] * self.patch[1])
        self.groups = list(self.layers())
        each = [self._initial(seed) for seed in self.seeds]
        self.initial = {name: torch.stack([one[name] for one in each]) for name in each[0]} if each else {}

    # --- the model --------------------------------------------------------------------------------------------------
    def layers(self) -> dict[str, LayerShape]:
        """Return the quantised layers, in model order."""
        d, rows, out = self.width, self.batch * self.tokens, {}
        for b in range(self.blocks):
            out[f"h.{b}.attn.qkv"] = LayerShape(rows, 3 * d, d)
            out[f"h.{b}.attn.proj"] = LayerShape(rows, d, d)
            out[f"h.{b}.mlp.up"] = LayerShape(rows, self.ratio * d, d)
            out[f"h.{b}.mlp.down"] = LayerShape(rows, d, self.ratio * d)
        return {**out, "head": LayerShape(rows, self.outputs, d, flags=("head",))}

    def others(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what is not quantised; a name with ``norm`` in it starts as ones."""
        d = self.width
        norms = {f"h.{b}.norm{k}": (d,) for b in range(self.blocks) for k in (1, 2)}
        return {"embed": (self.inputs, d), "position": (self.tokens, d), **norms, "norm": (d,)}

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        """Return the loss of every replica ``[R]`` on its own batch ``[R, b, ...]``.

        ``calls`` receives every product of a quantised layer, the output with its gradient kept.
        """
        r, d, b, t = len(p["head"]), self.width, self.batch, self.tokens
        h = (self.embedded(p, x) + p["position"][:, None]).reshape(r, b * t, d)
        for k in range(self.blocks):
            h = h + self.attention(p, layer_norm(h, p[f"h.{k}.norm1"]), f"h.{k}.attn", kinds, calls)
            up = F.gelu(linear(p, layer_norm(h, p[f"h.{k}.norm2"]), f"h.{k}.mlp.up", kinds, calls))
            h = h + linear(p, up, f"h.{k}.mlp.down", kinds, calls)
        return self.loss(linear(p, layer_norm(h, p["norm"]), "head", kinds, calls), y)

    # --- its parts --------------------------------------------------------------------------------------------------
    def embedded(self, p: dict[str, Tensor], x: Tensor) -> Tensor:
        """Return the embeddings ``[R, b, t, d]`` of characters, or of patches."""
        if not self.on_text:
            return (x.flatten(1, 2) @ p["embed"]).view(*x.shape[:3], self.width)
        offset = p["embed"].shape[1] * torch.arange(len(x)).view(-1, 1, 1)
        return F.embedding(x + offset, p["embed"].flatten(0, 1))

    def attention(self, p: Weights, h: Tensor, name: str, kinds: Roundings, calls: Calls) -> Tensor:
        """Return attention over the tokens of each sequence, with two heads."""
        r, d, b, t = len(h), self.width, self.batch, self.tokens
        qkv = linear(p, h, f"{name}.qkv", kinds, calls).view(r * b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=self.on_text)
        return linear(p, mixed.transpose(1, 2).reshape(r, b * t, d), f"{name}.proj", kinds, calls)

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy ``[R]`` of logits ``[R, b * t, outputs]``."""
        r = len(logits)
        if not self.on_text:  # every token votes: keeps the head's GEMMs at the shape of the others
            logits = logits.view(r, self.batch, -1, logits.shape[-1]).mean(2)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(r, -1).mean(1)

    # --- weights and data -------------------------------------------------------------------------------------------
    def _initial(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        layers = {
            name: (layer.n, layer.k) if layer.count == 1 else (layer.count, layer.n, layer.k)
            for name, layer in self.layers().items()
        }
        others = self.others()
        first = {name: others.pop(name) for name in ("embed", "position") if name in others}

        def fresh(name: str, shape: tuple[int, ...]) -> Tensor:
            if "norm" in name:
                return torch.ones(shape)
            return torch.randn(shape, generator=generator) / math.sqrt(shape[-1] if name in layers else 4)

        return {name: fresh(name, shape) for name, shape in {**first, **layers, **others}.items()}

    def batch_at(self, step: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of a step, a leading row per member."""
        pairs = [self._batch(seed, step) for seed in self.seeds]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])

    def _batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        if self.on_text:
            (stream,) = self.data
            at = torch.randint(len(stream) - self.tokens - 1, (self.batch,), generator=generator)
            window = torch.stack([stream[i : i + self.tokens + 1] for i in at])
            return window[:, :-1], window[:, 1:]
        images, labels = self.data
        at = torch.randint(len(images), (self.batch,), generator=generator)
        return images[at], labels[at]

    def kinds(self, assignment: np.ndarray, choices: Sequence[str]) -> dict[str, Kinds]:
        """Return, per layer, how every replica rounds."""
        return {name: Kinds.of(assignment[:, g], choices) for g, name in enumerate(self.groups)}

    # --- training ---------------------------------------------------------------------------------------------------
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
            assignment: ``[R, G + K]`` columns of ``choices``, then of the values of ``parameters``.
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
        stored = Stored(self.parameters, assignment[:, len(self.groups) :])
        for step in range(stop or steps):
            x, y = self.batch_at(step)
            loss = self.losses(p, x[at], y[at], kinds)
            grads = stored.sent(torch.autograd.grad(loss.sum(), list(p.values())))
            norm = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
            clip = (1.0 / norm).clamp(max=1.0)
            rate = 3e-3 * min(1.0, (step + 1) / 4) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
            even1, even2 = 1 - 0.9 ** (step + 1), 1 - 0.95 ** (step + 1)
            with torch.no_grad():
                for (n, w), g in zip(p.items(), grads, strict=True):
                    g = g * clip.view(-1, *[1] * (g.ndim - 1))
                    first[n] = stored.moment(first[n].mul_(0.9).add_(g, alpha=0.1))
                    second[n].mul_(0.95).addcmul_(g, g, value=0.05)
                    scale = torch.sqrt(second[n]).mul_(even2**-0.5).add_(1e-8)
                    w.mul_(1 - 0.01 * rate).addcdiv_(first[n], scale, value=-rate / even1)
                    stored.weight_(n, w, step)
            out.append(loss.detach())
        return torch.stack(out, 1), {n: w.detach() for n, w in p.items()}

    def gradients(self, weights: Weights, step: int, assignment: np.ndarray, choices: Sequence[str]) -> Tensor:
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
        calls: list[Call] = []
        reference = np.zeros((1, len(self.groups)), dtype=np.int64)
        self.losses(p, x, y, self.kinds(reference, choices), calls).sum().backward()
        scores = np.zeros((len(self.groups), len(choices)))
        for name, run, out in calls:
            for c in range(len(choices)):
                change = run(Kinds.of(np.array([c]), choices)) - out.detach()
                scores[self.groups.index(name), c] += float((out.grad * change).square().sum())
        return scores


class Stored:
    """What optimizer state and communication do to every replica: ``[R, K]`` columns of the parameters' values.

    The formats are AutoPrec's: bfloat16, E4M3 with one exact scale per 128 values of a moment and per tensor on the
    wire, and weights rounded to bfloat16 stochastically.
    """

    def __init__(self, parameters: Mapping[str, Sequence[str]], columns: np.ndarray) -> None:
        self._values = {name: np.array(v)[columns[:, k]] for k, (name, v) in enumerate(parameters.items())}

    def _kinds(self, name: str, eight: str) -> np.ndarray | None:
        values = self._values.get(name)
        if values is None or (values == "fp32").all():
            return None
        table = {"fp32": "keep", "bf16": "bf16", eight: "tensorwise"}
        return np.array([KINDS.index(table[str(v)]) for v in values], dtype=np.int8)

    def sent(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return gradients as they arrive."""
        kinds = self._kinds("communication.gradients", "fp8")
        if kinds is None:
            return grads
        return [round_replicas(g.reshape(len(g), 1, -1), kinds).view(g.shape) for g in grads]

    def moment(self, x: Tensor) -> Tensor:
        """Return a first moment as it is stored; what is not a matrix stays float32."""
        kinds = self._kinds("optimizer.exp_avg", "e4m3")
        if kinds is None or x.ndim < 3 or x[0].numel() % 128:
            return x
        blocks = x[0].numel() // 128
        return round_replicas(x.reshape(-1, 1, 128), np.repeat(kinds, blocks)).view(x.shape)

    def weight_(self, name: str, w: Tensor, step: int) -> None:
        """Store a weight, embeddings left out: the noise is that of the step and the place."""
        values = self._values.get("optimizer.weights")
        if values is None or w.ndim < 3 or name in ("embed", "position"):
            return
        rows = torch.from_numpy(np.flatnonzero(values == "bf16_stochastic"))
        if len(rows):
            generator = torch.Generator().manual_seed(7919 * step + w[0].numel())
            noise = torch.randint(1 << 16, w.shape[1:], generator=generator, dtype=torch.int32)
            w[rows] = ((w[rows].view(torch.int32) + noise) & -65536).view(torch.float32)


def linear(p: Weights, x: Tensor, name: str, kinds: Roundings, calls: Calls, count: int = 1) -> Tensor:
    """Return the product of a quantised layer, ``count`` matrices per replica, and note the call."""
    weight = p[name].flatten(0, 1) if count > 1 else p[name]

    def run(how: Kinds, z: Tensor, w: Tensor) -> Tensor:
        return QuantisedLinear.apply(z, w, how.repeated(count) if count > 1 else how)

    out = run(kinds[name], x, weight)
    if calls is not None:
        out.retain_grad()
        calls.append((name, partial(run, z=x.detach(), w=weight.detach()), out))
    return out


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise ``[R, M, d]`` over its last axis, with each replica's own weight ``[R, d]``."""
    return F.layer_norm(x, (x.shape[-1],)) * weight[:, None]


def text() -> tuple[Tensor]:
    """Return characters of the standard library's own source files as classes 0..95."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    joined = "".join(f.read_text(encoding="utf-8", errors="ignore") for f in files)
    return (torch.tensor([min(max(ord(c) - 31, 0), 95) for c in joined]),)


def digits(rows: int = 2, columns: int = 2) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits as patches of so many pixels, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32) / 8 - 1
    patches = images.unfold(1, rows, rows).unfold(2, columns, columns).reshape(len(images), -1, rows * columns)
    return patches, torch.tensor(found.target)


def check() -> None:
    """Compare the batched rounding with autoprec.numerics on random operands."""
    from autoprec.numerics.quantize import dequantize, quantize, spec_of
    from autoprec.precision.recipes import BUILTIN_RECIPES

    torch.manual_seed(0)
    x = torch.randn(3, 64, 96) * torch.logspace(-3, 3, 96)

    def ours(kind: str, z: Tensor = x, turned: bool = False) -> Tensor:
        return round_replicas(z, np.full(len(z), KINDS.index(kind), dtype=np.int8), turned=turned)

    def report(name: str, error: float, allowed: float) -> None:
        print(f"{name:16s} largest difference {error:.2e}")
        if error > allowed:
            raise SystemExit(f"{name}: the batched rounding differs from autoprec.numerics")

    for name, (kind, _, _) in OPERANDS.items():
        if name in ("keep", "fp32", "tf32", "fp16", "nvfp4"):
            continue
        spec = spec_of(BUILTIN_RECIPES[name], "fprop", "input")
        theirs = torch.stack([dequantize(quantize(one, spec)) for one in x])
        across = torch.stack([dequantize(quantize(one.mT.contiguous(), spec)) for one in x])
        pairs = ((ours(kind), theirs), (ours(kind, turned=True), across))
        report(name, max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs), 1e-6)
    report("fp16", float((ours("fp16") - x.half().float()).abs().max()), 0.0)
    square = spec_of(BUILTIN_RECIPES["nvfp4"], "fprop", "weight")
    theirs = torch.stack([dequantize(quantize(one, square)) for one in x])
    report("nvfp4 weight", float((ours("nvfp4_2d") - theirs).abs().max() / theirs.abs().max()), 1e-6)
    y = torch.randn(1, 64, 96)
    mean = torch.stack([ours("nvfp4_sr", y * (1 + 1e-7 * k)) for k in range(200)]).mean(0)
    report("nvfp4 stochastic", float((mean - y).norm() / y.norm()), 0.05)  # one rounding: 0.12; nearest's bias: 0.09
    a, b = torch.randn(2, 1, 32, 64)
    plain, turned = (float((ours(k, a) @ ours(k, b).mT - a @ b.mT).norm()) for k in ("nvfp4", "nvfp4_rht"))
    report("nvfp4 Hadamard", turned / plain, 1.5)  # the transform of both operands cancels in the product


if __name__ == "__main__":
    check()
