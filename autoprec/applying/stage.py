"""Put one stage of a policy on a live model in place, and take it off again.

A stage is what a policy runs between two phase boundaries; a policy without phases is one stage. Every tunable layer is
matched with a rule, a backend binds the rule's recipe to the layer, and the layer's class is exchanged
(:mod:`autoprec.applying.swap`). Works before or after the optimizer is built, before or after ``torch.compile``, under
DDP, FSDP2, activation checkpointing, autocast and gradient accumulation. Callers from outside this room use
:func:`autoprec.applying.policy.apply_policy`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from autoprec.applying.around.gelu import FusedGelu, gelus_by_hand
from autoprec.applying.around.operators import RootExecution
from autoprec.applying.attention import AttentionExecutions, EncoderLayerExecutions, attention_refusal
from autoprec.applying.binding import Binder, timed_backends
from autoprec.applying.compiling import allow_versions, restore_execution, set_execution
from autoprec.applying.prepared import Prepared
from autoprec.applying.raw_weights import RawWeightExecutions, unit_execution
from autoprec.applying.swap import execution_of, install, root_of, swapped_base, uninstall
from autoprec.applying.units import LAYERS, Unit, clean_name, tunable_units, unwrap
from autoprec.backends import Backend, choose
from autoprec.errors import BEFORE_TORCHSCRIPT, IN_TORCHSCRIPT, AutoPrecWarning, UnsupportedError
from autoprec.numerics.delayed.steps import DelayedReduction
from autoprec.numerics.linear import LinearExecution
from autoprec.numerics.plan import NATIVE
from autoprec.numerics.sharded import is_dtensor, is_sharded
from autoprec.policy import ImplementationPolicy, LayerPlan, Policy, first_match, resolve
from autoprec.precision.recipes import KEEP


def put_stage(
    policy: Policy,
    model: nn.Module,
    *,
    backend: str = "auto",
    strict: bool = True,
    keep: bool = False,
    only_try: bool = False,
) -> None:
    """Make a model run under one stage of a policy, in place; see :func:`autoprec.applying.policy.apply_policy`.

    Args:
        policy: the stage; phases of it are not looked at.
        keep: layers whose plan stays the same keep their execution, with its delayed scales and random streams; for
            stages that come one after the other under one backend.
        only_try: change nothing; only raise what would be raised.
    """
    root = unwrap(model)
    if isinstance(root, torch.jit.ScriptModule):
        raise UnsupportedError(
            IN_TORCHSCRIPT,
            where=swapped_base(root).__name__,
            fix=f"apply the policy to {BEFORE_TORCHSCRIPT}",
        )
    if strict and (policy.layers or policy.default != KEEP) and (lazy := _without_shape(root)):
        raise UnsupportedError(
            "the layer gets its shape in its first forward, and no policy before that",
            where=f"layer '{lazy}'",
            fix="call the model once, or give its layers their sizes, and apply the policy then",
        )
    units = tunable_units(root)
    plans = resolve(policy, units, strict=strict)
    device = _device_of(root)
    chosen = choose(backend, device)
    before = root_of(root) if keep else None
    held = {each.name: each for each in (before.backends if before is not None else ())}
    chosen = held.get(chosen.name, chosen)
    available = chosen.available(device)
    if not available:
        raise UnsupportedError(f"backend '{chosen.name}' cannot run here: {available.reason}", fix="use backend 'auto'")
    faster = timed_backends(policy, device, held) if backend == "auto" else {}
    binder = Binder(chosen, device, backend == "auto", strict, faster)
    executions = {
        name: (_kept(unit, plans[name]) if keep else None) or binder.bind(name, unit, plans[name])
        for name, unit in units.items()
        if not plans[name].keeps
    }
    if only_try:
        return
    for name, made in executions.items():
        if made is not None:
            made.name = name
    binder.say_refused()
    _say_without_a_layer(policy, units)
    allow_versions(plans)
    with _all_or_nothing(root):
        take_off(root)
        _install_all({name: made for name, made in executions.items() if made is not None}, units)
        if policy.implementation.attention == "unfused":
            _call_attention(root)
        _run_encoder_layers(root)
        _know_layouts(root, executions, units)
        running = {made.backend for made in executions.values() if made is not None}
        others = {each.name: each for each in faster.values()} | held
        backends = (chosen, *(each for name, each in others.items() if name in running and each is not chosen))
        _install_root(root, policy, backends, device, executions)
        if policy.implementation.gelu == "fused":
            _fuse_gelus(root)
        set_execution(root, policy.execution)


def _without_shape(root: nn.Module) -> str:
    """Return the name of a layer (``nn.LazyLinear``, a lazy convolution) that has no shape yet, or nothing."""
    for name, module in root.named_modules():
        weight = module._parameters.get("weight")
        if isinstance(weight, nn.UninitializedParameter) and isinstance(module, LAYERS):
            return clean_name(name)
    return ""


def _say_without_a_layer(policy: Policy, units: dict[str, Unit]) -> None:
    """Warn where a policy has rules, all optional, and none of them fits the model: none of them does anything."""
    rules = [rule.match for rule in policy.layers if rule.optional and not policy.plan_of_rule(rule).keeps]
    if (
        rules
        and all(rule.optional for rule in policy.layers)
        and not any(first_match(policy.layers, name) for name in units)
    ):
        warnings.warn(
            f"no rule of the policy fits a layer of this model, and all are optional: {', '.join(rules[:5])} change "
            f"nothing; its layers are {', '.join([*units][:5]) or 'none that a policy reaches'}",
            AutoPrecWarning,
            stacklevel=2,
        )


def _install_root(
    root: nn.Module,
    policy: Policy,
    backends: tuple[Backend, ...],
    device: str,
    executions: dict[str, Any],
) -> None:
    """Surround the model's forward, where the policy is about what happens between its layers."""
    around = policy.activations != "keep" or policy.operators.attention != "keep" or policy.embedding_gradient != 1.0
    around = around or policy.implementation != ImplementationPolicy()
    if executions or around:
        kind = device.split(":")[0]
        activations = NATIVE.get(policy.activations)
        emulates = backends[0].emulates_casts
        held = [module._parameters for module in root.modules() if module._parameters]
        root_execution = RootExecution(
            activations,
            policy.operators,
            kind,
            held,
            emulates,
            policy.embedding_gradient,
            backends=backends,
            implementation=policy.implementation,
        )
        for backend in backends:  # one of them at most has anything to do around the layers of others
            root_execution.context = root_execution.context or backend.around_model()
            root_execution.after_step = root_execution.after_step or backend.after_step()
        root_execution.scales = any(made is not None and made.plan.scaled for made in executions.values())
        reduction = DelayedReduction(root, executions.values())
        root_execution.before = reduction if reduction.slots else None
        root_execution.first = partial(_know_gathered, root, executions)
        _know_gathered(root, executions)
        install(root, "root", root_execution)


