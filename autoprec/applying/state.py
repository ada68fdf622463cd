"""What a policy remembers while training, taken along in checkpoints.

A step under a policy may depend on earlier ones: delayed scales on amax histories, stochastic rounding on a random
stream, dynamic loss scaling on its scale. Resumed without them a run goes on, but not as it would have. So they travel
in the optimizer's ``state_dict``, as an entry of its first parameter group: scripts, trainers and
``torch.distributed.checkpoint`` save those already, and a plain optimizer that loads one keeps the entry unread.
The entries and their shapes depend on the policy alone: a distributed checkpoint loads into what is there before it.
"""

from __future__ import annotations

import copy
import copyreg
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applying.around.loading import load_execution, place_of
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.swap import ROOTS, root_of
from autoprec.applying.units import tunable_units, unwrap
from autoprec.errors import AutoPrecWarning
from autoprec.numerics.rounding import SIXTEEN_BIT
from autoprec.optim.checkpoint import ENTRY, hook_checkpoints, parameters_of
from autoprec.optim.holders import models_holding
from autoprec.optim.optimizer import (
    load_counters,
    loss_scaler_of,
    optimizer_counters,
    runtime_of,
    stored_codes,
    wrap_optimizer,
)

_CARRIER = "_autoprec_carrier"
_PHASES = "autoprec.phases."


#: Models that a policy is on, each with what counts its steps (:class:`autoprec.applying.phases.Phases`) or None.
ON: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what the policy on a model remembers between steps, by ``layer.gemm.operand.part``.

    Delayed scaling: ``history`` float32 ``[amax_history_len]``, ``scale`` and ``seen`` float32; stochastic rounding:
    ``random``, the state of the layer's generator (uint8). Transformer Engine: ``scale`` and ``history`` of both
    directions. A policy with phases: the steps of the run so far.
    """
    found: dict[str, Tensor] = {}
    for name, unit in tunable_units(model).items():
        run = unit_execution(unit)
        if run is not None:
            found |= {f"{name}.{part}": value for part, value in run.state(place_of(unit.weight)).items()}
    counted = ON.get(unwrap(model))
    return found if counted is None else found | {_PHASES + part: value for part, value in counted.state().items()}


def load_model_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Continue from :func:`model_state`; what the state does not name begins anew, with a warning.

    Args:
        model: that a policy was applied to.
        state: tensors by name, of the shapes that :func:`model_state` returned.
    """
    counted = ON.get(unwrap(model))
    if counted is not None:  # first: what runs the layers depends on how far the run is
        counted.load_state(_under(_PHASES, state))
    missing = []
    for name, unit in tunable_units(model).items():
        run = unit_execution(unit)
        wanted = {} if run is None else run.state(place_of(unit.weight))
        held = {part: state[f"{name}.{part}"] for part in wanted if f"{name}.{part}" in state}
        if wanted:
            load_execution(unit.module, unit.parameter, run, held, place_of(unit.weight))
        missing += [name] if held.keys() != wanted.keys() else []
    if missing:
        warnings.warn(
            f"the checkpoint holds no delayed scales or random streams for {len(missing)} layers ({missing[0]}, ...): "
            "they begin anew, and losses differ a little from those of a run that was not interrupted",
            AutoPrecWarning,
            stacklevel=2,
        )


