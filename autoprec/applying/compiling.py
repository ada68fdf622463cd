"""``execution``: ``torch.compile`` around a model, or none at all, whatever the script wrote.

FP8 casts are separate kernels until a compiler fuses them with what comes before, so whether a script is compiled
decides whether its policy pays; a search may therefore try both.

``compile`` compiles the repeated blocks of a model by themselves: blocks of one kind share what was compiled for one of
them, so that a model of twelve blocks takes a tenth of the time, and what lies between and around them runs as the
script wrote it. Where the script compiles the model as a whole, its blocks are compiled instead, in the script's own
way. ``compile_whole`` compiles the model as a whole, which is what a script that compiles does.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from autoprec.backends.casts import leave_to_torch, stance
from autoprec.policy import LayerPlan
from autoprec.support.living import living

Execution = Literal["keep", "compile", "compile_whole", "eager"]

#: So many kinds of blocks Dynamo compiles by default, each in two versions (training, evaluation).
_FEW_KINDS = 4
#: What holds repeated blocks.
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
#: What compiles a function in the way in which a script compiled its model.
_Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class _Done:
    """What :func:`set_execution` did.

    Attributes:
        how: ``blocks`` or ``whole`` (compiled here), ``script`` (the script compiles it itself), or ``eager``.
        graphs, limits, failures: :func:`compiled_graphs`, versions beyond the limit and failures until then.
        blocks: how many share what is compiled.
        wholes: what the script compiled as a whole and runs as eager code around its blocks, with what compiles it.
    """

    how: str
    graphs: int
    limits: int
    failures: int
    blocks: int = 0
    wholes: tuple[tuple[weakref.ref[nn.Module], _Compiler], ...] = ()


class _GivenUp(logging.Filter):
    """Counts what Dynamo gave up and ran as eager code, with a warning alone.

    That is a version of something beyond its limit, and, where a script suppresses errors, what a compiler failed on.

    Attributes:
        last: the function of which a version was last refused, with its file and line.
    """

    limits = failures = 0
    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if "hit config." in str(record.msg):
            self.limits += 1
            self.last = str(record.args[2]) if isinstance(record.args, tuple) and len(record.args) > 2 else "a function"
        self.failures += str(record.msg).startswith("WON'T CONVERT")
        return True


_GIVEN_UP = _GivenUp()
#: By model; none of it keeps a model alive.
_DONE: weakref.WeakKeyDictionary[nn.Module, _Done] = weakref.WeakKeyDictionary()
#: Models that a function calls which the script compiles.
_AROUND: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_compiled(root: nn.Module) -> bool:
    """Return True when the script itself compiles the model or a part of it.

    Looks at ``module.compile()``, at compiled submodules, forwards and classes, at ``torch.compile(model)`` held
    anywhere, and at what :func:`note_compiled` was told. What ``disable=True`` or ``torch.compiler.disable`` made runs
    as eager code.
    """
    if root in _AROUND:
        return True
    modules = [*root.modules(), *_around(root)]
    calls = ("_compiled_call_impl", "_call_impl", "forward")
    if any(_is_compiled(getattr(module, name, None)) for module in modules for name in calls):
        return True
    inside = {id(module) for module in modules}
    return any(not inside.isdisjoint(map(id, wrapper.modules())) for wrapper in _wrappers())


def note_compiled(root: nn.Module) -> None:
    """Note that a function which the script compiles calls the model, as a compiled loss or training step does."""
    _AROUND.add(root)


def _around(root: nn.Module) -> list[nn.Module]:
    """Return the DistributedDataParallel wrappers around a model: scripts compile them, too."""
    return [wrapper for wrapper in living(DistributedDataParallel) if any(part is root for part in wrapper.modules())]


def _is_compiled(call: Any) -> bool:
    """Say whether a function is one that ``torch.compile`` returned, and which compiles what it calls."""
    return hasattr(call, "_torchdynamo_orig_callable") and not getattr(call, "_torchdynamo_disable", False)


def _wrappers() -> Iterator[Any]:
    """Yield what ``torch.compile(model)`` returned, for any model that is alive."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    for wrapper in living(frames.OptimizedModule) if frames is not None else ():
        if wrapper.dynamo_ctx.callback:  # else it is there to keep a model from being compiled
            yield wrapper