def _know_gathered(root: nn.Module, executions: dict[str, Any]) -> None:
    """Tell layers whether FSDP2 gathers their weights: now, and before the first forward (a policy may come first)."""
    gathered = is_sharded(root)
    for made in executions.values():
        if isinstance(made, LinearExecution):
            made.gathered = gathered


@contextlib.contextmanager
def _all_or_nothing(root: nn.Module) -> Iterator[None]:
    """Give every module back what it had, if the body does not come to its end."""
    before = Prepared(root)
    try:
        yield
    except BaseException:
        before.put()
        raise


def _install_all(executions: dict[str, Any], units: dict[str, Unit]) -> None:
    """Install executions; those of one module's several raw weights together."""
    shared: dict[int, dict[str, Any]] = {}
    for name, execution in executions.items():
        unit = units[name]
        if unit.kind not in ("functional", "attention"):
            install(unit.module, unit.kind, execution)
            continue
        together = shared.setdefault(id(unit.module), {})
        if not together:
            holder = AttentionExecutions if unit.kind == "attention" else RawWeightExecutions
            install(unit.module, unit.kind, holder(unit.module, together))
        together[unit.parameter] = execution


def _call_attention(root: nn.Module) -> None:
    """Let ``nn.MultiheadAttention`` call torch's attention where the root's mode sees it, and project as written."""
    for module in root.modules():
        if type(module) is nn.MultiheadAttention and not attention_refusal(module):
            install(module, "attention", AttentionExecutions(module, {}))


def _run_encoder_layers(root: nn.Module) -> None:
    """Let what runs under the policy inside a layer of torch's encoder be called in evaluation, too."""
    layers = [module for module in root.modules() if isinstance(module, nn.TransformerEncoderLayer)]
    for module in layers:
        if any(execution_of(part) is not None for part in module.modules()) and execution_of(module) is None:
            install(module, "functional", EncoderLayerExecutions(module))


def _fuse_gelus(root: nn.Module) -> None:
    """Let modules that compute GELU by hand call torch's kernel."""
    for module, form in gelus_by_hand(root).values():
        install(module, "functional", FusedGelu(module, form))


def _know_layouts(root: nn.Module, executions: dict[str, Any], units: dict[str, Unit]) -> None:
    """Prepare layers that tensor parallelism has sharded for being compiled; FSDP2 would show their forwards others."""
    for name, made in () if is_sharded(root) else executions.items():
        if isinstance(made, LinearExecution) and units[name].kind == "linear" and is_dtensor(units[name].weight):
            with contextlib.suppress(UnsupportedError):  # raised again where the layer runs
                made.know_layout(units[name].weight)


def _kept(unit: Unit, plan: LayerPlan) -> Any:
    found = unit_execution(unit)
    return found if found is not None and found.plan == plan else None


def take_off(root: nn.Module) -> None:
    """Give every module of the innermost model its own class back, parts that a policy of their own was on as well."""
    for module in list(root.modules()):
        restore_execution(module)
        uninstall(module, root=True)
        uninstall(module)


def _device_of(model: nn.Module) -> str:
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            return str(parameter.device)
    return "cuda" if torch.cuda.is_available() else "cpu"
