"""The targets' own code: loads what was exported, and trains two steps under it where that runs without a GPU.

Everything here needs a package of the target; ``benchmarks/outlets/exports.py`` runs what it finds and
prints which. Only what a machine without a GPU lacks is filled in: FP8 is emulated by torchao, capability checks are
told that the GPU is there, and Transformer Engine is its recipe classes, which need no kernels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import nn

from autoprec.errors import MissingDependencyError
from autoprec.export import Export, Request
from autoprec.support.optional import require
from tests.export.config_readers import megatron_labels, megatron_settings, read_dlfw_inspect
from tests.export.readers import (
    Reading,
    float8_labels,
    load_source,
    read_accelerate,
    read_lightning,
    read_python,
    read_torchao,
    read_transformer_engine,
    stand_ins,
    te_stand_ins,
    uniform,
)
from tests.export.recipe_readers import read_torchao_fqn

__all__ = ["LAYERS", "LOADERS", "TRAINERS", "Batches", "SmallModel", "TitanBlock", "losses_of", "quiet", "version"]

Batches = list[tuple[torch.Tensor, torch.Tensor]]
_DISTRIBUTIONS = {
    "python": "torch",
    "torchao": "torchao",
    "torchao-fqn": "torchao",
    "transformer-engine": "transformer-engine",
    "megatron": "megatron-core",
    "dlfw-inspect": "nvdlfw_inspect",
}


def version(target: str) -> str:
    """Return the version of a target's package, empty where it is not installed; nothing is imported."""
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(target, target))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _written(done: Export, folder: Path) -> Path:
    for name, text in done.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


# --- loading


