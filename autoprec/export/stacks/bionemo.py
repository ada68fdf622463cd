"""``--to bionemo``: BioNeMo's ``layer_precision``, a word for each block, and the recipes that the words stand for.

``layer_precision`` of a model's config has ``fp8``, ``fp4`` or null (bf16) for every Transformer Engine block; one FP8
and one FP4 recipe serve the whole run (``fp8_config``, ``fp4_config``), and what is outside of the blocks, the head
too, is bf16. The ESM-2 and CodonFM recipes name the same blocks, counted from 1, by ``fp8_layers`` and ``fp4_layers``.
The list cannot be in the Hydra configuration of the Llama recipe: transformers prints the config as JSON, and Hydra's
own list under ``config_kwargs`` is not JSON.
(bionemo-framework 3a9d005: models/llama3/modeling_llama_te.py, recipes/codonfm_native_te/quantization.py)
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autoprec.errors import FileError, UnknownNameError
from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header
from autoprec.export.settings import LOST_IN_BF16, report_settings
from autoprec.export.stacks.transformer_engine import (
    KEYWORDS,
    SCALINGS,
    builtin_plan,
    fp8_format,
    keywords,
    read_recipe,
    scaling_of,
)
from autoprec.export.summary import lose
from autoprec.export.words import Words, as_rule, section
from autoprec.policy import LayerPlan, Policy, dump_yaml, policy_from_dict
from autoprec.precision.recipes import Recipe

_BLOCK = re.compile(r"layers\.(\d{1,4})\.")
_KEYS, _INIT = ("recipe", "format", "recipe_kwargs"), "quantized_model_init_kwargs"
_KEPT = dict.fromkeys(("loss", "output"), "transformers' loss functions cast the logits to fp32")


def _block(name: str) -> int:
    """Return which block a layer is in, counted from 0; -1 outside of all."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else -1


def _words(plans: Mapping[str, LayerPlan]) -> Words:
    """Return what the two words stand for: the FP8 and the FP4 recipe that most layers of the blocks run."""
    first = Counter(plan.scaled[0] for name, plan in plans.items() if plan.scaled and _block(name) >= 0)
    runs = {}
    for word, formats in (("fp8", ("fp8", "mxfp8")), ("fp4", ("nvfp4",))):
        found = next((recipe for recipe, _ in first.most_common() if recipe.format in formats), None)
        if found is not None:
            runs[word] = builtin_plan(found)
    return Words("BioNeMo's {} recipe", runs)


def _config(word: str, recipe: Recipe) -> dict[str, Any]:
    kind, form = scaling_of(recipe), "E2M1" if word == "fp4" else fp8_format(recipe)
    name, kwargs = SCALINGS[kind][0], {key: value for key, value in keywords(recipe).items() if value is not False}
    made = {"recipe": f"transformer_engine.common.recipe.{name}", "format": form, "recipe_kwargs": kwargs}
    return {"enabled": True, **{f"{word}_{key}": value for key, value in made.items()}}


def write(request: Request, losses: Losses) -> Written:
    """Return ``bionemo_precision.yaml`` (Hydra configuration) and ``bionemo_config.json`` (the model's)."""
    asked, plans = request.policy.activations, request.plans()
    table = _words(plans)
    blocks: dict[int, list[str]] = {}
    for name, plan in plans.items():
        blocks.setdefault(_block(name), []).append(table.nearest(plan))
    words = {block: Counter(found).most_common(1)[0][0] for block, found in blocks.items() if block >= 0}
    why = "" if request.layers else "layer_precision counts blocks, pass --layers"
    lose(losses, request, lambda plan, name: table.lost(plan, words.get(_block(name), ""), "bf16", asked), why)
    whole = "bf16: BioNeMo's Transformer Engine models train in bf16 as a whole"
    said = "BioNeMo scales no loss"
    report_settings(request, losses, said, kept=_KEPT, lost=LOST_IN_BF16, autocast=False, activations=whole)
    used = set(words.values())
    document: dict[str, Any] = {f"{word}_config": _config(word, table.plans[word].scaled[0])
                                for word in table.plans if word in used}  # fmt: skip
    document |= {f"{word}_layers": [block + 1 for block in sorted(words) if words[block] == word]
                 for word in table.plans if word in used}  # fmt: skip
    document["use_fp32_master_weights"] = True
    files = {"bionemo_precision.yaml": header(request, "BioNeMo") + dump_yaml(document)}
    notes = [
        "bionemo_precision.yaml: merge into the recipe's hydra_config",
        "llama3_native_te has no use_fp32_master_weights: it stores weights and optimizer state in bf16",
    ]
    if used - {""}:
        precision = [words.get(block) or None for block in range(max(words) + 1)]
        files["bionemo_config.json"] = json.dumps({"layer_precision": precision}) + "\n"
        notes.append(
            "bionemo_config.json: merge into the model's config.json; ESM-2 and CodonFM recipes need fp8_layers and "
            "fp4_layers alone, and opengenome2_llama_native_te gives its model no recipe"
        )
    return files, notes