def set_execution(root: nn.Module, wanted: Execution) -> None:
    """Compile ``root`` in place, or make what the script compiled run eagerly; ``keep`` changes nothing.

    ``eager`` holds for the whole process (``torch.compiler.set_stance``): a script may have compiled functions that
    belong to no module. What a script compiles itself, but for whole models, stays as it is.
    """
    if wanted == "keep":
        return
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_GIVEN_UP)
    before = (compiled_graphs(), _GIVEN_UP.limits, _GIVEN_UP.failures)
    if wanted == "eager":
        torch.compiler.set_stance("force_eager")
        _DONE[root] = _Done("eager", *before)
        return
    blocks = repeated_blocks(root) if wanted == "compile" else []
    if is_compiled(root):
        wholes = _taken_apart(root, blocks)
        if wholes:
            _DONE[root] = _Done("blocks", *before, len(blocks), tuple(wholes))
        else:
            _DONE[root] = _Done("script", 0, *before[1:])  # it may have compiled the model before
        return
    for module, call in _callers(blocks or [root]):
        module.__dict__["_compiled_call_impl"] = torch.compile(call)
    _allow_each(blocks)
    _DONE[root] = _Done("blocks" if blocks else "whole", *before, len(blocks))


def _taken_apart(root: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[weakref.ref[nn.Module], _Compiler]]:
    """Compile the blocks of a model that the script compiles as a whole; returns what was compiled before.

    What lies between and around the blocks, the loss included, then runs as eager code. Functions that the script
    compiles stay as they are.
    """
    ids = {id(block) for block in blocks}
    found = [
        (weakref.ref(whole), compiler)
        for whole, compiler in _compiled_wholes(root)
        if sum(id(module) in ids for module in whole.modules()) > 1  # else one of the blocks, or a part beside them
    ]
    if not found:
        return []
    _run_eagerly_around(found)
    for module, call in _callers(blocks):
        module.__dict__["_compiled_call_impl"] = found[0][1](call)
    _allow_each(blocks)
    return found


def _run_eagerly_around(wholes: Sequence[tuple[weakref.ref[nn.Module], _Compiler]]) -> None:
    living_ones: list[Any] = [ref() for ref, _ in wholes]
    for whole in living_ones:
        if whole is not None and hasattr(whole, "_orig_mod"):
            whole.__dict__["forward"] = whole._orig_mod.__call__
        elif whole is not None:
            whole.__dict__.pop("_compiled_call_impl", None)


def _compile_again(wholes: Sequence[tuple[weakref.ref[nn.Module], _Compiler]]) -> None:
    living_ones: list[tuple[Any, _Compiler]] = [(ref(), compiler) for ref, compiler in wholes]
    for whole, compiler in living_ones:
        if whole is not None and hasattr(whole, "_orig_mod"):
            whole.__dict__["forward"] = compiler(whole._orig_mod.__call__)
        elif whole is not None:
            whole.__dict__["_compiled_call_impl"] = compiler(whole._call_impl)


def _allow_each(blocks: Sequence[nn.Module]) -> None:
    """Let Dynamo compile each of some blocks by itself where they differ: past its limit it runs them as eager code."""
    if len(blocks) > _FEW_KINDS:
        _allow(2 * len(blocks))


def compiled_blocks(root: nn.Module) -> int:
    """Return how many blocks share what :func:`set_execution` compiled by block; 0 where it compiled none by itself."""
    done = execution_of(root)
    return done.blocks if done is not None else 0


def execution_of(root: nn.Module) -> _Done | None:
    """Return what :func:`set_execution` did to a model, for :func:`exchange_execution`."""
    return _DONE.get(root)


def exchange_execution(root: nn.Module, now: _Done | None) -> None:
    """Go from what is on a model to what was on it at another time; its modules' own attributes are the caller's."""
    was = _DONE.pop(root, None)
    if now is not None:
        _DONE[root] = now
    if was is not None and was.wholes:
        _compile_again(was.wholes)
    if now is not None and now.wholes:
        _run_eagerly_around(now.wholes)
    if "eager" in (was and was.how, now and now.how):
        torch.compiler.set_stance("force_eager" if now is not None and now.how == "eager" else "default")


