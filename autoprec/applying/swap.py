"""Put an execution into a live module, and take it out, by changing the module's class.

Nothing else of the module changes: Parameters, buffers, hooks, attributes, names, ``state_dict`` keys stay, and
``isinstance`` still holds because the new class derives from the old one. The execution lives in the module's
``__dict__``, where neither ``state_dict`` nor ``parameters()`` looks.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.applying.around.loading import ATTRIBUTE, weights_were_loaded
from autoprec.applying.around.operators import refuse_export
from autoprec.backends import Execution

ROOT = "_autoprec_root"
#: Models whose forward is surrounded, copies of such among them.
ROOTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()
#: What ``module.compile()`` made; torch leaves it out of copies and pickles too.
_COMPILED = "_compiled_call_impl"
_NOT_PICKLED = (
    "a model under a precision policy is pickled without its policy; "
    "call policy.apply(model) again where it is loaded, or save model.state_dict(), which "
    "torch.load(weights_only=True) reads (of the pickle, with copyreg._reconstructor and object among the safe globals)"
)
#: Which activation an ``nn.TransformerEncoderLayer`` has, 0 for none of those that its kernel of evaluation knows.
_MAY_BE_ONE_KERNEL = "activation_relu_or_gelu"
#: (id of a class, kind) -> the class made from it. Not held: it lives while a module has it, and holds its base.
_CLASSES: weakref.WeakValueDictionary[tuple[int, str], type[nn.Module]] = weakref.WeakValueDictionary()
#: id -> module whose pickle was warned of: one warning for a model, not one for each of its layers.
_WARNED: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def execution_of(module: nn.Module) -> Any:
    """Return what is installed in a module (an execution), or None."""
    return module.__dict__.get(ATTRIBUTE)


def swapped_base(module: nn.Module) -> type[nn.Module]:
    """Return the class a module had before anything was installed; its own class if nothing is."""
    cls: type[nn.Module] = type(module)
    cls = cls.__dict__.get("_autoprec_root_base", cls)
    base: type[nn.Module] = cls.__dict__.get("_autoprec_base", cls)
    return base


def _linear_forward(self: Any, input: Tensor) -> Tensor:
    run: Execution | None = self.__dict__.get(ATTRIBUTE)
    if run is None:
        return F.linear(input, self.weight, self.bias)
    return run(input, self.weight, self.bias, training=self.training)


def _conv1d_forward(self: Any, x: Tensor) -> Tensor:
    """``transformers.pytorch_utils.Conv1D``: a linear layer whose weight is stored as [in, out]."""
    run: Execution | None = self.__dict__.get(ATTRIBUTE)
    if run is None:
        return swapped_base(self).forward(self, x)  # type: ignore[no-any-return]
    return run(x, self.weight.t(), self.bias, training=self.training)


def _convolution_forward(self: Any, input: Tensor, *size: Any, **named: Any) -> Tensor:
    """A transposed convolution takes an ``output_size`` beside its input."""
    run: Any = self.__dict__.get(ATTRIBUTE)
    if run is None:
        return swapped_base(self).forward(self, input, *size, **named)  # type: ignore[no-any-return]
    size = size or tuple(named.values())
    return run(input, self.weight, self.bias, training=self.training, size=size)  # type: ignore[no-any-return]


def _functional_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    run = self.__dict__.get(ATTRIBUTE)
    own = functools.partial(swapped_base(self).forward, self)
    return own(*args, **kwargs) if run is None else run.run(own, args, kwargs)


def _attention_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    run = self.__dict__.get(ATTRIBUTE)
    if run is None:
        return swapped_base(self).forward(self, *args, **kwargs)
    return run.forward(*args, **kwargs)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "linear": _linear_forward,
    "conv1d": _conv1d_forward,
    "conv": _convolution_forward,
    "functional": _functional_forward,
    "recurrent": _functional_forward,
    "attention": _attention_forward,
}


def _extra_repr(self: Any) -> str:
    base = swapped_base(self)
    text = str(base.extra_repr(self))
    run = self.__dict__.get(ATTRIBUTE)
    plan = "" if run is None else run.describe()
    return ", ".join(part for part in (text, f"precision=({plan})" if plan else "") if part)


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Copy with the policy in place, so that an EMA or evaluation copy computes what the original computes."""
    new = object.__new__(type(self))
    memo[id(self)] = new
    for key, value in self.__dict__.items():
        if key != _COMPILED:
            new.__dict__[key] = copy.deepcopy(value, memo)
    if ROOT in new.__dict__:
        ROOTS.add(new)
    if "_autoprec_recompiles" in type(self).__dict__:
        _give_a_class(new)
    return new


def _give_a_class(copied: Any) -> None:
    """Write the code of a copied ``torch.fx.GraphModule`` to a class of its own: that of the original is another's."""
    kinds, base = [], type(copied)
    while (kind := base.__dict__.get("_autoprec_kind")) is not None:
        kinds.append(kind)
        base = base.__dict__["_autoprec_root_base" if kind == "root" else "_autoprec_base"]
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    copied.__class__ = type(base.__name__, base.__bases__, names)
    copied.recompile()
    for kind in reversed(kinds):
        copied.__class__ = _class_for(type(copied), kind)


def _recompiling(base: Any) -> Callable[[Any], Any]:
    def recompile(self: Any) -> Any:
        """Write the code where ``torch.fx`` has it: torchvision's extractors do in every ``train()`` and ``eval()``."""
        swapped, self.__class__ = type(self), base
        try:
            return base.recompile(self)
        finally:
            self.__class__ = swapped

    return recompile