def read(document: Mapping[str, Any], layers: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Return the body of a policy from a recipe's Hydra configuration, or a model's config with its recipes beside it.

    Raises:
        FileError: blocks that the model does not have, that have two words, or a word without its recipe.
        UnknownNameError: a recipe that is not one of Transformer Engine's.
    """
    plans = {}
    for word in ("fp8", "fp4"):
        config = section(document, f"{word}_config", ("enabled", *(f"{word}_{key}" for key in _KEYS), _INIT))
        if config.get("enabled", False) is True:
            plans[word] = builtin_plan(_recipe(word, config))
    words, rest = _by_block(document, plans, notes)
    depth = max((_block(name) for name in layers), default=-1) + 1
    if depth and words and max(words) >= depth:
        raise FileError(
            f"it is about {max(words) + 1} blocks, and the model has {depth}", fix="the configuration of this model"
        )
    for word in {*words.values(), rest} - {"", *plans}:
        raise FileError(f"blocks are {word}, and nothing says by which recipe", fix=f"{word}_config with enabled: true")
    recipes: dict[str, Any] = {}
    named = {block: word for block, word in words.items() if word or rest}
    rules = [as_rule(f"*layers.{block}.*", plans.get(word, LayerPlan()), recipes) for block, word in named.items()]
    rules += [as_rule("*layers.*", plans[rest], recipes)] if rest else []
    return {"recipes": recipes, "layers": rules, "default": "keep", "activations": "bf16"}


def _by_block(document: Mapping[str, Any], plans: Mapping[str, Any], notes: list[str]) -> tuple[dict[int, str], str]:
    """Return block -> word (empty for bf16), and the word of the blocks that are not named."""
    inner = document.get("config_kwargs") or {}
    listed = document.get("layer_precision", inner.get("layer_precision") if isinstance(inner, Mapping) else None)
    if listed is not None:
        if not isinstance(listed, list) or any(word not in ("fp8", "fp4", None) for word in listed):
            raise FileError(f"layer_precision is {listed!r}", fix='a list with "fp8", "fp4" or null for each block')
        return {block: word or "" for block, word in enumerate(listed)}, ""
    words: dict[int, str] = {}
    for word in ("fp8", "fp4"):
        numbers = document.get(f"{word}_layers") or ()
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise FileError(f"{word}_layers has {number!r}", fix="blocks are counted from 1")
            if word in plans and words.setdefault(number - 1, word) != word:
                raise FileError(f"block {number} is in fp8_layers and in fp4_layers")
        if numbers and word not in plans:
            notes.append(
                f"{word}_layers without {word}_config: these blocks are bf16, unless they are listed as others"
            )
            # resolve_layer_precision keeps them from the format that is on, where that has no list of its own
            other = "fp4" if word == "fp8" else "fp8"
            words |= {number - 1: "" for number in numbers if document.get(f"{other}_layers") is None}
    free = [word for word in plans if document.get(f"{word}_layers") is None]
    if len(free) > 1:
        raise FileError("fp8_config and fp4_config are enabled, and nothing says which blocks run which",
                        fix="layer_precision, or fp8_layers and fp4_layers")  # fmt: skip
    if free == ["fp4"] and not words:
        notes.append("fp4_config without layer_precision: the Llama recipe refuses it; read as every block")
    return words, free[0] if free else ""


def _recipe(word: str, config: Mapping[str, Any]) -> Recipe:
    """Return the recipe that a Transformer Engine class stands for with its format and keywords."""
    usual = "nvfp4" if word == "fp4" else "delayed"
    named = {name: kind for kind, (name, _) in SCALINGS.items() if (kind == "nvfp4") == (word == "fp4")}
    name = str(config.get(f"{word}_recipe", SCALINGS[usual][0])).rsplit(".", 1)[-1]
    if name not in named:
        raise UnknownNameError("recipe of Transformer Engine", name, [*named], where=f"{word}_config.{word}_recipe")
    kwargs, known = config.get(f"{word}_recipe_kwargs") or {}, KEYWORDS.get(named[name], ())
    if not isinstance(kwargs, Mapping) or set(kwargs) - set(known):
        extra = ", ".join(str(key) for key in kwargs if key not in known)
        listed = ", ".join(known) or "none"
        raise FileError(f"{word}_recipe_kwargs of {name} cannot be read as a policy: {extra}", fix=f"known: {listed}")
    made = read_recipe(named[name], str(config.get("fp8_format", "HYBRID")), kwargs)
    whole = {"schema": "autoprec.policy/1", "recipes": {word: made}, "default": word}
    policy: Policy = policy_from_dict(whole, where=f"{word}_config")
    return policy.recipes[word]