def load_accelerate(done: Export, request: Request) -> Reading:
    """``accelerate launch`` takes the YAML, and its environment is the recipe that ``Accelerator`` builds."""
    require("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    with tempfile.TemporaryDirectory() as folder:
        file = str(_written(done, Path(folder)) / "accelerate_config.yaml")
        config = load_config_from_file(file)
        parsed = launch_command_parser().parse_args(["--cpu", "--config_file", file, "train.py"])
        args, *_ = _validate_launch_command(parsed)
        _, environment = prepare_simple_launcher_cmd_env(args)
    assert config.mixed_precision == environment["ACCELERATE_MIXED_PRECISION"]
    for key, value in yaml.safe_load(done.files["accelerate_config.yaml"]).get("fp8_config", {}).items():
        if not isinstance(value, list):  # override_linear_precision, which is nothing since TE 2.0
            assert environment[f"ACCELERATE_FP8_{key.removeprefix('fp8_').upper()}"] == str(value), key
    return read_accelerate(done, request)


def te_recipes() -> Any:
    """Transformer Engine's recipe module, by its path: importing the package asks for CUDA libraries."""
    package = importlib.util.find_spec("transformer_engine")
    if package is None or not package.submodule_search_locations:
        raise MissingDependencyError(
            "transformer-engine is not installed", fix="pip install --no-deps transformer-engine"
        )
    path = f"{package.submodule_search_locations[0]}/common/recipe/__init__.py"
    spec = importlib.util.spec_from_file_location("te_recipes_of_the_real_one", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_transformer_engine(done: Export, request: Request) -> Reading:
    """The file on Transformer Engine's own recipe classes; quantizers, which need CUDA, remember their arguments."""
    real, fakes = te_recipes(), te_stand_ins()
    named = {name: getattr(real, name) for name in ("CustomRecipe", "Format", "MMParams")}
    with stand_ins(**fakes | {"transformer_engine__common__recipe": named}):
        made = load_source(done.files["precision_te.py"], "precision_te").recipe()
        assert isinstance(made, real.Recipe)
    return read_transformer_engine(done, request)


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """Make an import of a package fail; what is imported meanwhile stays."""
    before = sys.modules.get(name)
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


def load_megatron(done: Export, request: Request) -> Reading:
    """Megatron's quantization configuration matches the layers; its argument parser takes the flags, where it is."""
    # without its CUDA libraries Transformer Engine cannot be imported; Megatron's configuration does without it
    with _without("transformer_engine"):
        config: Any = require("megatron.core.quantization.quant_config", purpose="reading the exported YAML")
        extensions: Any = require("megatron.core.extensions.transformer_engine")
        arguments: Any = None
        if importlib.util.find_spec("megatron.training") is not None:
            arguments = require("megatron.training.arguments")
    flags = done.files["megatron_flags.txt"].split()
    with tempfile.TemporaryDirectory() as folder:
        recipes = config.RecipeConfig.from_yaml_file(str(_written(done, Path(folder)) / "te_precision_config.yaml"))
    settings = {name: "" for name in flags if name.startswith("--")}
    settings |= {a: b for a, b in itertools.pairwise(flags) if a.startswith("--") and not b.startswith("--")}
    if arguments is not None:
        with mock.patch.object(sys, "argv", ["pretrain_gpt.py", *flags]):
            parsed = arguments.parse_args()
        assert parsed.te_precision_config_file == "te_precision_config.yaml"
        assert (parsed.bf16, parsed.fp16) == ("--bf16" in flags, "--fp16" in flags)
    out = {}
    for name in request.layers:
        matched = recipes.match(config.MatchContext(module_path=name, layer_number=None))
        recipe = extensions.TEQuantizationParams.parse_from_config(matched).training_recipe
        given = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
        plain = {key: value for key, value in given.items() if value is not None}
        out[name] = megatron_labels(plain, settings, request.policy.activations)
    return Reading(out, megatron_settings(settings))


def titan_names() -> tuple[str, ...]:
    """The names of the linear layers of torchtitan's smallest Llama."""
    from torchtitan.models.common.linear import Linear

    return tuple(name for name, *_ in _titan_config().traverse(Linear.Config))


def _titan_config() -> Any:
    require("torchtitan.components.quantization", purpose="reading the exported converters")
    from torchtitan.models.llama3 import llama3_configs

    return llama3_configs["debugmodel"](attn_backend="flex")


@contextlib.contextmanager
def _capable() -> Iterator[None]:
    """Tell torchtitan's converters that the GPU they ask for is there."""
    with contextlib.ExitStack() as stack:
        for name in ("float8", "mx", "nvfp4"):
            patched = f"torchtitan.components.quantization.{name}.has_cuda_capability"
            stack.enter_context(mock.patch(patched, return_value=True))
        yield


def titan_converted(done: Export) -> Any:
    """The model's configuration after torchtitan's own converters."""
    config = _titan_config()
    with _capable():
        module = load_source(done.files["precision_torchtitan.py"], "precision_torchtitan")
        for converter in module.converters():
            config = converter.build().convert(config)
    return config


def load_torchtitan(done: Export, request: Request) -> Reading:
    """torchtitan's converters on the configuration of its smallest Llama."""
    config = titan_converted(done)
    from torchtitan.models.common.linear import Linear

    from autoprec.policy import LayerPlan
    from autoprec.precision.recipes import BUILTIN_RECIPES
    from tests.export.readers import labels

    def runs(layer: Any) -> dict[str, str]:
        kind = type(layer).__qualname__.split(".")[0]
        if kind == "Float8Linear":
            return float8_labels(layer._torchao_config)
        recipe = {"MXFP8Linear": "mxfp8", "NVFP4Linear": "nvfp4"}.get(kind)
        return labels(LayerPlan.uniform(BUILTIN_RECIPES[recipe]), "bf16") if recipe else uniform("high")

    out = {name: runs(layer) for name, layer, *_ in config.traverse(Linear.Config)}
    return Reading({name: out[name] for name in request.layers}, Reading({}).settings | {"activations": "bf16"})


def _requiring(name: str, reader: Callable[[Export, Request], Reading]) -> Callable[[Export, Request], Reading]:
    def load(done: Export, request: Request) -> Reading:
        require(name, purpose="loading what was exported")
        return reader(done, request)

    return load


LOADERS: dict[str, Callable[[Export, Request], Reading]] = {
    "python": read_python,
    "torchao": _requiring("torchao.float8", read_torchao),
    "transformer-engine": load_transformer_engine,
    "accelerate": load_accelerate,
    "megatron": load_megatron,
    "dlfw-inspect": _requiring("nvdlfw_inspect", read_dlfw_inspect),
    "lightning": read_lightning,
    "torchtitan": load_torchtitan,
    "torchao-fqn": _requiring("torchao.core.config", read_torchao_fqn),
}
#: target -> names of its own model's layers, where it has one.
LAYERS: dict[str, Callable[[], tuple[str, ...]]] = {"torchtitan": titan_names}


# --- two steps


class SmallModel(nn.Module):
    """Four linear layers, a norm and a nonlinearity; every size is a multiple of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 32] to [batch, 16]."""
        x = torch.tanh(self.stem(x))
        return self.head(self.norm(x + self.fc2(torch.nn.functional.gelu(self.fc1(x)))))


def losses_of(
    model: nn.Module,
    batches: Batches,
    context: Callable[[], Any] = contextlib.nullcontext,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    optimizer: Any = None,
) -> list[float]:
    """Train a step of AdamW per batch, and return the loss of each."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.02)
    out = []
    for x, y in batches:
        with context():
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return out


def train_python(done: Export, model: nn.Module, batches: Batches) -> list[float]:
    """The plain module: its forward is under autocast already."""
    module = load_source(done.files["precision_policy.py"], "precision_policy")
    return losses_of(module.apply(model), batches)


def train_torchao(done: Export, model: nn.Module, batches: Batches) -> list[float]:
    """torchao's layers, emulated."""
    module = load_source(done.files["precision_torchao.py"], "precision_torchao")
    return losses_of(module.apply(model, emulate=True), batches, lambda: module.autocast("cpu"))


def train_accelerate(done: Export, model: nn.Module, batches: Batches) -> list[float]:
    """``Accelerator(**accelerator_kwargs()).prepare(model, optimizer)``, as a script would."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    module = load_source(done.files["precision_accelerate.py"], "precision_accelerate")
    fp8 = hasattr(module, "MAIN")
    module.prepare_model(model, **{"emulate": True} if fp8 else {})
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, **module.accelerator_kwargs(**{"emulate": True} if fp8 else {}))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return losses_of(model, batches, backward=accelerator.backward, optimizer=optimizer)


def train_lightning(done: Export, model: nn.Module, batches: Batches) -> list[float]:
    """``Fabric(plugins=[PolicyFabricPrecision()]).setup(model, optimizer)``."""
    from lightning.fabric import Fabric

    inner = load_source(done.files["precision_policy.py"], "precision_policy")
    with stand_ins(precision_policy=dict(inner.__dict__)):
        plugin = load_source(done.files["precision_lightning.py"], "precision_lightning").PolicyFabricPrecision()
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return losses_of(model, batches, backward=fabric.backward, optimizer=optimizer)


class TitanBlock(nn.Module):
    """A feed-forward block and the head of torchtitan's smallest Llama, built from its configuration, by their names.

    Its attention is compiled FlexAttention, which takes longer to compile for a CPU than all the rest together.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(7)
        inner = nn.Module()
        inner.feed_forward = config.layers[0].feed_forward.build()
        self.layers, self.lm_head = nn.ModuleDict({"0": inner}), config.lm_head.build()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)
        for layer in self.modules():
            if hasattr(layer, "linear_mm_config"):
                layer.linear_mm_config = type(layer.linear_mm_config)(
                    *(product._replace(emulate=True) for product in layer.linear_mm_config)
                )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 256] to [tokens, vocabulary]."""
        return self.lm_head(self.layers["0"].feed_forward(x))


def train_torchtitan(done: Export, _model: nn.Module, batches: Batches) -> list[float]:
    """A block of torchtitan's smallest Llama after its own converters, with torchao's layers emulated."""
    return losses_of(TitanBlock(titan_converted(done)), batches, lambda: torch.autocast("cpu", torch.bfloat16))


TRAINERS: dict[str, Callable[[Export, nn.Module, Batches], list[float]]] = {
    "python": train_python,
    "torchao": train_torchao,
    "accelerate": train_accelerate,
    "lightning": train_lightning,
    "torchtitan": train_torchtitan,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Other people's packages warn, log and print when they are imported."""
    with warnings.catch_warnings(), open(os.devnull, "w", encoding="utf-8") as nowhere:
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
