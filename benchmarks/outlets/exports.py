"""Exports under the real libraries: what each target's own code makes of them, and two steps of training where it can.

    python benchmarks/outlets/exports.py [--targets torchao,accelerate] [--why]

A target counts as loaded when its own loader, parser or schema reads every policy of the conformance suite, and what it
reads is what the suite's independent reader reads. Losses are compared with AutoPrec's own application of the policy in
emulation: same weights, same batches, two steps of AdamW. A package that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from autoprec import Policy
from autoprec.applying.policy import apply_policy
from autoprec.errors import MissingDependencyError
from autoprec.export import EXPORTERS, Export, Request, exporter
from autoprec.policy import policy_from_dict
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.exporters import (
    MODELS,
    POLICIES,
    differences,
    random_policy,
    setting_differences,
    superfluous,
)
from tests.export import real
from tests.export.readers import read

#: The loss of a step is a mean over the batch computed in FP32; what goes into it was rounded to bf16 (8 bits).
ROUNDING = 2.0**-8
RANDOM = 40
#: Two steps run under the policies that a target can express on this model; the last is the one of the table.
_CASES = {"bf16": "bf16", "fp8": "fp8_tensorwise", "fp8 rows": "fp8_rowwise"}
_PLAIN = "def converters():\n    return []\n"
_NEEDS_GPU = {"transformer-engine", "megatron", "dlfw-inspect", "torchao-fqn"}
#: Targets whose own code is not asked: version or commit, and why.
_NOT_ASKED = {
    "msamp": ("0.4.0", "does not install outside its container"),
    "automodel": ("36044ad", "read from its source, not installed"),
}


@dataclass
class Row:
    """One target: what happened, in the words of the table."""

    target: str
    version: str = ""
    loaded: str = "-"
    ran: str = "-"
    gap: str = "-"


def loaded(target: str) -> str:
    """Load every policy of the suite with the target's own code, and compare with the independent reader."""
    layers = real.LAYERS[target]() if target in real.LAYERS else MODELS["gpt"]
    for name, policy in POLICIES.items():
        request = Request(policy, layers, name)
        done = exporter(target).export(request)
        theirs, ours = real.LOADERS[target](done, request), read(done, request)
        if theirs != ours:
            wrong = [n for n in request.layers if theirs.layers[n] != ours.layers[n]]
            wrong += [n for n in ours.settings if theirs.settings.get(n) != ours.settings[n]]
            return f"'{name}' is read as something else: {', '.join(wrong[:3])}"
    return f"yes, {len(POLICIES)} of {len(POLICIES)}"


def _policy(recipe: str, target: str) -> Policy:
    """The recipe on every layer but the ends, which some targets never convert, with a product of one layer in bf16."""
    names = {recipe, "bf16"}
    rules: list[dict[str, Any]] = [{"match": match, "recipe": "bf16"} for match in ("stem", "head")]
    if target in ("python", "lightning", "torchao", "accelerate") and recipe != "bf16":
        rules.append({"match": "fc2", "recipe": recipe, "gemms": {"wgrad": "bf16"}})
    document = {
        "schema": "autoprec.policy/1",
        "recipes": {name: BUILTIN_RECIPES[name].to_dict() for name in names},
        "layers": rules,
        "default": recipe,
        "activations": "bf16",
    }
    return policy_from_dict(document, cls=Policy)


def _batches(width: int = 32, out: int = 16) -> real.Batches:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(64, width, generator=draw), torch.randn(64, out, generator=draw)) for _ in range(2)]


def _model() -> real.SmallModel:
    torch.manual_seed(7)
    return real.SmallModel()


def two_steps(target: str, recipe: str) -> tuple[list[float], list[float]]:
    """Return the losses of two steps under the target and under AutoPrec's own application."""
    if target == "torchtitan":
        return _titan_steps(recipe)
    policy = _policy(recipe, target)
    done = exporter(target).export(Request(policy, ("stem", "fc1", "fc2", "head")))
    theirs = real.TRAINERS[target](done, _model(), _batches())
    ours, batches = _model(), _batches()
    apply_policy(policy, ours, backend="emulated")
    return theirs, real.losses_of(ours, batches)


