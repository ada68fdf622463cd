"""The models of quality.py's harder cases, many replicas at once: see :mod:`replicas` for how they train.

Where quantisation error is not nearly additive: BatchNorm couples the samples of a batch, an LSTM multiplies the error
of its recurrent weights with itself, a router flips, and depth accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.search.replicas import Calls, LayerShape, Replicas, Roundings, Weights, layer_norm, linear


class Conv(Replicas):
    """A residual convolutional net with BatchNorm, and three fully connected layers, on 8x8 digits.

    Convolutions are products of unfolded patches. They run in one dtype, as a library's kernels do (bf16, fp16 or fp32:
    their operands are rounded value by value, before or after unfolding alike).
    """

    patch = (8, 8)
    channels = 16

    def layers(self) -> dict[str, LayerShape]:
        """Return convolutions (a 3x3 kernel over 4x4 positions) and fully connected layers."""
        c, b, d = self.channels, self.batch, self.width
        convs = [f"block.{k}.conv{j}" for k in range(self.blocks) for j in (1, 2)]
        out = {"stem": LayerShape(16 * b, c, 9, flags=("first",), kind="conv")}
        out |= {name: LayerShape(16 * b, c, 9 * c, kind="conv") for name in convs}
        out |= {"fc1": LayerShape(b, d, 16 * c), "fc2": LayerShape(b, d, d)}
        return {**out, "head": LayerShape(b, self.outputs, d, flags=("head",))}

    def others(self) -> dict[str, tuple[int, ...]]:
        """Return the scales of the BatchNorms."""
        return {f"norm.{name}": (self.channels,) for name, layer in self.layers().items() if layer.kind == "conv"}

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        r, b, c = len(x), self.batch, self.channels

        def conv(z: Tensor, name: str, stride: int = 1) -> Tensor:
            patches = F.unfold(z.flatten(0, 1), 3, padding=1, stride=stride).view(r, b, -1, 16)
            out = linear(p, patches.transpose(2, 3).reshape(r, b * 16, -1), name, kinds, calls)
            mean, variance = out.mean(1, keepdim=True), out.var(1, unbiased=False, keepdim=True)
            out = (out - mean) * torch.rsqrt(variance + 1e-5) * p[f"norm.{name}"][:, None]
            return out.view(r, b, 16, c).transpose(2, 3).reshape(r, b, c, 4, 4)

        h = F.relu(conv(x.reshape(r, b, 1, 8, 8), "stem", 2))
        for k in range(self.blocks):
            inner = F.relu(conv(h, f"block.{k}.conv1"))
            h = F.relu(h + conv(inner, f"block.{k}.conv2"))
        h = F.relu(linear(p, h.flatten(2), "fc1", kinds, calls))
        h = F.relu(linear(p, h, "fc2", kinds, calls))
        return self.loss(linear(p, h, "head", kinds, calls), y)


class Lstm(Replicas):
    """A language model of stacked LSTM cells written with Linear layers: the recurrent one multiplies step by step."""

    def layers(self) -> dict[str, LayerShape]:
        """Return the input and recurrent matrices of every layer, the projection, and the head."""
        d, b, t, out = self.width, self.batch, self.tokens, {}
        for k in range(self.blocks):
            out[f"cell.{k}.input"] = LayerShape(b * t, 4 * d, d)
            out[f"cell.{k}.recurrent"] = LayerShape(b, 4 * d, d, calls=t)
        out["project"] = LayerShape(b * t, d, d)
        return {**out, "head": LayerShape(b * t, self.outputs, d, flags=("head",))}

    def others(self) -> dict[str, tuple[int, ...]]:
        """Return the embedding and the last norm."""
        return {"embed": (self.inputs, self.width), "norm": (self.width,)}

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        r, b, t, d = len(x), self.batch, self.tokens, self.width
        h = self.embedded(p, x).reshape(r, b * t, d)
        for k in range(self.blocks):
            inputs = linear(p, h, f"cell.{k}.input", kinds, calls).view(r, b, t, 4 * d)
            state = cell = h.new_zeros(r, b, d)
            out = []
            for step in range(t):
                gates = inputs[:, :, step] + linear(p, state, f"cell.{k}.recurrent", kinds, calls)
                i, f, g, o = gates.chunk(4, dim=-1)
                cell = torch.sigmoid(f + 1.0) * cell + torch.sigmoid(i) * torch.tanh(g)
                state = torch.sigmoid(o) * torch.tanh(cell)
                out.append(state)
            h = h + torch.stack(out, 2).reshape(r, b * t, d)
        h = torch.tanh(linear(p, h, "project", kinds, calls))
        return self.loss(linear(p, layer_norm(h, p["norm"]), "head", kinds, calls), y)


class Moe(Replicas):
    """A transformer whose MLPs are four experts; a router sends every token to one of them.

    The router's matrix is padded to 32 outputs, as kernels pad it; only the first four are read. Tokens that are not an
    expert's are zeros to it, so they add nothing.
    """

    experts = 4

    def layers(self) -> dict[str, LayerShape]:
        """Return attention, router and experts of every block, and the head."""
        d, rows, out = self.width, self.batch * self.tokens, {}
        for b in range(self.blocks):
            out[f"h.{b}.attn.qkv"] = LayerShape(rows, 3 * d, d)
            out[f"h.{b}.attn.proj"] = LayerShape(rows, d, d)
            out[f"h.{b}.router"] = LayerShape(rows, 32, d, flags=("router",))
            out[f"h.{b}.experts.up"] = LayerShape(rows, self.ratio * d, d, self.experts)
            out[f"h.{b}.experts.down"] = LayerShape(rows, d, self.ratio * d, self.experts)
        return {**out, "head": LayerShape(rows, self.outputs, d, flags=("head",))}

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        r, d, b, t, e = len(x), self.width, self.batch, self.tokens, self.experts
        h = (self.embedded(p, x) + p["position"][:, None]).reshape(r, b * t, d)
        for k in range(self.blocks):
            h = h + self.attention(p, layer_norm(h, p[f"h.{k}.norm1"]), f"h.{k}.attn", kinds, calls)
            z = layer_norm(h, p[f"h.{k}.norm2"])
            weight = torch.softmax(linear(p, z, f"h.{k}.router", kinds, calls)[..., :e], dim=-1)
            gate = weight * F.one_hot(weight.argmax(-1), e)  # [R, tokens, experts]
            mine = (z[:, None] * (gate.detach() > 0).transpose(1, 2)[..., None]).flatten(0, 1)
            up = F.gelu(linear(p, mine, f"h.{k}.experts.up", kinds, calls, e))
            down = linear(p, up, f"h.{k}.experts.down", kinds, calls, e).view(r, e, b * t, d)
            h = h + (down * gate.transpose(1, 2)[..., None]).sum(1)
        return self.loss(linear(p, layer_norm(h, p["norm"]), "head", kinds, calls), y)


class ResidualMlp(Replicas):
    """A language model over the last four characters, residual MLP blocks: cheap enough for hundreds of steps."""

    def layers(self) -> dict[str, LayerShape]:
        """Return two layers per block, and the head."""
        d, b, out = self.width, self.batch, {}
        for k in range(self.blocks):
            out |= {f"h.{k}.up": LayerShape(b, self.ratio * d, d), f"h.{k}.down": LayerShape(b, d, self.ratio * d)}
        return {**out, "head": LayerShape(b, self.outputs, d, flags=("head",))}

    def others(self) -> dict[str, tuple[int, ...]]:
        """Return the embedding, of which every character has its share of the width, and the norms."""
        norms = {f"norm.{k}": (self.width,) for k in range(self.blocks + 1)}
        return {"embed": (self.inputs, self.width // self.tokens)} | norms

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        """Return the loss of every replica ``[R]``: that of the character after the last."""
        h = self.embedded(p, x).flatten(2)
        for k in range(self.blocks):
            up = F.gelu(linear(p, layer_norm(h, p[f"norm.{k}"]), f"h.{k}.up", kinds, calls))
            h = h + linear(p, up, f"h.{k}.down", kinds, calls)
        logits = linear(p, layer_norm(h, p[f"norm.{self.blocks}"]), "head", kinds, calls)
        return self.loss(logits, y[..., -1])


class Mixer(Replicas):
    """An MLP-Mixer: layers over the tokens, whose GEMMs contract another axis than all others, and over channels."""

    patch = (1, 2)

    def layers(self) -> dict[str, LayerShape]:
        """Return two token-mixing and two channel-mixing layers per block, and the head."""
        d, b, t, out = self.width, self.batch, self.tokens, {}
        for k in range(self.blocks):
            out[f"h.{k}.tokens.up"] = LayerShape(b * d, self.ratio * t, t)
            out[f"h.{k}.tokens.down"] = LayerShape(b * d, t, self.ratio * t)
            out[f"h.{k}.channels.up"] = LayerShape(b * t, self.ratio * d, d)
            out[f"h.{k}.channels.down"] = LayerShape(b * t, d, self.ratio * d)
        return {**out, "head": LayerShape(b * t, self.outputs, d, flags=("head",))}

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        r, d, b, t = len(x), self.width, self.batch, self.tokens
        h = (self.embedded(p, x) + p["position"][:, None]).reshape(r, b * t, d)
        for k in range(self.blocks):
            z = layer_norm(h, p[f"h.{k}.norm1"]).view(r, b, t, d).transpose(2, 3).reshape(r, b * d, t)
            z = linear(p, F.gelu(linear(p, z, f"h.{k}.tokens.up", kinds, calls)), f"h.{k}.tokens.down", kinds, calls)
            h = h + z.view(r, b, d, t).transpose(2, 3).reshape(r, b * t, d)
            up = F.gelu(linear(p, layer_norm(h, p[f"h.{k}.norm2"]), f"h.{k}.channels.up", kinds, calls))
            h = h + linear(p, up, f"h.{k}.channels.down", kinds, calls)
        return self.loss(linear(p, layer_norm(h, p["norm"]), "head", kinds, calls), y)


class Dit(Replicas):
    """A diffusion transformer: the noise in an image is predicted, every norm is modulated by the step of diffusion.

    The loss is a squared error; the modulation's layers have a row per image and not per token, and multiply what the
    others add to.
    """

    patch = (2, 2)
    pixels = 4

    def layers(self) -> dict[str, LayerShape]:
        """Return the layer of the diffusion step, five layers per block, and the output (32 wide, 4 are read)."""
        d, b, t = self.width, self.batch, self.tokens
        out = {"time": LayerShape(b, d, d)}
        for k in range(self.blocks):
            out[f"h.{k}.modulation"] = LayerShape(b, 6 * d, d)
            out[f"h.{k}.attn.qkv"] = LayerShape(b * t, 3 * d, d)
            out[f"h.{k}.attn.proj"] = LayerShape(b * t, d, d)
            out[f"h.{k}.mlp.up"] = LayerShape(b * t, self.ratio * d, d)
            out[f"h.{k}.mlp.down"] = LayerShape(b * t, d, self.ratio * d)
        return {**out, "output": LayerShape(b * t, 32, d, flags=("last",))}

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        """Return the mean squared error ``[R]`` of the noise in ``x [R, b, t, 5]``, the last of which is the step."""
        r, d, b, t = len(x), self.width, self.batch, self.tokens
        h = self.embedded(p, x[..., : self.pixels]) + p["position"][:, None]
        angles = x[:, :, 0, -1:] * torch.logspace(0, 2, d // 2)
        step = F.silu(linear(p, torch.cat([angles.sin(), angles.cos()], -1), "time", kinds, calls))
        for k in range(self.blocks):
            told = linear(p, step, f"h.{k}.modulation", kinds, calls).view(r, b, 1, 6, d)
            shift1, scale1, gate1, shift2, scale2, gate2 = (0.5 * told).unbind(3)

            def normed(z: Tensor, name: str, scale: Tensor, shift: Tensor) -> Tensor:
                flat = layer_norm(z.reshape(r, b * t, d), p[name]).view(r, b, t, d)
                return (flat * (1 + scale) + shift).reshape(r, b * t, d)

            z = normed(h, f"h.{k}.norm1", scale1, shift1)
            h = h + (1 + gate1) * self.attention(p, z, f"h.{k}.attn", kinds, calls).view(r, b, t, d)
            z = normed(h, f"h.{k}.norm2", scale2, shift2)
            up = F.gelu(linear(p, z, f"h.{k}.mlp.up", kinds, calls))
            h = h + (1 + gate2) * linear(p, up, f"h.{k}.mlp.down", kinds, calls).view(r, b, t, d)
        found = linear(p, layer_norm(h.reshape(r, b * t, d), p["norm"]), "output", kinds, calls)
        return (found[..., : self.pixels] - y.reshape(r, b * t, -1)).square().mean((1, 2))

    def _batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
        images = self.data[0]
        clean = images[torch.randint(len(images), (self.batch,), generator=generator)]
        noise = torch.randn(clean.shape, generator=generator)
        time = torch.rand(self.batch, 1, 1, generator=generator)
        noisy = torch.cos(time * math.pi / 2) * clean + torch.sin(time * math.pi / 2) * noise
        return torch.cat([noisy, time.expand(*clean.shape[:2], 1)], -1), noise


class EncoderDecoder(Replicas):
    """A denoising encoder-decoder: text of which 30 % is masked is read, and written again whole.

    The decoder looks at the encoder's last norm in every block (cross-attention), and one matrix is both embeddings
    and the head. That the embeddings are looked up in it is not rounded, as in a library.
    """

    masked, mask = 0.3, 95

    def layers(self) -> dict[str, LayerShape]:
        """Return four layers per encoder block, seven per decoder block, and the head."""
        d, rows, out = self.width, self.batch * self.tokens, {}

        def added(block: str, *, cross: bool) -> None:
            out[f"{block}.attn.qkv"] = LayerShape(rows, 3 * d, d)
            out[f"{block}.attn.proj"] = LayerShape(rows, d, d)
            if cross:
                out[f"{block}.cross.q"] = LayerShape(rows, d, d)
                out[f"{block}.cross.kv"] = LayerShape(rows, 2 * d, d)
                out[f"{block}.cross.proj"] = LayerShape(rows, d, d)
            out[f"{block}.mlp.up"] = LayerShape(rows, self.ratio * d, d)
            out[f"{block}.mlp.down"] = LayerShape(rows, d, self.ratio * d)

        for k in range(self.blocks):
            added(f"encoder.{k}", cross=False)
        for k in range(self.blocks):
            added(f"decoder.{k}", cross=True)
        return {**out, "head": LayerShape(rows, self.outputs, d, flags=("head",))}

    def others(self) -> dict[str, tuple[int, ...]]:
        """Return the positions of both sides and the norms."""
        norms = [f"encoder.{k}.norm{j}" for k in range(self.blocks) for j in (1, 2)] + ["encoder.norm"]
        norms += [f"decoder.{k}.norm{j}" for k in range(self.blocks) for j in (1, 2, 3)] + ["decoder.norm"]
        place = (self.tokens, self.width)
        return {"position": place, "written": place} | dict.fromkeys(norms, (self.width,))

    def losses(self, p: Weights, x: Tensor, y: Tensor, kinds: Roundings, calls: Calls = None) -> Tensor:
        """Return the loss ``[R]`` of ``x [R, 2, b, t]``: what the encoder reads, and what was written so far."""
        r, d, b, t = len(x), self.width, self.batch, self.tokens
        table = {"embed": p["head"] * (math.sqrt(d) / 2)}

        def attended(q: Tensor, k: Tensor, v: Tensor, name: str, *, causal: bool = False) -> Tensor:
            heads = (z.reshape(r * b, t, 2, d // 2).transpose(1, 2) for z in (q, k, v))
            mixed = F.scaled_dot_product_attention(*heads, is_causal=causal)
            return linear(p, mixed.transpose(1, 2).reshape(r, b * t, d), f"{name}.proj", kinds, calls)

        def normed(h: Tensor, name: str) -> Tensor:
            return layer_norm(h, p[name])

        def itself(h: Tensor, block: str, *, causal: bool) -> Tensor:
            qkv = linear(p, normed(h, f"{block}.norm1"), f"{block}.attn.qkv", kinds, calls).chunk(3, dim=-1)
            return h + attended(*qkv, f"{block}.attn", causal=causal)

        def mlp(h: Tensor, block: str, norm: str) -> Tensor:
            up = F.gelu(linear(p, normed(h, f"{block}.{norm}"), f"{block}.mlp.up", kinds, calls))
            return h + linear(p, up, f"{block}.mlp.down", kinds, calls)

        h = (self.embedded(table, x[:, 0]) + p["position"][:, None]).reshape(r, b * t, d)
        for k in range(self.blocks):
            h = mlp(itself(h, f"encoder.{k}", causal=False), f"encoder.{k}", "norm2")
        read = normed(h, "encoder.norm")
        h = (self.embedded(table, x[:, 1]) + p["written"][:, None]).reshape(r, b * t, d)
        for k in range(self.blocks):
            block = f"decoder.{k}"
            h = itself(h, block, causal=True)
            q = linear(p, normed(h, f"{block}.norm2"), f"{block}.cross.q", kinds, calls)
            h = h + attended(q, *linear(p, read, f"{block}.cross.kv", kinds, calls).chunk(2, dim=-1), f"{block}.cross")
            h = mlp(h, block, "norm3")
        return self.loss(linear(p, normed(h, "decoder.norm"), "head", kinds, calls), y)

    def _batch(self, seed: int, step: int) -> tuple[Tensor, Tensor]:
        before, text = super()._batch(seed, step)
        generator = torch.Generator().manual_seed(1_000_033 * (seed + 1) + step)
        hidden = torch.rand(text.shape, generator=generator) < self.masked
        return torch.stack([text.masked_fill(hidden, self.mask), before]), text


MODELS: dict[str, type[Replicas]] = {
    "transformer": Replicas,
    "conv": Conv,
    "lstm": Lstm,
    "moe": Moe,
    "mlp": ResidualMlp,
    "mixer": Mixer,
    "dit": Dit,
    "encoder-decoder": EncoderDecoder,
}


def build(model: str, seeds: Sequence[int], **sizes: Any) -> Replicas:
    """Return the replicas of a model by name, with one member per seed."""
    return MODELS[model](seeds, **sizes)
