"""Bytes saved for backward, modelled against measured, on the recorder's zoo, for benchmarks/cost/cost_model.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.graph import zoo as graph_zoo

#: Convolutions and recurrent layers have no 8-bit recipe and stay in bf16.
POLICIES: dict[str, str] = {"bf16": "bf16", "fp8_rowwise": "fp8_rowwise"}


def _models() -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    from autoprec.support.optional import is_available

    if not is_available("transformers"):
        return dict(graph_zoo.MODELS)
    from benchmarks.graph import zoo_hf as graph_zoo_hf

    return {**graph_zoo.MODELS, **graph_zoo_hf.MODELS}


def _record(model: nn.Module, batch: dict[str, Any]) -> Any:
    from autoprec.graph.recorder import StepRecorder

    torch.manual_seed(1)  # the same experts are chosen and the same units dropped in every run
    with StepRecorder(model) as recorder:
        out = model(**batch)
        (out if torch.is_tensor(out) else out.loss).backward()
    model.zero_grad(set_to_none=True)
    return recorder.report()


def case(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> dict[str, float] | str:
    """Return the measured bytes of the script and the error per policy, or why there is none."""
    from autoprec.applying.policy import apply_policy, remove_policy
    from autoprec.cost.saved import Setting, saved_bytes
    from autoprec.policy import Policy, resolve
    from autoprec.policy.schema import LayerRule
    from autoprec.precision.recipes import BUILTIN_RECIPES

    torch.manual_seed(0)
    model, batch = make()
    before = _record(model, batch)
    row = {"measured": float(before.memory["saved_for_backward"])}
    for name, recipe in POLICIES.items():
        recipes = {"low": BUILTIN_RECIPES[recipe], "bf16": BUILTIN_RECIPES["bf16"]}
        rules = tuple(
            LayerRule(match=layer.name, recipe="bf16" if layer.kind in ("conv", "rnn") else "low")
            for layer in before.tunable
        )
        policy = Policy(recipes=recipes, layers=rules, activations="bf16")
        try:
            apply_policy(policy, model)
            measured = _record(model, batch).memory["saved_for_backward"]
        except Exception as error:  # a custom autograd function need not take bf16
            return f"cannot run in bf16: {type(error).__name__}"
        finally:
            remove_policy(model)
        plans = resolve(policy, [layer.name for layer in before.tunable])
        row[name] = saved_bytes(before, Setting(plans, "bf16"))[0] / measured - 1.0
    return row


def cases() -> dict[str, dict[str, float] | str]:
    """Return every model's row."""
    torch.set_num_threads(1)
    return {name: case(make) for name, make in _models().items()}
