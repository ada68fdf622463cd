"""Recorded models for the decision tests: plain data, no torch."""

from __future__ import annotations

from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy.space import SearchSpace, load_space


def linear(name: str, m: int, k: int, n: int, group: str = "", flags: tuple[str, ...] = ()) -> Layer:
    gemms = (GemmCall("fprop", m, k, n), GemmCall("dgrad", m, n, k), GemmCall("wgrad", n, m, k))
    return Layer(
        name=name,
        type="Linear",
        kind="linear",
        weight=f"{name}.weight",
        group=group or name,
        gemms=gemms,
        parameters=k * n,
        tunable=True,
        reason="linear",
        flags=flags,
        flops={gemm.role: gemm.flops for gemm in gemms},
        dtype="float32",
    )


def gpt(blocks: int = 4, width: int = 64, tokens: int = 256, vocabulary: int = 96) -> GraphReport:
    """A GPT: per block c_attn, c_proj, c_fc and mlp.c_proj, and a head; one layer per group."""
    layers = []
    for b in range(blocks):
        layers += [
            linear(f"h.{b}.attn.c_attn", tokens, width, 3 * width),
            linear(f"h.{b}.attn.c_proj", tokens, width, width),
            linear(f"h.{b}.mlp.c_fc", tokens, width, 4 * width),
            linear(f"h.{b}.mlp.c_proj", tokens, 4 * width, width),
        ]
    layers.append(linear("lm_head", tokens, width, vocabulary, flags=("head",)))
    return report(layers)


def even_space(name: str) -> SearchSpace:
    """A shipped space in which the head may run what every other layer may."""
    space = load_space(name)
    return space.model_copy(update={"choices": tuple(rule for rule in space.choices if rule.flag != "head")})


def report(layers: list[Layer]) -> GraphReport:
    groups: dict[str, list[str]] = {}
    for layer in layers:
        if layer.tunable:
            groups.setdefault(layer.group, []).append(layer.name)
    total = sum(layer.total_flops for layer in layers)
    return GraphReport(
        model={"class": "GPT", "parameters": sum(layer.parameters for layer in layers), "fingerprint": "sha256:0"},
        layers=tuple(layers),
        operators=(),
        groups={name: tuple(members) for name, members in groups.items()},
        total_flops=total,
        tunable_flops_share=0.9,
    )
