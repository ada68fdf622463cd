"""``execution``: ``torch.compile`` around a model, or none at all, whatever the script wrote.

FP8 casts are separate kernels until a compiler fuses them with what comes before, so whether a script is compiled
decides whether its policy pays; a search may therefore try both.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn

from autoprec.policy import LayerPlan
from autoprec.support.living import living

Execution = Literal["keep", "compile", "eager"]

#: So many kinds of blocks Dynamo compiles by default, each in two versions (training, evaluation).
_FEW_KINDS = 4
_by_block = False
#: Where it is kept what :func:`set_execution` did, in the ``__dict__`` of the root.
ATTRIBUTE = "_autoprec_execution"


def is_compiled(root: nn.Module) -> bool:
    """Return True when the script itself compiles the model or a part of it.

    Looks at ``module.compile()``, at compiled submodules, and at ``torch.compile(model)`` held anywhere.
    """
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in root.modules()):
        return True
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    wrapper = frames.OptimizedModule
    if any(isinstance(module, wrapper) for module in root.modules()):
        return True
    inside = {id(module) for module in root.modules()}
    return any(id(x.__dict__["_modules"].get("_orig_mod")) in inside for x in living(wrapper))


def set_execution(root: nn.Module, wanted: Execution) -> None:
    """Compile ``root`` in place, or make what the script compiled run eagerly; ``keep`` changes nothing.

    ``eager`` holds for the whole process (``torch.compiler.set_stance``): a script may have compiled functions that
    belong to no module.
    """
    if wanted == "keep":
        return
    root.__dict__[ATTRIBUTE] = (wanted, compiled_graphs())
    if wanted == "eager":
        torch.compiler.set_stance("force_eager")
    elif not is_compiled(root):
        blocks = _repeated_blocks(root) if _by_block else []
        for module, call in _callers(blocks or [root]):
            module.__dict__["_compiled_call_impl"] = torch.compile(call)
        root.__dict__[ATTRIBUTE] = ("compiled here", compiled_graphs())


def compile_by_block() -> None:
    """Compile repeated blocks instead of whole models (in this process, for good): for short trials.

    Blocks of one kind share what was compiled for one of them, so that a model of twelve blocks takes a tenth of the
    time; what lies between and around them runs as the script wrote it.
    """
    global _by_block
    _by_block = True


def compile_whole_by_block(root: nn.Module) -> int:
    """Compile the repeated blocks of a model that the script compiles as a whole, with the script's own settings.

    For short trials, where the script's own graph of N blocks takes N times as long to compile. What lies between and
    around the blocks, the loss included, then runs as eager code. Functions that the script compiles stay as they are.

    Returns:
        How many blocks share what is compiled; 0 where nothing was changed: there is no such model, or no such blocks.
    """
    blocks = _repeated_blocks(root)
    ids = {id(block) for block in blocks}
    settings = None
    for whole, context in _compiled_wholes(root):
        if sum(id(module) in ids for module in whole.modules()) < 2:
            continue  # one of the blocks, or a part beside them
        settings = settings or context
        if hasattr(whole, "_orig_mod"):
            whole.__dict__["forward"] = whole._orig_mod.__call__
        else:
            whole.__dict__.pop("_compiled_call_impl")
    if settings is None:
        return 0
    for module, call in _callers(blocks):
        module.__dict__["_compiled_call_impl"] = settings(call)
    return len(blocks)


def compiled_blocks(root: nn.Module) -> int:
    """Return how many blocks share what :func:`set_execution` compiled by block; 0 where it compiled the model."""
    done, _ = root.__dict__.get(ATTRIBUTE, ("keep", 0))
    return len(_repeated_blocks(root)) if _by_block and done == "compiled here" else 0


def _compiled_wholes(root: nn.Module) -> Iterator[tuple[Any, Callable[..., Any]]]:
    """Yield what the script compiled of a model, and what compiles anything else in the same way.

    That is Dynamo's context, which ``torch.compile(model)`` keeps as an attribute of the model that it returns, and
    ``model.compile()`` in the closure of the function that it installs.
    """
    inside = {id(module) for module in root.modules()}
    frames = sys.modules.get("torch._dynamo.eval_frame")
    for wrapper in living(frames.OptimizedModule) if frames is not None else ():
        if any(id(module) in inside for module in wrapper._orig_mod.modules()):
            yield wrapper, wrapper.dynamo_ctx
    for module in root.modules():
        call: Any = module.__dict__.get("_compiled_call_impl")
        names = call.__code__.co_freevars if isinstance(call, FunctionType) else ()
        if "self" in names:
            yield module, call.__closure__[names.index("self")].cell_contents


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


def _repeated_blocks(root: nn.Module) -> list[nn.Module]:
    """Return the children of the outermost lists of modules of one class; layers by themselves are not worth it."""
    found: dict[int, nn.Module] = {}
    inside: set[int] = set()
    for module in root.modules():
        children = list(module.children()) if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if id(module) in inside or not alike or not any(True for _ in children[0].children()):
            continue
        for child in children:
            found[id(child)] = child
            inside.update(map(id, child.modules()))
    return list(found.values())


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
    done, _ = root.__dict__.pop(ATTRIBUTE, ("keep", 0))
    if done == "eager":
        torch.compiler.set_stance("default")
    elif done == "compiled here":
        for module in root.modules():
            module.__dict__.pop("_compiled_call_impl", None)


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
        config: Any = importlib.import_module("torch._dynamo.config")
        for name, each in (("recompile_limit", 8), ("accumulated_recompile_limit", 256)):
            setattr(config, name, max(getattr(config, name), each * kinds))


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


def executed_as(root: nn.Module, wanted: Execution) -> dict[str, Any]:
    """Return the audit row of ``execution``: requested, executed, ok, reason."""
    done, before = root.__dict__.get(ATTRIBUTE, ("keep", 0))
    if done == "keep":
        return {"requested": wanted, "executed": "keep", "ok": wanted == "keep", "reason": "the policy is not applied"}
    if wanted == "eager":
        return {"requested": wanted, "executed": "eager", "ok": True, "reason": ""}
    if compiled_graphs() > before:
        reason = "" if done == "compiled here" else "the script compiles it itself"
        return {"requested": wanted, "executed": "compile", "ok": True, "reason": reason}
    reason = "torch.compile has compiled no graph: is the model called by its name, model(x)?"
    return {"requested": wanted, "executed": "eager", "ok": False, "reason": reason}


def compiled_graphs() -> int:
    """Return how many graphs Dynamo has handed to a compiler in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0