def _compiled_wholes(root: nn.Module) -> Iterator[tuple[Any, _Compiler]]:
    """Yield what the script compiled of a model, and what compiles anything else in the same way.

    That is Dynamo's context, which ``torch.compile(model)`` keeps as an attribute of the model that it returns, and
    ``model.compile()`` in the closure of the function that it installs.
    """
    inside = {id(module) for module in root.modules()}
    for wrapper in _wrappers():
        if any(id(module) in inside for module in wrapper._orig_mod.modules()):
            yield wrapper, wrapper.dynamo_ctx
    for module in (*root.modules(), *_around(root)):
        call: Any = module.__dict__.get("_compiled_call_impl")
        names = call.__code__.co_freevars if isinstance(call, FunctionType) else ()
        if "self" in names:
            yield module, call.__closure__[names.index("self")].cell_contents


def only_in_graphs(mode: type[TorchFunctionMode]) -> type[TorchFunctionMode]:
    """Let Dynamo follow a mode's methods where a graph calls them, and compile none of them by itself.

    A break in a loop has Dynamo run all of a forward as eager code and compile what that calls, which is the mode's
    ``__torch_function__`` for each operator. What it makes of one function it then also runs for others of the same
    signature (torch 2.13: ``mean`` returned what ``square`` does), and after eight it gives up.
    """
    frames: Any = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    for method in vars(mode).values():
        if isinstance(method, FunctionType):
            frames.set_code_exec_strategy(method.__code__, strategy)
    return mode


def cache_graphs() -> None:
    """Let graphs with layers of ours into the cache that torch keeps on disk between processes (in this one, for good).

    AOTAutograd does not store graphs with an ``autograd.Function`` or an autocast context unless it is told to. Its key
    covers both: the graphs that Dynamo traced of the function's forward and backward, and the context's arguments.
    """
    functorch: Any = importlib.import_module("torch._functorch.config")
    inductor: Any = importlib.import_module("torch._inductor.config")
    functorch.autograd_cache_allow_custom_autograd_functions = True
    names = (f"torch.amp.autocast_mode.{name}" for name in ("_enter_autocast", "_exit_autocast"))
    inductor.unsafe_marked_cacheable_functions = {
        **inductor.unsafe_marked_cacheable_functions,
        **dict.fromkeys(names, "1"),
    }


def repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Return what is compiled by itself: the modules that a list of modules holds several of, by their class.

    A list may hold other modules beside them (a ``Sequential`` that is the whole model), and blocks of more than one
    class. Its own layers are not worth it, and neither is a list inside a block looked at.
    """
    return [block for kind in _kinds_of_blocks(root) for block in kind]


def most_alike(root: nn.Module) -> int:
    """Return how many blocks of a model can share what is compiled for one of them; at least 1."""
    return max(map(len, _kinds_of_blocks(root)), default=1)


def _kinds_of_blocks(root: nn.Module) -> list[list[nn.Module]]:
    """Return the repeated blocks by class and shapes of Parameters."""
    found: dict[Any, list[nn.Module]] = {}
    inside: set[int] = set()
    for module in root.modules():
        if id(module) in inside or not isinstance(module, _LISTS):
            continue
        children = list(module.children())
        classes = [_class_of(child) for child in children]
        several = Counter(classes)
        for child, cls in zip(children, classes, strict=True):
            if several[cls] > 1 and any(True for _ in child.children()):
                shapes = tuple(parameter.shape for parameter in child.parameters())
                found.setdefault((cls, shapes), []).append(child)
                inside.update(map(id, child.modules()))
    return list(found.values())


def _class_of(module: nn.Module) -> Any:
    """Return a module's class; of a list, which may hold anything, with the classes of what it holds."""
    children = module.children() if isinstance(module, _LISTS) else ()
    return type(module), *map(_class_of, children)