def _titan_steps(recipe: str) -> tuple[list[float], list[float]]:
    document = {
        "schema": "autoprec.policy/1",
        "recipes": {name: BUILTIN_RECIPES[name].to_dict() for name in {recipe, "bf16"}},
        "layers": [{"match": "lm_head", "recipe": "bf16"}],
        "default": recipe,
        "activations": "bf16",
    }
    policy = policy_from_dict(document, cls=Policy)
    done = exporter("torchtitan").export(Request(policy, real.titan_names()))
    theirs = real.train_torchtitan(done, _model(), _batches(256, 2048))
    ours = real.TitanBlock(real.titan_converted(Export("torchtitan", {"precision_torchtitan.py": _PLAIN})))
    apply_policy(policy, ours, backend="emulated")
    return theirs, real.losses_of(ours, _batches(256, 2048))


def ran(target: str) -> tuple[str, str]:
    """Return (what ran, the largest relative gap of a loss) over the policies that the target can express."""
    cases = ["bf16", "fp8_rowwise"] if target == "torchtitan" else [*_CASES.values()]
    worst = 0.0
    for recipe in cases:
        theirs, ours = two_steps(target, recipe)
        worst = max(worst, *(abs(a - b) / abs(b) for a, b in zip(theirs, ours, strict=True)))
    return f"{', '.join(cases)}", f"{'yes' if worst <= ROUNDING else 'no'} ({worst:.1e})"


def row(target: str, *, why: bool = False) -> Row:
    """Load and run one target; what fails is said in its row."""
    found = Row(target, real.version(target))
    if target in _NOT_ASKED:
        return Row(target, *_NOT_ASKED[target])
    try:
        found.loaded = _silent(loaded, target)
    except MissingDependencyError as error:
        found.loaded = f"not installed here: {error.what}"
        return found
    except Exception as error:
        found.loaded = f"no: {type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
        if why:
            traceback.print_exc()
    if target in _NEEDS_GPU:
        found.ran = "needs a GPU"
        return found
    try:
        found.ran, found.gap = _silent(ran, target)
    except Exception as error:
        found.ran = f"no: {type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
        if why:
            traceback.print_exc()
    return found


def _silent(call: Any, *args: Any) -> Any:
    with real.quiet():
        return call(*args)


def unlisted() -> tuple[int, int, int]:
    """Return (losses unlisted, losses listed that are none, exports read) of the random policies, by every target."""
    missing = wrong = count = 0
    for target in EXPORTERS:
        for seed in range(RANDOM):
            layers = MODELS[[*MODELS][seed % len(MODELS)]]
            request = Request(random_policy(seed), layers, f"policy {seed}")
            done = exporter(target).export(request)
            try:
                found = _silent(read, done, request)
            except MissingDependencyError:
                continue
            count += 1
            missing += len(differences(request, done, found.layers, found.settings))
            missing += len(setting_differences(request, done, found.settings))
            wrong += len(superfluous(request, done, found.layers, found.settings))
    return missing, wrong, count


def main(only: list[str], why: bool) -> None:
    rows = [row(target, why=why) for target in EXPORTERS if not only or target in only]
    print("| target | version | loaded by its own code | two steps on a CPU | losses equal (largest relative gap) |")
    print("|---|---|---|---|---|")
    for one in rows:
        print(f"| `{one.target}` | {one.version or '-'} | {one.loaded} | {one.ran} | {one.gap} |")
    if only:
        return
    installable = [one for one in rows if one.target not in _NOT_ASKED]
    read_by = sum(one.loaded.startswith("yes") for one in installable)
    equal = [one for one in rows if one.gap != "-"]
    print(f"export targets loaded by their real library: {read_by} of {len(installable)} that install on a CPU")
    print(f"losses of two steps equal: {sum(one.gap.startswith('yes') for one in equal)} of {len(equal)} that run here")
    missing, wrong, count = unlisted()
    print(f"losses unlisted: {missing}; listed and not lost: {wrong} ({RANDOM} policies, {count} exports read back)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", default="", help="these alone, without the figures of all")
    parser.add_argument("--why", action="store_true", help="print where a target failed")
    given = parser.parse_args()
    main([name for name in given.targets.split(",") if name], given.why)
