"""One training step of a model that is a ``config.json``: transformers builds it without weights, and it is recorded.

Transformers says what a configuration means; no table of families is kept here. Blocks that are alike are
run once (:mod:`autoprec.graph.repeated`), so that a model of 60 layers takes no longer than one of its kinds of layers.
Shapes flow and no data does, so a model of any size fits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoprec.errors import FileError, MissingDependencyError, UsageError
from autoprec.support.files import read_document
from autoprec.support.optional import require

if TYPE_CHECKING:
    from torch import nn

    from autoprec.graph.repeated import Blocks
    from autoprec.graph.report import GraphReport

#: Keys of a ``config.json`` that say where its weights or its code are, not what it is.
_NOT_SIZES = ("auto_map", "quantization_config", "torch_dtype", "dtype", "model_type", "use_cache", "architectures")
_FLOAT = "__float__"
_FIX = "record a step of the script itself: autoprec estimate train.py"
#: Builds a model without values for its Parameters.
_OLDEST = 5
#: Fewer blocks in a list are run one by one; and so are all where products are kept one by one.
_FEWEST_BLOCKS = 3
#: Each block becomes an object per operator here, whatever it costs to record it; no model has a tenth of these.
MOST_LAYERS = 10_000


def config_report(path: Path | str, *, batch: int, seq: int, recompute: str = "") -> GraphReport:
    """Return the step of a language model in bf16 on ``batch`` sequences of ``seq`` tokens.

    Args:
        path: a ``config.json`` as Hugging Face writes it.
        batch, seq: of one device and step.
        recompute: activation checkpointing of every block: "" none, "full" (its forward runs twice), or "selective"
            (every second product does, as torchtitan's per-operator checkpointing).

    Raises:
        FileError: missing, malformed, or transformers builds no language model of it; with its reason.
        UsageError: the family does not checkpoint.
        MissingDependencyError: transformers is not installed, or too old.
    """
    document = read_document(path, may_be_infinite=True)  # as a time step's limit is
    family = str(document.get("model_type") or "")
    if not family:
        raise FileError("has no model_type", where=str(path), fix="is this the config.json of a model?")
    layers = document.get("num_hidden_layers") or document.get("n_layer")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise FileError(f"num_hidden_layers is {layers:,}", where=str(path), fix=f"the most here is {MOST_LAYERS:,}")
    transformers = require("transformers", purpose="building a model from its configuration")
    if int(transformers.__version__.partition(".")[0]) < _OLDEST:
        what = f"transformers {transformers.__version__} is too old for building a model from its configuration"
        raise MissingDependencyError(f"{what}: {_OLDEST}.0 or newer is needed", fix="pip install -U transformers")
    with _quiet(transformers):
        config = _config(transformers, family, document, path)
        make = functools.partial(_model, transformers, config, family, path, recompute)
        report, parameters = _recorded(make, family, path, batch, seq, alike=recompute != "selective")
    memory = {**report.memory, "parameters": 4 * parameters, "gradients": 4 * parameters, "optimizer": 8 * parameters}
    notes = (*report.notes, "from the configuration: recorded without weights or data")
    return replace(report, model={**report.model, "parameters": parameters}, memory=memory, notes=notes)


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep what transformers logs about kernels and defaults off the terminal."""
    import warnings

    log = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(before)


def _config(transformers: Any, family: str, document: Mapping[str, Any], path: Path | str) -> Any:
    """Return transformers' configuration, in bf16.

    Raises:
        FileError: it does not know the family, or refuses a size.
    """
    import torch

    known = transformers.CONFIG_MAPPING
    if family not in known:
        raise FileError(
            f"is of the family '{family}', which transformers {transformers.__version__} does not build",
            where=str(path),
            fix=_FIX,
        )
    sizes = {name: _with_floats(entry) for name, entry in document.items() if name not in _NOT_SIZES}
    try:
        config = transformers.AutoConfig.for_model(family, **sizes, dtype=torch.bfloat16)
    except Exception as error:  # each family checks its sizes in its own way
        raise FileError(f"is not one that transformers builds: {_first(error)}", where=str(path), fix=_FIX) from error
    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in causal or getattr(config, "is_encoder_decoder", False):
        named = ", ".join(map(str, document.get("architectures") or ())) or f"'{family}'"
        raise FileError(f"is the configuration of {named}, not of a decoder", where=str(path), fix=_FIX)
    return config


def _with_floats(value: Any) -> Any:
    """Return an entry with the numbers that transformers writes as ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        return (
            float(value[_FLOAT]) if [*value] == [_FLOAT] else {name: _with_floats(one) for name, one in value.items()}
        )
    return [_with_floats(one) for one in value] if isinstance(value, list) else value


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _model(transformers: Any, config: Any, family: str, path: Path | str, recompute: str) -> nn.Module:
    """Build the model, without values for its Parameters.

    Raises:
        FileError: transformers cannot.
        UsageError: it does not checkpoint.
    """
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights():
            model: Any = transformers.AutoModelForCausalLM.from_config(config).train()
        model.tie_weights()  # which is left out with the values
    except Exception as error:
        what = f"is of the family '{family}', and transformers cannot build it: {_first(error)}"
        raise FileError(what, where=str(path), fix="are sizes missing? " + _FIX) from error
    if recompute:
        if not model.supports_gradient_checkpointing:
            what = f"transformers' {type(model).__name__} does not checkpoint"
            raise UsageError(what, where=str(path), fix="leave --recompute out")
        how: dict[str, Any] = {"use_reentrant": False}
        if recompute == "selective":
            how["context_fn"] = _every_second_product
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    return model  # type: ignore[no-any-return]


def _every_second_product() -> Any:
    """Return torch's contexts that keep attention and every second product of a block, as torchtitan does."""
    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    counts = {False: 0, True: 0}
    aten = torch.ops.aten

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        if op in (aten.mm.default, aten.addmm.default):
            counts[context.is_recompute] += 1
            return CheckpointPolicy.MUST_SAVE if counts[context.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        saved = "scaled_dot_product" in op.name()
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def _recorded(
    make: Callable[[], nn.Module], family: str, path: Path | str, batch: int, seq: int, *, alike: bool
) -> tuple[GraphReport, int]:
    """Return the recorded step and the number of parameters; all blocks are run where that of one kind is not enough.

    Raises:
        FileError: the model cannot be built, or runs no training step on shapes alone.
    """
    try:
        return _record(make, batch, seq, alike=alike)
    except (FileError, UsageError):
        raise
    except Exception:  # a block that needs what another one left: then each runs itself
        try:
            return _record(make, batch, seq, alike=False)
        except Exception as error:
            what = f"is of the family '{family}', which runs no training step on shapes alone: {type(error).__name__}"
            raise FileError(f"{what}: {_first(error)}", where=str(path), fix=_FIX) from error


def _record(make: Callable[[], nn.Module], batch: int, seq: int, *, alike: bool) -> tuple[GraphReport, int]:
    import torch

    from autoprec.graph.fake import record_fake
    from autoprec.graph.repeated import repeat

    found: list[Any] = []

    def build() -> nn.Module:
        model = make()
        found.append(sum(parameter.numel() for parameter in model.parameters()))
        blocks = repeated_blocks(model) if alike else None
        found.append(blocks)
        if blocks is not None:
            run_once(model, blocks)
        return model

    def step(model: Any) -> None:
        ids = torch.zeros((batch, seq), dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    report = record_fake(build, step)
    parameters, blocks = found
    return (report if blocks is None else repeat(report, blocks)), parameters


def repeated_blocks(model: nn.Module) -> Blocks | None:
    """Return the longest list of blocks of a model and which of them are alike; None where there is none.

    Blocks are alike that have the same modules with Parameters of the same shapes, and whose settings (every number,
    word or flag of a module) are the same; what only counts the block is none.
    """
    from torch import nn

    from autoprec.graph.repeated import Blocks

    best, path = 0, ""
    for name, module in model.named_modules():
        inside = bool(path) and name.startswith(f"{path}.")
        if isinstance(module, nn.ModuleList) and len(module) > best and not inside:
            best, path = len(module), name
    if best < _FEWEST_BLOCKS:
        return None
    blocks = list(model.get_submodule(path).children())
    known: dict[Any, int] = {}
    return Blocks(path, tuple(known.setdefault(_kind(block, index), index) for index, block in enumerate(blocks)))


def _kind(block: nn.Module, number: int) -> Any:
    """Return what a block is: its modules, their settings and their Parameters."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False)),
            tuple(sorted((key, value) for key, value in vars(module).items() if _setting(key, value, number))),
        )
        for name, module in block.named_modules()
    )


def _setting(key: str, value: Any, number: int) -> bool:
    counts = isinstance(value, int) and not isinstance(value, bool) and value == number and "id" in key
    return isinstance(value, (bool, int, float, str)) and not counts and not key.startswith("__")


def run_once(model: nn.Module, blocks: Blocks) -> None:
    """Make every block that is like an earlier one hand on what it is given, in the shape that that one returns."""
    children = list(model.get_submodule(blocks.path).children())
    returned: dict[int, int] = {}

    def seen(number: int, out: Any) -> None:
        returned[number] = len(out) if isinstance(out, tuple) else 0

    def hand_on(first: int, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        more = returned[first]
        return (given, *(None,) * (more - 1)) if more else given

    for number, (first, block) in enumerate(zip(blocks.first, children, strict=True)):
        if number == first:
            block.register_forward_hook(lambda _m, _a, out, number=number: seen(number, out))
        else:
            block.forward = functools.partial(hand_on, first)
            if hasattr(block, "gradient_checkpointing"):
                setattr(block, "gradient_checkpointing", False)  # noqa: B010 - a plain flag, which nn.Module's types lack
