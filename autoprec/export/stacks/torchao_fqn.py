"""``--to torchao-fqn``: torchao's ``FqnToConfig``, a training config for each layer, as the JSON that torchao writes.

A key is a layer's name, or ``re:`` and a regular expression that fits a whole name; names come first wherever they
stand, then the first expression that fits (torchao/quantization/quant_api.py, ``_fqn_to_config_handler``). ``null``
leaves a layer as it is. Two traps: an expression fits modules that hold layers as well, and then converts whatever is
in them; so where the model's layers are known each one is named. And torchao's reader of JSON does not look where its
training configs are, which the module beside the file mends.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoprec.errors import FileError, UnknownNameError
from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header
from autoprec.export.reading import plain
from autoprec.export.settings import CAST_LOGITS, SCALER, by_script, report_settings
from autoprec.export.snippets import template
from autoprec.export.stacks.torchao import NAMED
from autoprec.export.summary import lose
from autoprec.export.words import Words, as_rule
from autoprec.policy import LayerPlan, escape, glob_regex
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS

_MX, _INT8 = BUILTIN_RECIPES["mxfp8"], BUILTIN_RECIPES["int8"]
#: torchao's word for each GEMM of its INT8 training config.
_INT8_GEMMS = dict(zip(GEMMS, ("output", "grad_input", "grad_weight"), strict=True))
#: word -> (class, its fields that decide what is multiplied, what a layer runs)
_TABLE: dict[str, tuple[str, dict[str, Any], LayerPlan]] = {
    **{name: ("Float8TrainingOpConfig", {"float8_linear_recipe": name}, plan) for name, plan in NAMED.plans.items()},
    "mxfp8": ("MXFP8TrainingOpConfig", {"wgrad_with_hp": False}, LayerPlan.uniform(_MX)),
    "mxfp8_wgrad_hp": ("MXFP8TrainingOpConfig", {"wgrad_with_hp": True}, LayerPlan(fprop=_MX, dgrad=_MX)),
    "nvfp4": ("NVFP4TrainingConfig", {}, LayerPlan.uniform(BUILTIN_RECIPES["nvfp4"])),
    **{
        "int8 " + " ".join(gemms): (
            "Int8MixedPrecisionTrainingConfig",
            {field: gemm in gemms for gemm, field in _INT8_GEMMS.items()},
            LayerPlan(**dict.fromkeys(gemms, _INT8)),
        )
        for count in (3, 2, 1)
        for gemms in itertools.combinations(GEMMS, count)
    },
}
WORDS = Words("torchao's {} config", {word: plan for word, (_, _, plan) in _TABLE.items()}, NAMED.besides)
#: Fields that an import passes over at these values; the others of them say how a product is run, not in what.
_FIXED = {"float8_dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "scale_calculation_mode": "RCEIL"}
_HOW = {"pad_token_groups_for_grouped_mm", "kernel_preference", "module_swap", "process_group", "world_size",
        "rht_sign_vector"}  # fmt: skip
#: A repeated group with a repeat inside, on which Python's matcher can take hours, and how many repeats are read.
_NESTED, _MOST_REPEATS = re.compile(r"[*+}]\??\)[*+{]"), 6

#: What a glob can say of a regular expression: any text, a character, itself (1, 3), one of a class (2).
_PIECE = re.compile(r"\.[*+]?|\\(\W)|\[([^\]\\]+)\]|([^\\.*+?{}()|\[\]^$])")


def write(request: Request, losses: Losses) -> Written:
    """Return ``fqn_to_config.json`` and ``precision_torchao_fqn.py``."""
    dtype = request.policy.activations
    found: dict[str, str] = {}
    for name, plan in request.plans().items():
        found[name] = WORDS.nearest(plan) if request.kinds.get(name, "linear") == "linear" else ""
    lose(losses, request, lambda plan, name: WORDS.lost(plan, found[name] if name else WORDS.nearest(plan), dtype))
    for rule in () if request.layers else request.rules():
        key = "_default" if rule.match == "*" else f"re:{glob_regex(rule.match)}"
        word = found.setdefault(key, WORDS.nearest(rule.plan))
        if word and key != "_default":
            inside = "also what is inside of modules whose name the glob matches (pass --layers)"
            losses.add(rule.plan.describe(), inside, rule.match)
    configs = {key: _config(word) for key, word in found.items() if word or key != "_default"}
    report_settings(request, losses, SCALER, lost=CAST_LOGITS, activations=by_script(request))
    document = {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}
    files = {"fqn_to_config.json": json.dumps(document, indent=1) + "\n"}
    files["precision_torchao_fqn.py"] = header(request, "torchao FqnToConfig") + template("torchao_fqn")
    return files, ("import precision_torchao_fqn; precision_torchao_fqn.apply(model): torchao 0.18 or newer",)


def _config(word: str) -> dict[str, Any] | None:
    if not word:
        return None
    name, fields, _ = _TABLE[word]
    return {"_type": name, "_version": 1, "_data": dict(fields)}


def read(document: Mapping[str, Any], layers: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Return the body of a policy from what torchao's ``config_to_dict`` makes of an ``FqnToConfig``.

    Args:
        document: the JSON, parsed.
        layers: names of the model's linear layers; empty where they are not known.
        notes: receives what a person should know.

    Raises:
        FileError: another version, a config that does not train, a field that no policy expresses, or, without the
            names of the model's layers, an expression that is not a glob.
    """
    _first_version("FqnToConfig", document)
    data = document.get("_data")
    document.get("_type")
    data = data if isinstance(data, Mapping) else {}
    configs = data.get("fqn_to_config")
    if configs:
        plain(data.get("module_fqn_to_config"))  # torchao writes the same names under both
    else:
        configs = data.get("module_fqn_to_config")
    if not isinstance(configs, Mapping) or not all(isinstance(key, str) for key in configs):
        raise FileError("FqnToConfig without fqn_to_config, which gives names a config", fix="torchao: config_to_dict")
    plans = {key: _plan(key, config, notes) for key, config in configs.items()}
    recipes: dict[str, Any] = {}
    matches = list(_named(plans, layers) if layers else _globs(plans))
    if layers and not matches:
        notes.append(f"no rule fits any of the {len(layers)} layers: {', '.join(plans)}")
    rules = [as_rule(match, plan, recipes) for match, plan in matches]
    return {"recipes": recipes, "layers": rules, "default": "keep"}


