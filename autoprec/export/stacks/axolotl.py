"""``--to axolotl``: the precision keys of an axolotl YAML, which are for the whole model.

``fp8: true`` converts with torchao through accelerate, by one of torchao's recipe names. Two kinds of layers are never
converted: the first and the last linear layer (accelerate's filter), and routers (axolotl's own, by name). A model that
trains in 16 bits is also loaded in them: weights, gradients and optimizer state follow.
"""

from __future__ import annotations

from typing import Any

from autoprec.export.base import Loss, Losses, Request, Written
from autoprec.export.naming import header
from autoprec.export.settings import report_settings
from autoprec.export.stacks.torchao import NAMED
from autoprec.export.summary import lose, main_plan
from autoprec.policy import LayerPlan, dump_yaml

_ROUTERS = {"gate", "router"}
_ENDS = "bf16: axolotl leaves the first and the last linear layer and routers out of FP8"


def left_out(layers: tuple[str, ...]) -> list[str]:
    """Return the layers that axolotl never converts to FP8: the first and the last linear layer, and routers."""
    ends = {*layers[:1], *layers[-1:]}
    return [name for name in layers if name in ends or _ROUTERS & set(name.split("."))]


def write(request: Request, losses: Losses) -> Written:
    """Return ``axolotl_precision.yaml``: keys to merge into a configuration."""
    policy = request.policy
    main = main_plan(request)
    recipe = NAMED.nearest(main) if main is not None and _mostly_eight(request) else ""
    config: dict[str, Any] = {}
    dtype = policy.activations
    if recipe:
        config |= {"fp8": True, "fp8_config": {"recipe": recipe}, "fp8_enable_fsdp_float8_all_gather": False}
        dtype = "bf16"
    config |= {"bf16": dtype == "bf16", "fp16": dtype == "fp16"}
    kept = left_out(request.layers) if recipe else []

    def lost(plan: LayerPlan, name: str) -> str:
        words = NAMED.lost(plan, "" if name in kept else recipe, dtype, policy.activations)
        return _ENDS if words and name in kept else words

    lose(losses, request, lost)
    if recipe and not request.layers:
        losses.add("FP8 in the first and the last linear layer", f"{_ENDS} (pass --layers to have them named)")
    if policy.execution != "keep":
        config["torch_compile"] = policy.execution == "compile"
    report_settings(
        request,
        losses,
        "accelerate scales the loss under fp16, and only there",
        scales=dtype == "fp16",
        kept={"output": "accelerate casts the model's output to fp32", "execution": "torch_compile"},
        own=("optimizer", "gradients"),
        activations=dtype,
    )
    _state(request, losses, dtype)
    notes = ["axolotl's YAML knows no layers; for the rules use autoprec run, or a plugin that applies the policy"]
    if recipe:
        notes.append("fp8_config needs axolotl 0.19 or newer")
        if policy.execution == "keep":
            notes.append("FP8 that is not compiled is often slower than bf16: consider torch_compile: true")
    return {"axolotl_precision.yaml": header(request, "axolotl") + dump_yaml(config)}, notes


def _state(request: Request, losses: Losses, dtype: str) -> None:
    """Weights are stored in the dtype that the model trains in, and what the optimizer makes of them is too."""
    runs = "fp32" if dtype == "keep" else dtype
    state = {f"optimizer.{name}": value for name, value in request.policy.optimizer.model_dump().items()}
    for name, value in {**state, "communication.gradients": request.policy.communication.gradients}.items():
        if value != runs:
            losses.found.append(Loss(f"{name}: {value}", f"{runs}: axolotl loads the model in what it trains in"))


def _mostly_eight(request: Request) -> bool:
    """Say whether more layers are better served by FP8 everywhere than by FP8 nowhere."""
    if request.layers:
        kept = left_out(request.layers)
        plans = [plan for name, plan in request.plans().items() if name not in kept]
        return sum(bool(plan.scaled) for plan in plans) * 2 > len(plans)
    return bool(next(rule for rule in request.rules() if rule.match == "*").plan.scaled)
