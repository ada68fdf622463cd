"""Old FP8 recipe arguments: translated into a policy, or refused with the reason; never silently dropped.

The arguments are those of accelerate's ``FP8RecipeKwargs`` / ``TERecipeKwargs`` and Transformer Engine's
``DelayedScaling``. Two of them are dead: ``interval`` (unused since TE 1.4, gone in 2.3) and
``override_linear_precision`` (gone in TE 2.0); TE and accelerate still accept and ignore both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoprec.errors import PolicyError, UnknownNameError
from autoprec.policy.document import policy_from_dict
from autoprec.policy.schema import Policy
from autoprec.precision.recipes import GEMMS

__all__ = ["LEGACY_ARGUMENTS", "policy_from_recipe_arguments"]

#: What each old argument becomes.
LEGACY_ARGUMENTS: dict[str, str] = {
    "margin": "scaling.margin",
    "interval": "must be 1: scales are computed in every step",
    "fp8_format": "operands: HYBRID is e4m3/e4m3/e5m2, E4M3 is e4m3 everywhere",
    "amax_history_len": "scaling.amax_history_len",
    "amax_compute_algo": "scaling.amax_compute_algo",
    "override_linear_precision": "gemms: a GEMM marked True runs in bf16",
    "backend": "TE only; MSAMP is a level (O1, O2, O3)",
    "opt_level": "MSAMP only",
    "use_autocast_during_eval": "no effect: a policy acts in training and evaluation alike",
    "use_during_eval": "no effect: a policy acts in training and evaluation alike",
}


def _refuse(argument: str, value: Any, why: str, fix: str) -> PolicyError:
    return PolicyError(f"{argument}={value!r}: {why}", where="recipe arguments", fix=fix)


def _integer(arguments: Mapping[str, Any], name: str, default: int) -> int:
    value = arguments.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refuse(name, value, "this is no integer", f"write an integer, e.g. {name}={default}")
    return value


def _gemm_overrides(value: Any) -> dict[str, str]:
    if not isinstance(value, (tuple, list)) or len(value) != 3 or not all(isinstance(item, bool) for item in value):
        raise _refuse(
            "override_linear_precision",
            value,
            "this is not three booleans (fprop, dgrad, wgrad)",
            "e.g. (False, False, True) keeps wgrad in high precision",
        )
    return {gemm: "bf16" for gemm, high in zip(GEMMS, value, strict=True) if high}


def _backend(arguments: Mapping[str, Any]) -> None:
    backend = str(arguments.get("backend", "TE")).upper()
    if backend not in ("TE", "MSAMP"):
        raise UnknownNameError("backend of recipe arguments", backend, ["TE", "MSAMP"], where="recipe arguments")
    if backend == "MSAMP":
        level = arguments.get("opt_level", "O2")
        raise _refuse(
            "backend", "MSAMP", "a level is no GEMM recipe", f"use level '{level}' of autoprec.policy.levels instead"
        )
    if "opt_level" in arguments:
        raise _refuse("opt_level", arguments["opt_level"], "only MS-AMP has levels", "remove it")


def policy_from_recipe_arguments(arguments: Mapping[str, Any], *, match: str = "*") -> tuple[Policy, list[str]]:
    """Translate old recipe arguments.

    Args:
        arguments: keyword arguments as they were given; names are checked.
        match: glob of the layers the recipe was meant for.

    Returns:
        The policy, and one note for every argument that had no effect then and has none now.

    Raises:
        UnknownNameError: an argument nobody knows, with the nearest one.
        PolicyError: a value that no policy can express; the message says why and what to write instead.
    """
    for name in arguments:
        if name not in LEGACY_ARGUMENTS:
            raise UnknownNameError("recipe argument", name, LEGACY_ARGUMENTS, where="recipe arguments")
    _backend(arguments)
    notes = []
    interval = _integer(arguments, "interval", 1)
    if interval != 1:
        raise _refuse(
            "interval",
            interval,
            "Transformer Engine has ignored it since 1.4; scales are computed in every step",
            "remove it, or set it to 1",
        )
    if "interval" in arguments:
        notes.append("interval=1: has no effect, scales are computed in every step")
    for name in ("use_autocast_during_eval", "use_during_eval"):
        if name in arguments:
            notes.append(f"{name}: {LEGACY_ARGUMENTS[name]}")
    fmt = str(getattr(arguments.get("fp8_format", "HYBRID"), "name", arguments.get("fp8_format", "HYBRID"))).upper()
    if fmt == "E5M2":
        raise _refuse("fp8_format", fmt, "pure E5M2 GEMMs do not exist on any GPU", "use HYBRID or E4M3")
    if fmt not in ("HYBRID", "E4M3"):
        raise UnknownNameError("fp8_format", fmt, ["HYBRID", "E4M3"], where="recipe arguments")
    algorithm = arguments.get("amax_compute_algo", "most_recent")
    if callable(algorithm):
        raise _refuse(
            "amax_compute_algo", algorithm, "a function cannot be written to a file", "use max or most_recent"
        )
    scaling = {
        "granularity": "tensor",
        "scale": "delayed",
        "margin": _integer(arguments, "margin", 0),
        "amax_history_len": _integer(arguments, "amax_history_len", 1024),
        "amax_compute_algo": algorithm,
    }
    operands = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2" if fmt == "HYBRID" else "e4m3"}
    recipes: dict[str, Any] = {"fp8_delayed": {"format": "fp8", "scaling": scaling, "operands": operands}}
    rule: dict[str, Any] = {"match": match, "recipe": "fp8_delayed"}
    overrides = _gemm_overrides(arguments.get("override_linear_precision", (False, False, False)))
    if overrides:
        recipes["bf16"] = {"format": "bf16"}
        rule["gemms"] = overrides
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": [rule], "activations": "bf16"}
    return policy_from_dict(document, where="recipe arguments"), notes
