"""What people have today, read as policies: accelerate's ``fp8_config``, Megatron's precision YAML, TE's kwargs.

Formats that name whole recipes are read by the module of :mod:`.stacks` that writes them, from the same table.

A setting that its library accepts and ignores is translated into what it was meant to do, or refused; it is never
carried along silently. Every such decision is a note, and so is every key that no reader here has asked for.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from autoprec.errors import FileError
from autoprec.export.reading import Watched, plain
from autoprec.export.stacks.megatron import NAMES, TRAINING_KEYS
from autoprec.export.stacks.transformer_engine import read_recipe
from autoprec.export.words import section
from autoprec.policy import Policy, escape, glob_matches, policy_from_dict
from autoprec.policy.library import published
from autoprec.precision.recipes import BUILTIN_RECIPES, KEEP

_TE_CONFIG = "TEQuantizationParams"
_TE_KEYS = {
    "margin",
    "interval",
    "fp8_format",
    "amax_history_len",
    "amax_compute_algo",
    "override_linear_precision",
    "use_autocast_during_eval",
    "use_mxfp8_block_scaling",
}
#: What accelerate's own wizard writes and its launcher does not read.
_MISNAMED = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "optimization_level": "opt_level",
}


#: What torchao's Float8LinearConfig says beside how layers are quantised.
_BESIDE_AO = {
    "pad_inner_dim": "it lets sizes that are not multiples of 16 run, and a backend here says which it can run",
    "enable_fsdp_float8_all_gather": "weights are gathered as they are; in FP8 by the module of `export --to torchao`",
}


@dataclass(frozen=True, slots=True)
class Imported:
    """A policy, and what a person should know about how it was read."""

    policy: Policy
    notes: tuple[str, ...]


def _inside(document: Mapping[str, Any], *path: str) -> bool:
    """Say whether a document has a value at a path of keys."""
    here: Any = document
    for key in path:
        if not isinstance(here, Mapping) or key not in here:
            return False
        here = here[key]
    return True


#: format -> keys, any of which tells it; the first format that one tells is it.
_TOLD: dict[str, tuple[tuple[str, ...], ...]] = {
    "torchao-fqn": (("_data", "fqn_to_config"), ("_data", "module_fqn_to_config")),
    "automodel": (("fp8", "enabled"), ("model", "backend")),
    "accelerate": (("fp8_config",), ("mixed_precision",)),
}


def detect(document: Mapping[str, Any]) -> str:
    """Return what a document is: ``megatron``, ``te``, or a format of the table above.

    Raises:
        FileError: none of them.
    """
    if "configs" in document and "matchers" in document:
        return "megatron"
    for name, told in _TOLD.items():
        if any(_inside(document, *path) for path in told):
            return name
    if document and set(document) <= _TE_KEYS:
        return "te"
    raise FileError(
        "this is not an accelerate, Megatron, Automodel, torchao or Transformer Engine configuration",
        fix="expected fp8_config or mixed_precision, configs with matchers, fp8 or model.backend, what "
        "torchao's config_to_dict makes of an FqnToConfig, or TE recipe keys such as fp8_format",
    )


def import_policy(document: Mapping[str, Any], *, layers: Sequence[str] = (), flags: Sequence[str] = ()) -> Imported:
    """Read another stack's configuration as a policy.

    Args:
        document: the parsed YAML or JSON.
        layers: names of the model's linear layers; accelerate keeps the first and last in high precision.
        flags: words of Megatron's command line: layers may inherit the recipe that it names.

    Raises:
        FileError: a value that the stack itself would refuse, or that means nothing any more.
    """
    document = Watched(document)
    found = detect(document)
    readers: dict[str, Callable[..., dict[str, Any]]]
    readers = {"accelerate": _accelerate, "megatron": partial(_megatron, flags=flags), "te": _te}
    if found not in readers:
        readers[found] = importlib.import_module(f"autoprec.export.stacks.{found.replace('-', '_')}").read
    notes: list[str] = []
    body = readers[found](document, layers, notes)
    policy: Policy = policy_from_dict({"schema": "autoprec.policy/1", **body}, where=f"{found} configuration")
    if unread := document.unread():
        notes.append(f"not read, and so not in the policy: {', '.join(unread)}")
    notes += _without_a_layer(policy, layers)
    return Imported(policy, tuple(notes))


def _without_a_layer(policy: Policy, layers: Sequence[str]) -> list[str]:
    """Say which rules fit none of the model's layers: a rule that is optional may, and nothing else tells."""
    rules = [rule.match for rule in policy.layers if rule.optional and rule.recipe != KEEP]
    if not layers:
        told = "every rule is optional: one that fits no layer of your model changes nothing, and nobody is told; pass "
        return [f"{told}--layers to have it told here"] if rules and all(r.optional for r in policy.layers) else []
    idle = [match for match in rules if not any(glob_matches(match, name) for name in layers)]
    if idle and len(idle) == len(rules):
        return [f"no rule fits any of the {len(layers)} layers: {', '.join(idle)}"]
    return [f"fits none of the {len(layers)} layers: {', '.join(idle)}"] if idle else []


