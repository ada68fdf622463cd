"""BioNeMo's own code on what was exported, from the checkout of its repository that ``BIONEMO_FRAMEWORK`` names.

What runs is its own: the statements of the Llama recipe's train_fsdp2.py that make recipes, configuration and model
and call it, ``NVLlamaConfig`` and the model around its blocks, and Transformer Engine's recipe classes. The blocks,
which need CUDA, only remember the precision that they are called under.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from autoprec.errors import MissingDependencyError
from autoprec.policy import LayerPlan
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import require
from tests.export.readers import fast_fprop, labels, stand_ins, te_recipe, uniform

__all__ = ["layer_names", "ran", "source"]

_SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16}
_SMALL |= {"num_key_value_heads": 2, "vocab_size": 64, "attn_input_format": "bshd", "model_type": "llama"}
_FP8 = {"DelayedScaling": "delayed", "Float8CurrentScaling": "tensorwise"}
_FP8 |= {"Float8BlockScaling": "blockwise", "MXFP8BlockScaling": "mxfp8"}


def layer_names(blocks: int = 4) -> tuple[str, ...]:
    """Return the names of the linear layers of BioNeMo's Llama: those of Transformer Engine's block."""
    leaves = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    return (*(f"model.layers.{block}.{leaf}" for block in range(blocks) for leaf in leaves), "lm_head")


def source(path: str) -> Path:
    """Return a file of BioNeMo's recipes.

    Raises:
        MissingDependencyError: no checkout is named, or it does not have the file.
    """
    folder = os.environ.get("BIONEMO_FRAMEWORK", "")
    found = Path(folder, "bionemo-recipes", "recipes", path)
    if not folder or not found.is_file():
        raise MissingDependencyError("BioNeMo is not here", fix="BIONEMO_FRAMEWORK=<checkout of bionemo-framework>")
    return found


class _Engine:
    """Transformer Engine in which nothing is multiplied: every layer's plan is the innermost autocast at its call."""

    def __init__(self, recipes: ModuleType) -> None:
        self.recipes = recipes
        self.stack: list[Any] = []
        self.called: dict[str, list[Any]] = {"blocks": [], "head": []}

    @contextlib.contextmanager
    def autocast(self, *, enabled: bool = True, recipe: Any = None) -> Iterator[None]:
        if enabled and recipe is None:
            raise AssertionError("FP8 without a recipe runs Transformer Engine's own default")
        self.stack.append(recipe if enabled else None)
        try:
            yield
        finally:
            self.stack.pop()

    def modules(self) -> dict[str, dict[str, Any]]:
        """Return what is in the place of Transformer Engine's modules."""

        def layer(kind: str, weight: bool) -> type[nn.Module]:
            def start(self: nn.Module, *_: Any, **__: Any) -> None:
                nn.Module.__init__(self)
                if weight:  # a head shares the embedding's
                    self.weight = nn.Parameter(torch.zeros(64, 32, dtype=torch.bfloat16))

            def forward(_: nn.Module, x: torch.Tensor, **__: Any) -> torch.Tensor:
                if kind in self.called:
                    self.called[kind].append(self.stack[-1] if self.stack else None)
                return x

            return type(kind, (nn.Module,), {"__init__": start, "forward": forward, "__module__": pytorch})

        def rotary(_: int) -> Any:
            return type("Rotary", (nn.Module,), {"forward": lambda *_, **__: torch.zeros(1)})()

        pytorch = "transformer_engine.pytorch"
        inside = {"TransformerLayer": layer("blocks", False), "Linear": layer("head", True)}
        inside |= {"RMSNorm": layer("norm", False), "autocast": self.autocast}
        inside["quantized_model_init"] = lambda **_: contextlib.nullcontext()
        common = SimpleNamespace(recipe=self.recipes)
        return {
            "transformer_engine": {"pytorch": SimpleNamespace(**inside), "common": common},
            "transformer_engine__pytorch": inside,
            "transformer_engine__common": {"recipe": self.recipes},
            "transformer_engine__common__recipe": dict(self.recipes.__dict__),
            "transformer_engine__pytorch__attention": {"InferenceParams": type("InferenceParams", (), {})},
            "transformer_engine__pytorch__attention__inference": {"PagedKVCacheManager": object},
            "transformer_engine__pytorch__attention__rope": {"RotaryPositionEmbedding": rotary},
        }