def models_of(optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """Return the models with a policy on them that an optimizer trains, in the order of its parameters.

    Copies of such models have the policy as well.
    """
    order = {id(p): index for index, p in reversed(list(enumerate(parameters_of(optimizer))))}
    first: dict[nn.Module, int] = {}
    for model in {*ON, *(root for root in ROOTS if root_of(root) is not None)}:
        held = [order[id(p)] for p in model.parameters() if id(p) in order]
        if held:
            first[model] = min(held)
    inside = {id(part) for model in first for part in model.modules() if part is not model}
    return sorted((model for model in first if id(model) not in inside), key=first.__getitem__)


def _state(optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> dict[str, Tensor]:
    found = {f"optimizer.{name}": value for name, value in optimizer_counters(optimizer).items()}
    found |= stored_codes(optimizer)
    for index, model in enumerate(models):
        found |= {_prefix(index) + name: value for name, value in model_state(model).items()}
    return found


def _prefix(index: int) -> str:
    """Return what the entries of the first, second, ... model of an optimizer begin with."""
    return f"model{index + 1}." if index else "model."


def _under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}


class _Carrier:
    """The hooks by which an optimizer's checkpoints carry what policies remember.

    Models are looked up when something is saved or loaded, and for the steps between from the first step on: when an
    optimizer is wrapped, a policy may not be applied yet.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module | None, asks: bool) -> None:
        self.given: Callable[[], nn.Module | None] = (lambda: None) if model is None else weakref.ref(unwrap(model))
        self.tells = asks and model is None
        self._trained: list[tuple[weakref.ref[nn.Module], str, int]] = []
        self._stepped: list[weakref.ref[nn.Module]] | None = None
        hook_checkpoints(optimizer)  # before the hooks here
        self._handles = [
            optimizer.register_load_state_dict_pre_hook(self._begin_phase, prepend=True),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_post_hook(self.load),
            optimizer.register_step_post_hook(self._settle),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def models(self, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
        """Return the models that are there now, and tell once of those that no policy is on."""
        found, given = models_of(optimizer), self.given()
        if given is not None and all(given is not part for model in found for part in model.modules()):
            found.append(given)
        self._stepped = [weakref.ref(model) for model in found]
        if self.tells:
            self.tells = False
            if names := without_policy(optimizer):
                warnings.warn(
                    f"the wrapped optimizer also trains {' and '.join(names)}, which no policy is on: its layers run "
                    "as the script wrote them, and checkpoints hold nothing of them; policy.apply(model), or name "
                    "the model that is meant: policy.wrap_optimizer(optimizer, model)",
                    AutoPrecWarning,
                    stacklevel=3,
                )
        return found

    def _save(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> dict[str, Any]:
        """Post-hook of ``state_dict``."""
        state, groups = _state(optimizer, self.models(optimizer)), document["param_groups"]
        if state and groups:
            document = {**document, "param_groups": [{**groups[0], ENTRY: state}, *groups[1:]]}
        return document

    def reserve(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an empty entry in the live parameter group, where a checkpoint has one, and know what is trained.

        Flattened checkpoints (``flatten_optimizer_state_dict``) are read by the names that a live group has.
        """
        found = models_of(optimizer)
        own = {id(p) for p in parameters_of(optimizer)}
        every = (module for model in found for module in model.modules())
        held = [(weakref.ref(one), name, id(p)) for one in every for name, p in one._parameters.items() if id(p) in own]
        self._trained = held or self._trained
        if optimizer.param_groups and _state(optimizer, found):
            optimizer.param_groups[0].setdefault(ENTRY, {})

    def _begin_phase(self, optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> None:
        """Pre-hook of ``load_state_dict``: state is read in the formats of the phase that it was saved in."""
        _tell_of_narrow_state(optimizer, document)
        before = runtime_of(optimizer)
        rounds = before is not None and bool(before.weights.real)
        begin_phases(self.models(optimizer), document["param_groups"])
        after = runtime_of(optimizer)
        if before is not None and rounds and (after is None or after.choice.weights != before.choice.weights):
            warnings.warn(
                "the checkpoint is of another phase of the policy: weights that were loaded before the optimizer were "
                f"rounded to {before.choice.weights}, as the phase until now stores them; load the optimizer first, "
                "or policy.apply(model, step=...) with the steps that were taken",
                AutoPrecWarning,
                stacklevel=3,
            )

    def load(self, optimizer: torch.optim.Optimizer) -> None:
        """Post-hook of ``load_state_dict``: what was loaded lies in the live parameter groups."""
        held: dict[str, Tensor] = {}
        for group in optimizer.param_groups:
            held |= group.pop(ENTRY, {})
        self.reserve(optimizer)
        counters = _under("optimizer.", held)
        if missing := [name for name in optimizer_counters(optimizer) if name not in counters]:
            warnings.warn(
                f"the checkpoint does not hold what the policy remembers of the optimizer ({', '.join(missing)}): "
                "it begins anew, and losses differ a little from those of a run that was not interrupted",
                AutoPrecWarning,
                stacklevel=2,
            )
        load_counters(optimizer, counters)
        for index, model in enumerate(self.models(optimizer)):
            load_model_state(model, _under(_prefix(index), held))

    def _settle(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        """Post-hook of ``step``: what a backend updates then, and whether what was updated is still the model's."""
        if self._stepped is None:
            self.models(optimizer)
        self._tell_of_others(optimizer)
        for ref in self._stepped or ():
            model = ref()
            root = None if model is None else root_of(model)
            if root is not None and root.after_step is not None:
                root.after_step()

    def _tell_of_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, once, where a module holds another Parameter than the one that was trained there."""
        for ref, name, number in self._trained:
            module = ref()
            now = None if module is None else module._parameters.get(name)
            if now is None or id(now) == number or not now.requires_grad:
                continue
            self._trained = []
            if all(now is not p for p in parameters_of(optimizer)):
                warnings.warn(
                    f"the optimizer trains a Parameter that is not the {name} of its {type(module).__name__} any more, "
                    "as load_state_dict(..., assign=True) gives it another: the model reads nothing of what is "
                    "learned; make and wrap the optimizer afterwards",
                    AutoPrecWarning,
                    stacklevel=4,
                )
            return


def _tell_of_narrow_state(optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> None:
    """Warn where a checkpoint has 16 bits of what this run keeps in FP32, which torch widens without a word."""
    numbers = chain.from_iterable(group["params"] for group in document["param_groups"])
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):  # torch refuses another length
        held = document["state"].get(number)
        for name, value in held.items() if isinstance(held, dict) else ():
            if parameter.dtype is torch.float32 and isinstance(value, Tensor) and value.dtype in SIXTEEN_BIT:
                kept = str(value.dtype).removeprefix("torch.")
                warnings.warn(
                    f"the checkpoint has {name} in {kept}, and the weights of this run are in float32: it was saved by "
                    "a run in another dtype, and goes on from what 16 bits held of it",
                    AutoPrecWarning,
                    stacklevel=4,
                )
                return


def begin_phases(models: list[nn.Module], groups: list[dict[str, Any]]) -> None:
    """Let policies with phases go on in those that a checkpoint was written in, before it is read.

    Args:
        models: of an optimizer, in the order of its parameters.
        groups: its parameter groups in the checkpoint.
    """
    held: dict[str, Tensor] = {}
    for group in groups:
        held |= group.get(ENTRY, {})
    for index, model in enumerate(models):
        if (counted := ON.get(unwrap(model))) is not None:
            counted.load_state(_under(_prefix(index) + _PHASES, held))


def without_policy(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the classes of living models whose layers an optimizer trains and that no policy is on, nor on a part."""
    found = models_of(optimizer)
    known = {id(p) for model in found for p in model.parameters()}
    rest = [p for p in parameters_of(optimizer) if p.dim() >= 2 and id(p) not in known]
    if not rest:
        return []
    policed = {id(model) for model in found}
    tops = [top for top in models_holding(rest) if not any(id(part) in policed for part in top.modules())]
    return [type(unwrap(top)).__name__ for top in tops if tunable_units(top)]


def carry_state(optimizer: torch.optim.Optimizer, model: nn.Module | None = None, *, asks: bool = False) -> None:
    """Let an optimizer's checkpoints carry what the policy on it and on the models that it trains remembers.

    A checkpoint that was loaded before the policy was applied is read once the policy is there.

    Args:
        model: one that counts whether it is found or not.
        asks: tell of models that the optimizer trains and no policy is on, unless ``model`` is given.
    """
    before = optimizer.__dict__.pop(_CARRIER, None)
    if before is not None:
        before.remove()
        asks, model = asks or before.tells, before.given() if model is None else model
    made = optimizer.__dict__[_CARRIER] = _Carrier(optimizer, model, asks)
    optimizer.__dict__["__deepcopy__"] = partial(_copied, optimizer)
    optimizer.__dict__["__reduce_ex__"] = partial(_pickled, optimizer)
    waits = any(group.get(ENTRY) for group in optimizer.param_groups)
    if waits and (models_of(optimizer) or model is not None):
        made.load(optimizer)
    made.reserve(optimizer)


def _copied(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """Return a deep copy that is wrapped as the optimizer is: torch's own would be a plain one, without a word."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    made.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
    if (runtime := runtime_of(optimizer)) is not None:
        wrap_optimizer(made, runtime.choice)
        copied = runtime_of(made)
        for key, values in runtime.weights.exact_values().items():
            if copied is not None and key in memo:
                copied.weights.restore(memo[key], values)
        load_counters(made, optimizer_counters(optimizer))
    if loss_scaler_of(optimizer) is not None or any(ON.get(unwrap(model)) for model in models_of(optimizer)):
        warnings.warn(
            "a copy of a wrapped optimizer stores what it stores, but scales no loss and follows no phases: "
            "policy.apply(copied_model), then policy.wrap_optimizer(copied_optimizer, copied_model)",
            AutoPrecWarning,
            stacklevel=3,
        )
    carry_state(made)
    return made


def _pickled(optimizer: torch.optim.Optimizer, _protocol: Any) -> tuple[Any, ...]:
    """Pickle as a plain optimizer that has loaded the checkpoint of this one, which wrapping it again reads."""
    warnings.warn(
        "an optimizer that a policy has wrapped is pickled as a plain one: call policy.wrap_optimizer(optimizer) again "
        "where it is loaded, or save optimizer.state_dict()",
        AutoPrecWarning,
        stacklevel=3,
    )
    document, parameters = optimizer.state_dict(), list(parameters_of(optimizer))
    state = defaultdict(dict, {parameters[number]: held for number, held in document["state"].items()})
    groups = zip(document["param_groups"], optimizer.param_groups, strict=True)
    own = {
        **optimizer.__getstate__(),
        "state": state,
        "param_groups": [{**g, "params": o["params"]} for g, o in groups],
    }
    return copyreg.__newobj__, (type(optimizer),), own  # type: ignore[attr-defined]