def _bool(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise FileError(f"{where} is {value!r}, not true or false", fix="write a YAML list: [false, false, true]")


def _te_recipe(
    keys: Mapping[str, Any], notes: list[str], history: int, algo: str, *, in_evaluation: bool = True
) -> dict[str, Any]:
    """Return (the body of) a policy from TE's DelayedScaling keys; defaults are the reading library's own."""
    if keys.get("use_autocast_during_eval", in_evaluation) is not True:
        notes.append(
            "use_autocast_during_eval is not true: accelerate then evaluates in bf16, and under the policy evaluation "
            "is in FP8 too, unless policy.remove(model) comes before it"
        )
    if keys.get("use_mxfp8_block_scaling"):
        return {"recipes": {"mxfp8": read_recipe("mxfp8", "E4M3")}, "default": "mxfp8", "activations": "bf16"}
    if keys.get("interval", 1) != 1:
        notes.append(f"interval {keys['interval']}: Transformer Engine ignores it since 1.8; left out")
    given = {
        "margin": keys.get("margin", 0),
        "amax_history_len": keys.get("amax_history_len", history),
        "amax_compute_algo": str(keys.get("amax_compute_algo", algo)).lower(),
    }
    recipe = read_recipe("delayed", str(keys.get("fp8_format", "HYBRID")), given)
    body: dict[str, Any] = {"recipes": {"fp8_delayed": recipe}, "default": "fp8_delayed", "activations": "bf16"}
    override = keys.get("override_linear_precision", [False] * 3)
    if isinstance(override, str):  # a tuple, which accelerate's own examples write: to YAML it is text
        words = [word.strip().lower() for word in override.strip("() ").split(",")]
        override = [{"true": True, "false": False}.get(word, word) for word in words]
    if not isinstance(override, (list, tuple)) or len(override) != 3:
        raise FileError(f"override_linear_precision is {override!r}", fix="write a YAML list: [false, false, false]")
    wanted = tuple(_bool(value, "override_linear_precision") for value in override)
    if wanted == (False, False, True):
        notes.append("override_linear_precision: Transformer Engine ignores it since 2.0; read as wgrad in bf16")
        body["recipes"]["bf16"] = {"format": "bf16"}
        body["layers"] = [{"match": "*", "recipe": "fp8_delayed", "gemms": {"wgrad": "bf16"}}]
        body["default"] = "keep"
    elif any(wanted):
        raise FileError(
            f"override_linear_precision {list(wanted)} never existed", fix="only [false, false, true] did, before 2.0"
        )
    return body


def _te(document: Mapping[str, Any], _layers: Sequence[str], notes: list[str]) -> dict[str, Any]:
    unknown = set(document) - _TE_KEYS
    if unknown:
        raise FileError(f"unknown keys: {', '.join(sorted(unknown))}", fix=f"valid: {', '.join(sorted(_TE_KEYS))}")
    return _te_recipe(document, notes, history=1024, algo="max")


def _accelerate(document: Mapping[str, Any], layers: Sequence[str], notes: list[str]) -> dict[str, Any]:
    mixed = str(document.get("mixed_precision", "fp8" if "fp8_config" in document else "no")).lower()
    if mixed in ("no", "bf16", "fp16"):
        activations = {"no": "keep"}.get(mixed, mixed)
        return {"activations": activations, "loss_scaling": "dynamic" if mixed == "fp16" else "none"}
    if mixed != "fp8":
        raise FileError(f"mixed_precision {mixed!r} is none of accelerate's", fix="no, fp16, bf16 or fp8")
    if isinstance(document, Watched):
        document.respelled("fp8_config", lambda key: key.removeprefix("fp8_") if key != "fp8_format" else key)
    keys = section(document, "fp8_config")
    for wrong, right in _MISNAMED.items():
        if keys.get(wrong) is not None:
            notes.append(f"{wrong}: accelerate reads {right} and ignored yours; left out")
    backend = str(keys.get("backend", "AO")).upper()
    if backend == "TE":
        return _te_recipe(keys, notes, history=1024, algo="most_recent", in_evaluation=False)
    if backend == "MSAMP":
        asked = str(keys.get("opt_level", "O2")).upper()
        if asked not in ("O1", "O2"):
            raise FileError(f"opt_level {keys['opt_level']!r} is none of accelerate's", fix="O1 or O2")
        found = published(f"msamp-{asked.lower()}")
        recipes = {name: recipe.to_dict() for name, recipe in found.recipes.items()}
        return found.around().to_dict() | {"recipes": recipes, "default": found.use}
    if backend != "AO":
        raise FileError(f"fp8 backend {backend!r} is none of accelerate's", fix="AO, TE or MSAMP")
    if "fp8_config" in document:
        notes.append(
            "rules per layer are not in this file: what precision_accelerate.py, or AORecipeKwargs and conversions in "
            "your script, do beside it is not in the policy"
        )
    notes += [f"{key}: {why}; left out" for key, why in _BESIDE_AO.items() if keys.get(key)]
    body: dict[str, Any] = {"activations": "bf16", "default": "fp8_tensorwise"}
    body["recipes"] = {"fp8_tensorwise": BUILTIN_RECIPES["fp8_tensorwise"].to_dict()}
    if layers:
        body["layers"] = [{"match": escape(name), "recipe": "keep"} for name in dict.fromkeys((layers[0], layers[-1]))]
    else:
        notes.append(
            "accelerate keeps the first and last linear layer in bf16: pass --layers to have that in the policy"
        )
    return body


def _inherited(flags: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Return the recipe that Megatron's flags give to layers that inherit it; empty where they name none."""
    known = {name.removeprefix("--"): value for name, value in pairwise(flags) if name.startswith(("--fp8-", "--fp4-"))}
    if "fp4-format" in known:
        kind = known.get("fp4-recipe", "nvfp4")
        if kind != "nvfp4":
            raise FileError(f"--fp4-recipe {kind} cannot be read as a policy", fix="nvfp4")
        return BUILTIN_RECIPES["nvfp4"].to_dict()
    if "fp8-format" not in known:
        return {}
    kind = known.get("fp8-recipe", "delayed")
    if kind != "delayed":
        training = {"fp8_quantization_recipe": kind, "fp8_format": known["fp8-format"]}
        return _megatron_recipe("--fp8-recipe", {"training_recipe": training}, {}, notes)[1]
    numbers = {key: int(known[f"fp8-{key}".replace("_", "-")]) for key in ("margin", "amax_history_len")
               if known.get(f"fp8-{key}".replace("_", "-"), "").isdecimal()}  # fmt: skip
    keys = {"fp8_format": known["fp8-format"], **numbers}
    body = _te_recipe(keys, notes, history=1, algo=known.get("fp8-amax-compute-algo", "most_recent"))
    return dict(body["recipes"]["fp8_delayed"])


def _edges(flags: Sequence[str], layers: Sequence[str]) -> list[dict[str, Any]]:
    """Return rules for the first and last blocks that Megatron's flags keep in bf16 (one at each end by default).

    Raises:
        FileError: the last ones are meant, and nothing says how many blocks there are.
    """
    if "--first-last-layers-bf16" not in flags:
        return []
    counts = [(name, value) for name, value in pairwise(flags) if name.startswith("--num-layers")]
    known = {name: int(value) for name, value in counts if value.isdecimal()}
    first, last = (known.get(f"--num-layers-at-{end}-in-bf16", 1) for end in ("start", "end"))
    numbers = [int(found[1]) for name in layers if (found := re.search(r"decoder\.layers\.(\d+)\.", name))]
    depth = known.get("--num-layers", max(numbers, default=-1) + 1)
    if last and not depth:
        fix = "give the names of the model's layers (--layers), or write --num-layers N beside the other flags"
        raise FileError(f"the last {last} blocks are kept in bf16, and how many there are is not known", fix=fix)
    kept = sorted({*range(first), *range(max(0, depth - last), depth)})
    return [{"match": f"*decoder.layers.{block}.*", "recipe": "bf16", "optional": True} for block in kept]


def _megatron(
    document: Mapping[str, Any], layers: Sequence[str], notes: list[str], flags: Sequence[str]
) -> dict[str, Any]:
    """Return a policy's body: matchers that say so hold in any block, then the blocks that stay high, then the rest."""
    configs, matchers = document.get("configs"), document.get("matchers")
    if not isinstance(configs, Mapping) or not isinstance(matchers, Mapping):
        raise FileError("configs and matchers must be mappings")
    recipes: dict[str, Any] = {"bf16": {"format": "bf16"}}
    rules: list[dict[str, Any]] = []
    everywhere: list[dict[str, Any]] = []
    evaluation: dict[str, Any] = {}
    inherited, edges = _inherited(flags, notes), _edges(flags, layers)
    for key, matcher in matchers.items():
        if not isinstance(matcher, Mapping) or not matcher.get("enabled", False):
            if "enabled" not in (plain(matcher) or {}):
                notes.append(f"matcher '{key}' does not say 'enabled: true', so Megatron passes over it: left out")
            continue
        if matcher.get("type") != "glob" or matcher.get("config") not in configs or not matcher.get("pattern"):
            raise FileError(f"matcher '{key}' needs type: glob, a pattern, and a config that exists")
        config = configs[matcher["config"]] or {}
        name, recipe = _megatron_recipe(str(matcher["config"]), config, inherited, notes)
        if recipe:
            recipes[name] = recipe
        training = config.get("training_recipe") or {}
        kind = config.get("transformer_engine_config_type", _TE_CONFIG)
        if kind != _TE_CONFIG:
            raise FileError(f"config '{matcher['config']}' is a {kind}", fix=f"only {_TE_CONFIG} is read")
        if config.get("evaluation_recipe") not in (None, training):
            evaluation[name] = plain(config["evaluation_recipe"])
        beyond_edges = training.get("override_nonquantized_autocast", False)
        holds = not edges or beyond_edges or not recipe
        if holds and recipe and rules and edges:
            notes.append(f"matcher '{key}' also quantises the blocks that stay in bf16; here it comes after those")
        part = everywhere if holds and not rules else rules
        part.append({"match": str(matcher["pattern"]), "recipe": name, "optional": True})
    ordered = [*everywhere, *edges, *rules]
    if inherited:
        recipes["from_flags"] = inherited
        # the linear layers of a block; routers, embedding and output layer are not Transformer Engine's
        ordered += [{"match": "*.router", "recipe": KEEP, "optional": True}]
        ordered += [{"match": "*.layers.*", "recipe": "from_flags", "optional": True}]
    else:
        notes.append("layers that no matcher names inherit Megatron's own flags; here they are 'keep'")
    activations = "fp16" if "--fp16" in flags else "bf16"
    body = {"recipes": recipes, "layers": ordered, "default": "keep", "activations": activations}
    return body | ({"evidence": {"evaluation": evaluation}} if evaluation else {})


def _megatron_recipe(key: str, config: Any, inherited: dict[str, Any], notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Return (recipe name, recipe document); an empty document means a name that exists already."""
    training = section(config or {}, "training_recipe", TRAINING_KEYS)
    if training.get("override_quantized_autocast") is False:
        if inherited:
            return key, inherited
        notes.append(
            f"config '{key}' inherits the global FP8 recipe of the command line, which is not here: read as keep; "
            "write its flags into megatron_flags.txt beside this file"
        )
        return "keep", {}
    if training.get("fp4_quantization_recipe") == "nvfp4":
        return key, BUILTIN_RECIPES["nvfp4"].to_dict()
    name = training.get("fp8_quantization_recipe")
    if name is None:
        return "bf16", {}
    kind = next((kind for kind, word in NAMES.items() if word == name), None)
    if kind is None:
        fix = ", ".join(NAMES.values())
        raise FileError(f"config '{key}': recipe '{name}' cannot be read as a policy", fix=fix)
    return key, read_recipe(kind, training.get("fp8_format", "e4m3"))
