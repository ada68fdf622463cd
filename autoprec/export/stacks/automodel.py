"""``--to automodel``: NeMo Automodel's YAML, whose FP8 is torchao's (``fp8``) or Transformer Engine's (``te_fp8``).

``fp8`` converts every ``nn.Linear`` whose name holds none of ``filter_fqns`` (substrings), by one of torchao's recipe
names. ``te_fp8`` has one recipe for what is built of Transformer Engine's layers: the linear ones (``linear: te``),
the grouped experts (``experts: te``) or both; ``experts: torch_mm_mxfp8`` is torchao's grouped product in MXFP8.
Routers are neither. (nemo_automodel/components/quantization/fp8.py and models/common/utils.py of commit 36044ad.)
The model trains under FSDP2's mixed precision: products in bf16, weights as ``torch_dtype`` stores them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoprec.errors import FileError, UnknownNameError
from autoprec.export.base import Losses, Request, Written
from autoprec.export.naming import header, substrings
from autoprec.export.settings import LOST_IN_BF16, report_settings
from autoprec.export.stacks.torchao import NAMED
from autoprec.export.stacks.transformer_engine import SCALINGS, builtin_plan
from autoprec.export.summary import lose, main_plan
from autoprec.export.words import Words, as_rule, section
from autoprec.policy import LayerPlan, dump_yaml, escape, glob_matches
from autoprec.precision.recipes import BUILTIN_RECIPES

_TE = Words(
    "Transformer Engine's {} recipe",
    {
        word: builtin_plan(SCALINGS[kind][1])
        for word, kind in {"current": "tensor", "block": "block", "mxfp8": "mxfp8"}.items()
    },
)
_MX = BUILTIN_RECIPES["mxfp8"]
#: It asks torchao for the weight's gradient in high precision (components/moe/mxfp8.py, ``wgrad_with_hp``).
_GROUPED = Words("Automodel's {} experts", {"torch_mm_mxfp8": LayerPlan(fprop=_MX, dgrad=_MX)})
#: Which layers each kind is, by their names in Automodel's models; the first glob that matches decides.
_KINDS = {"*.gate": "router", "*.router": "router", "*.experts.*": "experts", "*": "linear"}
#: Dispatchers of tokens without which Transformer Engine's experts become ``torch_mm``.
_DISPATCHERS = ("deepep", "hybridep", "uccl_ep", "mok")
#: Fields of its FP8Config; what is not read here says how FP8 is run, not where.
_FP8_KEYS = (
    *("enabled", "recipe_name", "filter_fqns", "enable_fsdp_float8_all_gather", "emulate"),
    *("precompute_float8_dynamic_scale_for_fsdp", "force_recompute_fp8_weight_in_bwd"),
)

_KEPT = dict.fromkeys(("loss", "output"), "MaskedCrossEntropy casts the logits to fp32 (fp32_upcast)")


@dataclass(frozen=True, slots=True)
class _Setup:
    """A way to set Automodel up: its sections, the word of each kind of layer, and parts of names that are skipped."""

    sections: dict[str, Any]
    words: Mapping[str, tuple[Words, str]]
    skipped: Sequence[str] = ()

    def of(self, name: str) -> tuple[Words, str]:
        if any(part in name for part in self.skipped):
            return NAMED, ""
        kind = next(kind for glob, kind in _KINDS.items() if glob_matches(glob, name))
        return self.words.get(kind, (NAMED, ""))


def _torchao(recipe: str, skipped: Sequence[str]) -> _Setup:
    section = {"enabled": True, "recipe_name": recipe, "filter_fqns": list(skipped)}
    return _Setup({"fp8": section}, dict.fromkeys(_KINDS.values(), (NAMED, recipe)), skipped)


def _te(recipe: str, linear: str, experts: str) -> _Setup:
    backend: dict[str, Any] = {"linear": linear, "experts": experts}
    words = {"linear": (_TE, recipe)} if linear == "te" else {}
    if experts == "te":
        backend["dispatcher"] = _DISPATCHERS[0]
        words["experts"] = (_TE, recipe)
    elif experts in _GROUPED.plans:
        words["experts"] = (_GROUPED, experts)
    if "te" in (linear, experts):
        backend["te_fp8"] = {"recipe": recipe}
    return _Setup({"model": {"backend": backend}}, words)


def _setups(plans: Mapping[str, LayerPlan]) -> Iterator[_Setup]:
    yield _Setup({"fp8": {"enabled": False}}, {})
    near = {name: NAMED.nearest(plan) for name, plan in plans.items()}
    for recipe in NAMED.plans:
        taken = [name for name in near if near[name] == recipe]
        yield _torchao(recipe, substrings([name for name in near if near[name] != recipe], taken)[0])
    for recipe in _TE.plans:
        for linear, experts in (("te", "te"), ("te", "torch_mm"), ("torch", "te"), ("te", "torch_mm_mxfp8")):
            yield _te(recipe, linear, experts)
    yield _te("", "torch", "torch_mm_mxfp8")


def write(request: Request, losses: Losses) -> Written:
    """Return ``automodel_precision.yaml``: of all ways to set Automodel up the one that is nearest to the policy."""
    asked, main = request.policy.activations, main_plan(request)
    plans = request.plans() or {"": main or LayerPlan()}

    @functools.cache
    def lost(plan: LayerPlan, table: Words, word: str) -> str:
        return table.lost(plan, word, "bf16", asked)

    def cost(setup: _Setup) -> tuple[int, int]:
        """Layers that lose their low precision or get one, and all that run otherwise."""
        low = sum(bool(setup.of(name)[1]) != bool(plan.scaled) for name, plan in plans.items())
        return low, sum(bool(lost(plan, *setup.of(name))) for name, plan in plans.items())

    best = min(_setups(plans), key=cost)
    why = "" if request.layers else "parts of names need layer names, pass --layers"
    lose(losses, request, lambda plan, name: lost(plan, *best.of(name)), why)
    mixed = "bf16 (FSDP2's mixed precision)"
    said = "Automodel scales no loss"
    report_settings(request, losses, said, kept=_KEPT, lost=LOST_IN_BF16, autocast=False, activations=mixed)
    document = {**best.sections, "model": {"torch_dtype": "float32", **best.sections.get("model", {})}}
    notes = ["merge the sections into your recipe; names of layers must be those of Automodel's model"]
    notes += [_SIXTEEN] if document.get("fp8", {}).get("enabled") else []
    return {"automodel_precision.yaml": header(request, "NeMo Automodel") + dump_yaml(document)}, notes


_SIXTEEN = "Automodel leaves linear layers whose sizes are not multiples of 16 in bf16"


def read(document: Mapping[str, Any], _layers: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """Return the body of a policy from an Automodel recipe.

    Args:
        document: the recipe, parsed.
        _layers: not needed: rules name parts of names.
        notes: receives what a person should know.

    Raises:
        FileError: two sections ask for FP8, or one for what Automodel would refuse.
        UnknownNameError: a recipe that it does not have.
    """
    model, eight = section(document, "model"), section(document, "fp8", _FP8_KEYS)
    backend = section(model, "backend")
    te, on = section(backend, "te_fp8"), eight.get("enabled", False) is True
    if on and te:
        raise FileError("fp8 and model.backend.te_fp8 both ask for FP8", fix="leave one of them out")
    experts = str(backend.get("experts", "torch_mm"))
    if experts == "te" and backend.get("dispatcher", "deepep") not in _DISPATCHERS:
        notes.append(f"experts: te runs as torch_mm under dispatcher: {backend['dispatcher']}")
        experts = "torch_mm"
    setup = _Setup({}, {})
    if on:
        setup = _torchao(_known("fp8.recipe_name", eight.get("recipe_name") or "tensorwise", NAMED), _skipped(eight))
        notes.append(_SIXTEEN)
    elif te:
        setup = _te(
            _known("te_fp8.recipe", te.get("recipe", "current"), _TE), str(backend.get("linear", "te")), experts
        )
        if not any(table is _TE for table, _ in setup.words.values()):
            raise FileError("te_fp8 and no layer of Transformer Engine", fix="backend.linear: te, or experts: te")
    elif experts in _GROUPED.plans:
        setup = _te("", "torch", experts)
    if str(model.get("torch_dtype", "bf16")) not in ("float32", "torch.float32", "fp32"):
        notes.append(
            "torch_dtype stores the weights in bf16, and so what the optimizer makes of them; not in the policy"
        )
    recipes: dict[str, Any] = {}
    rules = [as_rule(f"*{escape(part)}*", LayerPlan(), recipes) for part in setup.skipped]
    for glob, kind in _KINDS.items() if setup.words else ():
        table, word = setup.words.get(kind, (NAMED, ""))
        rules.append(as_rule(glob, table.plans.get(word, LayerPlan()), recipes))
    return {"recipes": recipes, "layers": rules, "default": "keep", "activations": "bf16"}


def _known(where: str, word: Any, table: Words) -> str:
    if str(word) not in table.plans:
        raise UnknownNameError("recipe", str(word), table.plans, where=where)
    return str(word)


def _skipped(eight: Mapping[str, Any]) -> list[str]:
    found = eight.get("filter_fqns") or []
    if not isinstance(found, list) or not all(isinstance(part, str) and part for part in found):
        raise FileError("fp8.filter_fqns is not a list of parts of names", fix="filter_fqns: [lm_head]")
    return found
