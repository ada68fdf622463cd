"""A decoder's training step written down from its sizes, without a model: shapes, FLOPs and traffic.

For the published end-to-end figures that the cost model is scored on, and as a step of any size for tests. What a user
gives as a configuration is built by transformers and recorded instead (:mod:`autoprec.cost.configuration`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from autoprec.graph.report import GemmCall, GraphReport, Layer, Operator


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder-only transformer.

    Attributes:
        gated: the MLP has a gate and an up projection (SwiGLU) beside the down projection.
        tied: the head shares the embedding's weight.
    """

    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = True
    tied: bool = False

    @property
    def q_size(self) -> int:
        """Outputs of the query projection."""
        return self.heads * (self.head_dim or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        """Outputs of the key projection, and of the value projection."""
        return (self.kv_heads or self.heads) * (self.head_dim or self.hidden // self.heads)


#: Sizes of well-known decoders, from their published configurations.
PRESETS: dict[str, DecoderConfig] = {
    "llama3-8b": DecoderConfig(4096, 32, 32, 14336, 128256, kv_heads=8),
    "llama3-70b": DecoderConfig(8192, 80, 64, 28672, 128256, kv_heads=8),
    "llama3-405b": DecoderConfig(16384, 126, 128, 53248, 128256, kv_heads=8),
    "qwen3-8b": DecoderConfig(4096, 36, 32, 12288, 151936, kv_heads=8, head_dim=128),
    "gpt2": DecoderConfig(768, 12, 12, 3072, 50257, gated=False, tied=True),
    "nanochat-d12": DecoderConfig(768, 12, 6, 3072, 32768, gated=False),
    "nanochat-d26": DecoderConfig(1664, 26, 13, 6656, 32768, gated=False),
}


def _layer(name: str, group: str, tokens: int, inp: int, out: int, flags: tuple[str, ...], recompute: bool) -> Layer:
    gemms = [GemmCall("fprop", tokens, inp, out), GemmCall("dgrad", tokens, out, inp)]
    gemms.append(GemmCall("wgrad", out, tokens, inp))
    if recompute:
        gemms.insert(1, GemmCall("recompute", tokens, inp, out))
    return Layer(
        name=name,
        type="Linear",
        kind="linear",
        weight=f"{name}.weight",
        group=group,
        gemms=tuple(gemms),
        parameters=inp * out,
        tunable=True,
        reason="matrix product with a weight",
        flags=flags,
        flops={gemm.role: gemm.flops for gemm in gemms},
        dtype="bf16",
    )


class _Operators:
    """Collects the operators of a step, forward and backward, with what autograd saves of each result."""

    def __init__(self) -> None:
        self.rows: list[Operator] = []

    def add(
        self,
        module: str,
        op: str,
        cls: str,
        moved: float,
        reads: Sequence[tuple[int, tuple[int, ...]]],
        made: tuple[int, ...],
        *,
        saved: bool,
        flops: float = 0.0,
        dtype: str = "bf16",
        weight: str = "",
        again: bool = False,
    ) -> int:
        """Add an operator that moves ``moved`` values of 16 bits forward, 1.5 times that and 2.5 times the FLOPs back.

        Args:
            reads: of each tensor it reads, the operator that made it (-1: a weight or the batch) and its shape.
            made, dtype: shape and dtype of its result; ``saved``: autograd keeps that for backward.
            again: it is recomputed in the backward pass at its whole cost.

        Returns:
            Its position in the step.
        """
        position, size = len(self.rows), 4 if dtype == "fp32" else 2
        phases = [("forward", 1.0, 1.0), *([("recompute", 1.0, 1.0)] if again else []), ("backward", 1.5, 2.5)]
        for phase, traffic, work in phases if moved else phases[:-1]:
            first = phase == "forward"
            self.rows.append(
                Operator(
                    name=f"{op}_{len(self.rows)}",
                    module=module,
                    op=op,
                    phase=phase,
                    cls=cls,
                    precision="follow",
                    reason="from the configuration",
                    shapes=tuple(shape for _, shape in reads) if first else (),
                    dtypes=("bf16",) * max(1, len(reads)),
                    flops=int(flops * work),
                    bytes=int(moved * traffic * 2),
                    weight=weight,
                    out_shapes=(made,) if first else (),
                    out_dtypes=(dtype,) if first else (),
                    out_saved=(size * prod(made) if saved else 0,) if first else (),
                    sources=tuple(source for source, _ in reads) if first else (),
                )
            )
        return position

    def linear(self, layer: Layer, source: int, *, saved: bool, checkpointed: bool) -> int:
        """Add a layer's forward product; of a checkpointed block something of every layer runs again."""
        gemm = layer.gemms[0]
        reads = [(source, (gemm.m, gemm.k)), (-1, (gemm.n, gemm.k))]
        out = self.add(layer.name, "aten::mm", "gemm", 0.0, reads, (gemm.m, gemm.n), saved=saved, weight=layer.weight)
        if checkpointed:
            again = replace(self.rows[out], phase="recompute", op="aten::t", cls="view", out_shapes=(), out_saved=())
            self.rows.append(replace(again, shapes=(), out_dtypes=(), sources=()))
        return out

    @property
    def saved(self) -> int:
        return sum(sum(row.out_saved) for row in self.rows)


def _block(
    out: _Operators, layers: Mapping[str, Layer], c: DecoderConfig, tokens: int, seq: int, x: int, recompute: str
) -> int:
    """Add one block that reads the residual stream ``x``; return the operator that writes it anew.

    Without recomputation autograd saves what norms read and write, the rotated queries and keys, values, attention's
    result, and the MLP's inner tensors. A checkpointed block saves its input (which the caller counts); "selective",
    as torchtitan's per-operator policy in a compiled block, also attention's result and every second product.
    """
    plain, full = not recompute, recompute == "full"
    wide, inner = (tokens, c.hidden), (tokens, c.intermediate)
    q, kv, prefix = (tokens, c.q_size), (tokens, c.kv_size), layers["q_proj"].name.rpartition(".self_attn")[0]
    kept = {"q_proj": recompute == "selective", "v_proj": not full, "up_proj": plain}
    kept["gate_proj" if c.gated else "up_proj"] = not full

    def linear(name: str, source: int) -> int:
        return out.linear(layers[name], source, saved=kept.get(name, False), checkpointed=not plain)

    def rest(module: str, op: str, cls: str, moved: float, reads: Sequence[Any], made: Any, **how: Any) -> int:
        return out.add(module, op, cls, moved, reads, made, again=full, **{"saved": plain, **how})

    size = float(tokens)
    turned = (tokens, c.q_size + c.kv_size)
    a = rest(f"{prefix}.input_layernorm", "rms_norm", "norm", 2 * size * c.hidden, [(x, wide)], wide)
    queries, keys, values = (linear(f"{name}_proj", a) for name in "qkv")
    reads = [(queries, q), (keys, kv)]
    r = rest(f"{prefix}.self_attn", "rotary", "pointwise", 2 * size * (c.q_size + 2 * c.kv_size), reads, turned)
    # causal: half of the score matrix
    moved, flops = size * (2 * c.q_size + 2 * c.kv_size), 2.0 * tokens * seq * c.q_size
    s = rest(
        f"{prefix}.self_attn",
        "aten::_scaled_dot_product_flash_attention",
        "attention",
        moved,
        [(r, turned), (values, kv)],
        q,
        flops=flops,
        saved=not full,
    )
    o = linear("o_proj", s)
    x = rest(prefix, "add", "pointwise", 3 * size * c.hidden, [(x, wide), (o, wide)], wide)
    b = rest(f"{prefix}.post_attention_layernorm", "rms_norm", "norm", 2 * size * c.hidden, [(x, wide)], wide)
    branches = [(linear(name, b), inner) for name in ("gate_proj", "up_proj") if name in layers]
    op = "silu_mul" if c.gated else "gelu"
    m = rest(f"{prefix}.mlp", op, "pointwise", (1 + len(branches)) * size * c.intermediate, branches, inner)
    d = linear("down_proj", m)
    # what the next block, or the last norm, reads
    return rest(prefix, "add", "pointwise", 3 * size * c.hidden, [(x, wide), (d, wide)], wide, saved=True)


def _projections(c: DecoderConfig) -> list[tuple[str, str, int, int]]:
    """Return name, group, inputs and outputs of a block's linear layers, in the order in which they run."""
    rows = [("self_attn.q_proj", "qkv", c.hidden, c.q_size), ("self_attn.k_proj", "qkv", c.hidden, c.kv_size)]
    rows += [("self_attn.v_proj", "qkv", c.hidden, c.kv_size), ("self_attn.o_proj", "o", c.q_size, c.hidden)]
    rows += [("mlp.gate_proj", "gate_up", c.hidden, c.intermediate)] if c.gated else []
    return [
        *rows,
        ("mlp.up_proj", "gate_up", c.hidden, c.intermediate),
        ("mlp.down_proj", "down", c.intermediate, c.hidden),
    ]


def _block_layers(c: DecoderConfig, prefix: str, tokens: int, recompute: str) -> dict[str, Layer]:
    """Return a block's layers by the last part of their names; "selective" recomputes every second one."""
    out = {}
    for number, (name, group, inputs, outputs) in enumerate(_projections(c)):
        again = recompute == "full" or (recompute == "selective" and number % 2 == 1)
        flags = ("kept",) if recompute == "selective" and not again and name != "mlp.down_proj" else ()
        made = _layer(f"{prefix}.{name}", f"{prefix}.{group}", tokens, inputs, outputs, flags, again)
        out[name.rpartition(".")[2]] = made
    return out


def _rebuilt(c: DecoderConfig, tokens: int, seq: int, recompute: str) -> int:
    """Return the bytes that the backward pass of one checkpointed block has to make again."""
    sizes = []
    for mode in ("", recompute):
        block = _Operators()
        _block(block, _block_layers(c, "0", tokens, mode), c, tokens, seq, -1, mode)
        sizes.append(block.saved)
    return sizes[0] - sizes[1]


def decoder_report(
    config: DecoderConfig, *, batch: int, seq: int, recompute: str = "", loss_chunks: int = 1
) -> GraphReport:
    """Return the step of a decoder trained in bf16 on ``batch`` sequences of ``seq`` tokens.

    Args:
        batch, seq: of one device and step.
        recompute: activation checkpointing: "" none, "full" (every forward operator of a block runs twice), or
            "selective" (every second GEMM does, as torchtitan's per-operator checkpointing).
        loss_chunks: parts in which logits and loss are computed, one after the other.
    """
    tokens, h = batch * seq, config.hidden
    layers: list[Layer] = []
    groups: dict[str, tuple[str, ...]] = {}
    operators = _Operators()
    wide = (tokens, h)
    x = operators.add("model.embed_tokens", "embedding", "embedding", 2.0 * tokens * h, [], wide, saved=True)
    for index in range(config.layers):
        block = _block_layers(config, f"model.layers.{index}", tokens, recompute)
        layers += block.values()
        for layer in block.values():
            groups[layer.group] = (*groups.get(layer.group, ()), layer.name)
        x = _block(operators, block, config, tokens, seq, x, recompute)
    n = operators.add("model.norm", "rms_norm", "norm", 2.0 * tokens * h, [(x, wide)], wide, saved=True)
    head = _layer("lm_head", "lm_head", tokens, h, config.vocab, ("head",), False)
    layers.append(head)
    groups["lm_head"] = ("lm_head",)
    logits = operators.linear(head, n, saved=False, checkpointed=False)
    words, at_once = (tokens, config.vocab), (-(-tokens // loss_chunks), config.vocab)
    values = 3.0 * tokens * config.vocab
    operators.add("", "cross_entropy", "loss", values, [(logits, words)], at_once, saved=True, dtype="fp32")
    weights = sum(layer.parameters for layer in layers) + (0 if config.tied else config.vocab * h)
    weights += (2 * config.layers + 1) * h
    in_layers = sum(layer.total_flops for layer in layers)
    total = in_layers + sum(row.flops for row in operators.rows)
    memory = {"parameters": weights * 4, "gradients": weights * 4, "optimizer": weights * 8}
    memory["saved_for_backward"] = operators.saved
    # while a block's backward runs, what it recomputes and its MLP's gradients are there; the loss's are gone by then
    loss, inner = 4 * prod(at_once), 2 * tokens * config.intermediate * (3 if config.gated else 2)
    memory["backward"] = max(loss, _rebuilt(config, tokens, seq, recompute) + inner - loss)
    return GraphReport(
        model={"class": "Decoder", "parameters": weights, "fingerprint": ""},
        layers=tuple(layers),
        operators=tuple(operators.rows),
        groups=groups,
        total_flops=total,
        tunable_flops_share=in_layers / total if total else 0.0,
        batch={"samples": batch, "tokens": tokens},
        memory=memory,
        notes=("from the configuration: no model was run",),
        source="analytic",
    )