def _first_version(what: str, document: Mapping[str, Any]) -> None:
    if document.get("_version", 1) != 1:
        raise FileError(f"{what} of version {document['_version']} is not read", fix="version 1 is")


def _plan(key: str, config: Any, notes: list[str]) -> LayerPlan:
    if config is None:
        return LayerPlan()
    if not isinstance(config, Mapping) or not isinstance(config.get("_data"), Mapping):
        raise FileError(f"'{key}' has neither a config nor null", fix="torchao: config_to_dict")
    kind = str(config.get("_type"))
    known = {name: fields for name, fields, _ in _TABLE.values()}
    if kind not in known:
        if "Weight" in kind or "QAT" in kind:
            raise FileError(f"'{key}': {kind} is for inference, not for training", fix=", ".join(known))
        raise UnknownNameError("torchao training config", kind, tuple(known), where=f"'{key}'")
    _first_version(f"'{key}': {kind}", config)
    values = plain(config["_data"])
    given = {name: value.get("_data") if isinstance(value, Mapping) else value for name, value in values.items()}
    how = sorted(name for name in given if name in _HOW and given[name] not in (None, False, "AUTO", "TRITON"))
    if how:
        notes.append(f"'{key}': {', '.join(how)} say how products are run, not in what precision; left out")
    for name, value in given.items():
        if name not in _HOW and name not in known[kind] and _FIXED.get(name) != value:
            right = f"{name}: {_FIXED[name]}" if name in _FIXED else ", ".join([*known[kind], *_FIXED])
            raise FileError(f"'{key}': {name}: {value} of {kind} cannot be read as a policy", fix=right)
    for name, fields, plan in _TABLE.values():
        usual = {"float8_linear_recipe": "rowwise", **dict.fromkeys(_INT8_GEMMS.values(), True)}
        if name == kind and all(given.get(field, usual.get(field, False)) == value for field, value in fields.items()):
            return plan
    if "float8_linear_recipe" in given:
        raise UnknownNameError(
            "float8_linear_recipe", str(given["float8_linear_recipe"]), NAMED.plans, where=f"'{key}'"
        )
    return LayerPlan()  # an INT8 config without a product


def _named(plans: Mapping[str, LayerPlan], layers: Sequence[str]) -> Iterator[tuple[str, LayerPlan]]:
    """Yield a rule for each layer that a key fits, in torchao's order; a key may name a layer's weight."""
    patterns = {key: _expression(key) for key in plans if key.startswith("re:")}
    for name in layers:
        spelled = (f"{name}.weight", name)
        fits = [key for key in spelled if key in plans]
        fits += [key for one in spelled for key, pattern in patterns.items() if pattern.fullmatch(one)]
        fits += [key for key in ("_default",) if key in plans]
        if fits:
            yield escape(name), plans[fits[0]]


def _globs(plans: Mapping[str, LayerPlan]) -> Iterator[tuple[str, LayerPlan]]:
    ranks = {key: 2 * (key == "_default") + key.startswith("re:") for key in plans}
    for key in sorted(plans, key=ranks.__getitem__):
        yield "*" if key == "_default" else _glob(key) if key.startswith("re:") else escape(key), plans[key]


def _expression(key: str) -> re.Pattern[str]:
    text = key.removeprefix("re:")
    if _NESTED.search(text) or len(re.findall(r"[*+]|\{\d*,", text)) > _MOST_REPEATS:
        raise FileError(f"'{key}' repeats what repeats, or too often, to be safe", fix="several simpler expressions")
    try:
        return re.compile(text)
    except re.error as error:
        raise FileError(f"'{key}' is not a regular expression: {error}", fix=r"re:model\.layers\..+\.q_proj") from error


def _glob(key: str) -> str:
    """Return the glob that fits what an expression fits.

    Raises:
        FileError: there is none.
    """
    _expression(key)
    text = key.removeprefix("re:")
    if not re.fullmatch(f"(?:{_PIECE.pattern})*", text):
        why = f"'{key}' is not a glob, so it needs the names of the model's layers"
        raise FileError(why, fix="pass --layers with what `autoprec inspect --json` prints")

    def glob(found: re.Match[str]) -> str:
        if found[2]:
            return f"[{found[2].replace('^', '!', 1)}]"
        return {".*": "*", ".+": "?*", ".": "?"}.get(found[0]) or escape(found[1] or found[3])

    return _PIECE.sub(glob, text)