def _callers(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Yield modules with functions that call them, from a frame of ours; of one call all share code of their own.

    Dynamo does not start in a frame of torch, as ``Sequential.forward`` is; and what it compiled it keeps by code
    object, so that models which share one would share its cache, its recompile limit, and the audit's evidence.
    """

    def caller(module: nn.Module) -> FunctionType:
        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        return call  # type: ignore[return-value]

    code = caller(modules[0]).__code__.replace()
    for module in modules:
        call = caller(module)
        yield module, FunctionType(code, call.__globals__, "call", closure=call.__closure__)


def restore_execution(root: nn.Module) -> None:
    """Undo :func:`set_execution`; a no-op where it did nothing."""
    done = execution_of(root)
    if done is None:
        return
    if done.how in ("blocks", "whole"):
        for module in root.modules():
            module.__dict__.pop("_compiled_call_impl", None)
    exchange_execution(root, None)


def allow_versions(plans: Mapping[str, LayerPlan]) -> None:
    """Let Dynamo compile as many versions of a repeated block as a policy has different blocks (in this process).

    Blocks share code, and past ``recompile_limit`` versions of it (8) Dynamo runs the others without a word as eager
    code, which in FP8 is slower than bf16. Each kind of block may need what one block needed before.
    """
    blocks: dict[str, set[tuple[str, LayerPlan]]] = {}
    for name, plan in plans.items():
        block = re.match(r"(.*?\.\d+|\d+)(\.|$)", name)
        if block:
            blocks.setdefault(block[1], set()).add((name[block.end() :], plan))
    kinds = len({frozenset(layers) for layers in blocks.values()})
    if kinds > 1 and (kinds > _FEW_KINDS or "torch._dynamo" in sys.modules):  # its import takes a second
        _allow(8 * kinds)


def allow_contenders(count: int) -> None:
    """Let Dynamo keep the versions of so many policies that take turns on one model (in this process)."""
    config: Any = importlib.import_module("torch._dynamo.config")
    _allow(count * config.recompile_limit)


def _allow(versions: int) -> None:
    config: Any = importlib.import_module("torch._dynamo.config")
    for name, each in (("recompile_limit", versions), ("accumulated_recompile_limit", 32 * versions)):
        setattr(config, name, max(getattr(config, name), each))


def keep_random_streams() -> None:
    """Let compiled code draw the random numbers that eager code draws (in this process, for good).

    A compiled trial then sees the dropout masks of its uncompiled reference: without it their losses differ by
    chance alone. Dropout is no longer fused, so the time of a model with much dropout is a little pessimistic.
    """
    from torch._inductor import config

    config.fallback_random = True


def run_eagerly() -> None:
    """Compile nothing any more in this process, where anything was meant to be; costs nothing elsewhere.

    A scan applies hundreds of policies to one model: compiling each would take minutes for the same gradients.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
        leave_to_torch()


def executed_as(root: nn.Module, wanted: Execution) -> dict[str, Any]:
    """Return the audit row of ``execution``: requested, executed, ok, reason."""
    done, row = execution_of(root), {"requested": wanted, "executed": "keep"}
    if done is None:
        return row | {"ok": wanted == "keep", "reason": "the policy is not applied"}
    if wanted == "eager":
        return row | {"executed": "eager", "ok": True, "reason": ""}
    if _GIVEN_UP.failures > done.failures:
        reason = "a graph failed to compile, and torch._dynamo.config.suppress_errors let it run as eager code"
        return row | {"executed": "eager", "ok": False, "reason": reason}
    if _GIVEN_UP.limits > done.limits:
        reason = f"past torch._dynamo.config.recompile_limit versions of {_GIVEN_UP.last} it ran as eager code"
        return row | {"executed": "eager", "ok": False, "reason": reason}
    if compiled_graphs() > done.graphs:
        whole = "the model has no repeated blocks: it is compiled as a whole" if wanted == "compile" else ""
        reason = {"script": "the script compiles it itself", "whole": whole}.get(done.how, "")
        return row | {"executed": wanted, "ok": True, "reason": reason}
    return row | {"executed": "eager", "ok": False, "reason": f"torch.compile has compiled no graph: {_why_not()}"}


def _why_not() -> str:
    """Return why a process that called ``torch.compile`` has compiled nothing."""
    if "1" in (os.environ.get("TORCH_COMPILE_DISABLE"), os.environ.get("TORCHDYNAMO_DISABLE")):
        return "the environment turns it off (TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE)"
    if (now := stance()) != "default":
        return f"the script has called torch.compiler.set_stance('{now}')"
    return "is the model called by its name, model(x)?"


def compiled_graphs() -> int:
    """Return how many graphs Dynamo has handed to a compiler in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