def _reduce(self: Any, _protocol: int) -> tuple[Any, ...]:
    """Pickle as a module of the original class: a policy is applied anew where the pickle is loaded.

    So a checkpoint needs no AutoPrec to be loaded; that the policy is not in it is said rather than found out. This
    process reads it with ``weights_only=True`` as it would the pickle of the plain model: both names that are made safe
    here only make objects of classes that are safe as well.
    """
    base = swapped_base(self)
    if (ATTRIBUTE in self.__dict__ or ROOT in self.__dict__) and _WARNED.get(id(self)) is not self:
        _WARNED.update({id(module): module for module in self.modules()})
        warnings.warn(_NOT_PICKLED, stacklevel=2)
    torch.serialization.add_safe_globals([copyreg._reconstructor, object])  # type: ignore[attr-defined]
    state = base.__getstate__(self)  # type: ignore[no-untyped-call]
    if isinstance(state, dict):  # what a class's own __getstate__ makes instead is its business
        state = {key: value for key, value in state.items() if key not in (ATTRIBUTE, ROOT, _COMPILED)}
        if isinstance(instance := state.get("forward"), _InstanceForward):
            state["forward"] = instance.original
    return (copyreg._reconstructor, (base, object, None), state)  # type: ignore[attr-defined]


def _prepare_scriptable(_self: Any) -> NoReturn:
    """What ``torch.jit.script`` calls first."""
    refuse_export()


def _root_forward(base: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = self.__dict__.get(ROOT)
        if root is None:
            return base.forward(self, *args, **kwargs)
        return root.run(functools.partial(base.forward, self), args, kwargs)

    return forward


def _loading(base: type[nn.Module], *, whole: bool) -> Callable[..., None]:
    def _load_from_state_dict(self: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        base._load_from_state_dict(self, state_dict, prefix, *rest)
        if any(key.startswith(prefix) for key in state_dict):
            weights_were_loaded(self, whole=whole)

    return _load_from_state_dict


def _class_for(base: type[nn.Module], kind: str) -> type[nn.Module]:
    found = _CLASSES.get((id(base), kind))
    if found is None:
        own = {"forward": _root_forward(base), "_autoprec_root_base": base}
        above: tuple[type, ...] = (base,)
        if kind != "root":
            own = {"forward": _FORWARDS[kind], "_autoprec_base": base, "extra_repr": _extra_repr}
            if issubclass(base, nn.TransformerEncoderLayer):
                own[_MAY_BE_ONE_KERNEL] = property(lambda _self: 0)
            if parametrized := _parametrized(base):
                own, above = parametrized | own, base.__bases__
        if base.__dict__.keys() & {"_wrapped_call", "_autoprec_recompiles"}:  # a class of one torch.fx.GraphModule
            own["_autoprec_recompiles"] = True
            own["recompile"] = _recompiling(base)
        namespace = {
            **own,
            "_autoprec_kind": kind,
            "_load_from_state_dict": _loading(base, whole=kind == "root"),
            "__deepcopy__": _deepcopy,
            "__reduce_ex__": _reduce,
            "__prepare_scriptable__": _prepare_scriptable,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
        }
        found = _CLASSES[id(base), kind] = type(base.__name__, above, namespace)
    return found


def _parametrized(base: type[nn.Module]) -> dict[str, Any]:
    """Return the properties of a class that ``register_parametrization`` made, and of no other.

    ``remove_parametrizations`` deletes them from a module's class, and takes what is above that class in its place.
    """
    if not base.__name__.startswith("Parametrized") or len(base.__bases__) != 1:
        return {}
    return {name: value for name, value in base.__dict__.items() if isinstance(value, property)}


def install(module: nn.Module, kind: str, execution: Any) -> None:
    """Make ``module`` run through ``execution``; ``kind`` is that of ``units.Unit``, or ``root``.

    Args:
        module: is changed in place.
        kind: that of ``units.Unit``, or ``root``.
        execution: what runs it from now on.
    """
    module.__dict__[ROOT if kind == "root" else ATTRIBUTE] = execution
    if kind == "root":
        ROOTS.add(module)
    instance = module.__dict__.get("forward")
    if instance is not None and kind in ("functional", "root"):
        module.__dict__["forward"] = _InstanceForward(instance, execution)  # hides that of the class
        if kind == "root":
            execution.replaced = True
    if ("_autoprec_root_base" if kind == "root" else "_autoprec_base") not in type(module).__dict__:
        module.__class__ = _class_for(type(module), kind)


def uninstall(module: nn.Module, *, root: bool = False) -> None:
    """Give a module (``root``: the model's own forward) its class and behaviour back, where anything is installed."""
    module.__dict__.pop(ROOT if root else ATTRIBUTE, None)
    instance = module.__dict__.get("forward")
    if isinstance(instance, _InstanceForward):
        module.__dict__["forward"] = instance.original
    base = type(module).__dict__.get("_autoprec_root_base" if root else "_autoprec_base")
    if base is not None:
        module.__class__ = base


def root_of(model: nn.Module) -> Any:
    """Return the root execution installed around a model's forward, or None."""
    return model.__dict__.get(ROOT)


class _InstanceForward:
    """Stands for a ``forward`` that a library stored on the instance (accelerate does); keeps what it replaced."""

    def __init__(self, original: Callable[..., Any], execution: Any) -> None:
        self.original, self.execution = original, execution
        self.__wrapped__ = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.execution.run(self.original, args, kwargs)