def _statements(path: Path) -> tuple[list[ast.stmt], ast.With]:
    """Return what ``main`` of the training script does to make the model, and the statement that calls it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    main = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    names = {"fp8_recipe", "fp4_recipe", "config", "model"}
    first = next(i for i, node in enumerate(main.body) if ast.unparse(node) == "fp8_recipe = None")
    making = []
    for node in main.body[first:]:
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if not stored or stored - names:
            break
        making.append(node)
    calls = (node for node in ast.walk(main) if isinstance(node, ast.With) and "model(**batch)" in ast.unparse(node))
    return making, next(calls)


def ran(files: Mapping[str, str], folder: Path, blocks: int, recipes: ModuleType) -> list[dict[str, str]]:
    """Return what each block, and at the end the head, runs when the Llama recipe's script trains with an export.

    Args:
        files: what was exported.
        folder: an empty folder for the model's config.json.
        blocks: how many blocks the model has.
        recipes: Transformer Engine's module of recipe classes.

    Raises:
        MissingDependencyError: BioNeMo, Hydra or transformers is not here.
        ValueError, RuntimeError: BioNeMo refuses the configuration.
    """
    script = source("llama3_native_te/train_fsdp2.py")
    hydra: Any = require("hydra", purpose="composing BioNeMo's configuration")
    conf: Any = require("omegaconf").OmegaConf
    require("transformers", purpose="BioNeMo's model")
    defaults = conf.load(script.parent / "hydra_config" / "defaults.yaml")
    small = {"num_hidden_layers": blocks, **_SMALL, **json.loads(files.get("bionemo_config.json", "{}"))}
    (folder / "config.json").write_text(json.dumps(small), encoding="utf-8")
    ours = {"config_name_or_path": str(folder), "use_meta_device": False}
    args, engine = conf.merge(defaults, conf.create(files["bionemo_precision.yaml"]), ours), _Engine(recipes)
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    making, calling = _statements(script)
    with stand_ins(**engine.modules()):
        module = ModuleType("modeling_llama_te")
        sys.modules[module.__name__] = module  # transformers asks a class for the module it is from
        try:
            exec((script.parent / "modeling_llama_te.py").read_text(encoding="utf-8"), module.__dict__)
            names = vars(module) | {"args": args, "batch": batch, "hydra": hydra, "Format": recipes.Format}
            for node in (*making, calling):
                exec(compile(ast.Module([node], []), str(script), "exec"), names)
        finally:
            del sys.modules[module.__name__]
    assert len(engine.called["blocks"]) == blocks
    assert len(engine.called["head"]) == 1
    return [_labels(recipe) for recipe in (*engine.called["blocks"], *engine.called["head"])]


def _labels(recipe: Any) -> dict[str, str]:
    """Return what Transformer Engine runs under one of its recipes, in the words of the conformance suite."""
    if recipe is None:
        return uniform("high")
    kind = type(recipe).__name__
    if kind == "NVFP4BlockScaling":
        off = {"hadamard": "rht", "stochastic_rounding": "stochastic_rounding", "weight_2d": "2d_quantization"}
        flags = {field: not getattr(recipe, f"disable_{word}") for field, word in off.items()}
        return labels(LayerPlan.uniform(BUILTIN_RECIPES["nvfp4"].model_copy(update=flags)), "bf16")
    history = ("margin", "amax_history_len", "amax_compute_algo") if kind == "DelayedScaling" else ()
    made = te_recipe(_FP8[kind], recipe.fp8_format.name.lower(), **{name: getattr(recipe, name) for name in history})
    return labels(fast_fprop(made), "bf16")
