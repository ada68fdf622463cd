"""Cross-check by a second road: functorch's joint forward-backward graph must count the same FLOPs per layer.

Dynamo captures the whole step as one graph, AOTAutograd differentiates it; both are torch internals that move between
releases, need the step to be one graph without breaks, and take ten times as long as recording: a check, not a source.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import fx, nn

from autoprec.errors import UnsupportedError
from autoprec.graph.report import GraphReport

__all__ = ["cross_check", "joint_flops"]

_PREFIX = "L['self'].model"


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.loss(self.model(*args, **kwargs))


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return tuple(int(size) for size in value.shape) if isinstance(value, torch.Tensor) else ()


def _node_flops(node: fx.Node) -> int:
    name = str(node.target).split(".")[1] if isinstance(node.target, torch._ops.OpOverload) else ""
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        first = 1 if name.startswith(("add", "badd")) else 0
        a, b = _shape(node.args[first]), _shape(node.args[first + 1])
        return 2 * prod(a) * b[-1]
    if name == "convolution" and not node.args[6]:
        weight, out = _shape(node.args[1]), _shape(node)
        return 2 * out[0] * prod(out[2:]) * prod(weight)
    if name == "convolution_backward" and not node.args[7]:
        mask: Any = node.args[-1]
        weight, out = _shape(node.args[2]), _shape(node.args[0])
        return 2 * out[0] * prod(out[2:]) * prod(weight) * (int(bool(mask[0])) + int(bool(mask[1])))
    return 0


def _layer(node: fx.Node, key: str) -> str:
    stack: Any = node.meta.get(key) or {}
    last = next(reversed(list(stack.values())), ("", None))[0]
    return str(last).removeprefix(_PREFIX).removeprefix(".")


def joint_flops(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[[Any], torch.Tensor]
) -> dict[str, dict[str, int]]:
    """Return ``{module: {"forward": FLOPs, "backward": FLOPs}}`` of the matrix products in the joint graph.

    Raises:
        UnsupportedError: this step cannot be captured as one graph, or torch's internals have moved; with the reason.
    """
    try:
        from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
        from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

        captured: Any = _dynamo_graph_capture_for_export(_Loss(model, loss))(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            joint = aot_export_joint_with_descriptors(stack, captured, args, dict(kwargs))
            nodes = list(joint.graph_module.graph.nodes)
    except Exception as error:  # any part of the compiler may refuse, in any way
        first = str(error).strip().splitlines()[:1]
        reason = f"{type(error).__name__}: {first[0] if first else ''}"
        raise UnsupportedError(f"the step cannot be captured as one joint graph: {reason[:300]}") from error
    out: dict[str, dict[str, int]] = {}
    for node in nodes:
        flops = _node_flops(node) if node.op == "call_function" else 0
        if flops:
            backward = "nn_module_stack" not in node.meta
            layer = _layer(node, "fwd_nn_module_stack" if backward else "nn_module_stack")
            row = out.setdefault(layer, {"forward": 0, "backward": 0})
            row["backward" if backward else "forward"] += flops
    return out


def cross_check(
    report: GraphReport,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
) -> tuple[str, ...]:
    """Compare a recorded step with the joint graph of the same step: one line per layer that differs.

    Only layers that run through a module of their own are compared (the joint graph names no other).

    Raises:
        UnsupportedError: see :func:`joint_flops`.
    """
    counted = joint_flops(model, args, kwargs, loss)
    lines = []
    for layer in report.layers:
        if layer.kind not in ("linear", "conv", "conv1d") or not layer.flops:
            continue
        mine = {"forward": layer.flops.get("fprop", 0), "backward": 0}
        mine["backward"] = layer.flops.get("dgrad", 0) + layer.flops.get("wgrad", 0)
        theirs = counted.get(layer.name, {"forward": 0, "backward": 0})
        if mine != theirs:
            lines.append(f"{layer.name}: recorded {mine}, joint graph {theirs}")
    return tuple(lines)
