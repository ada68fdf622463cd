"""Who runs the quantised layers is decided by measurement, once in a search: the best preset by each library.

A product of one recipe takes another time by torch's own kernels, by torchao's and by Transformer Engine's, and which
is fastest depends on the model, the card and whether the script compiles. So once what people write by hand was run,
the fastest of it that quantises is timed in one duel, once by each library that is installed and trains its formats.
The winner is what ``auto`` is for the rest of the search and for the policy that is written: in its evidence, whose
rows :mod:`autoprec.applying.binding` reads. One that cannot run the preset is left out, and the others decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoprec.policy import Policy
from autoprec.support.optional import is_available
from autoprec.support.plain import Document
from autoprec.support.units import speed_text
from autoprec.trial.intervals import FEWEST, ratio_interval

#: The section of a policy's evidence, and the tag of the duel that decided it.
BACKENDS = "backends"
#: torch's own products, which run where nothing else was found to be faster.
NATIVE = "native"
#: Libraries beside them, with the formats that they train.
FORMATS: Mapping[str, frozenset[str]] = {
    "torchao": frozenset({"fp8", "mxfp8"}),
    "transformer_engine": frozenset({"fp8", "mxfp8", "nvfp4"}),
}


def able(policy: Document) -> list[str]:
    """Return who may run a policy's quantised layers: native, and each library installed that trains a format of them.

    Whether one can run these layers on this device is known once it is tried. Nothing for a policy that has none.
    """
    formats = {recipe.format for recipe in Policy.model_validate(policy).recipes.values() if recipe.scaled}
    libraries = [name for name, known in FORMATS.items() if formats & known and is_available(name)]
    return [NATIVE, *libraries] if formats else []


def run_by(document: Document, row: Mapping[str, object]) -> Document:
    """Return a policy whose evidence says who runs its quantised recipes.

    Args:
        document: of the policy.
        row: of the evidence, with ``backend``; empty changes nothing.
    """
    recipes = Policy.model_validate(document).recipes if row else {}
    known = frozenset[str]().union(*FORMATS.values())
    rows = {name: dict(row) for name, recipe in recipes.items() if recipe.format in known}
    return {**document, "evidence": {**document.get("evidence", {}), BACKENDS: rows}} if rows else document


def row_of(document: Document) -> Document:
    """Return the row that :func:`run_by` has written; empty for none."""
    rows = document.get("evidence", {}).get(BACKENDS, {})
    return dict(next(iter(rows.values()), {}))


def fastest(rounds: Sequence[Mapping[str, float]], names: Sequence[str], device: str) -> Document:
    """Return the evidence's row of the fastest backend; empty where none was timed.

    The first that was timed stays where no other is surely faster; one that was not timed is left out.

    Args:
        rounds: milliseconds per step by backend, round by round.
        names: of the backends that were asked, native first.
        device: they ran on: ``cpu`` or ``cuda``.
    """
    timed = [name for name in names if sum(name in one for one in rounds) >= FEWEST]
    if not timed:
        return {}
    base, *others = timed
    over = {name: found for name in others if (found := ratio_interval(rounds, base, name)) is not None}
    faster = {name: found for name, found in over.items() if found[1] > 1.0}
    best = max(faster, key=lambda name: faster[name][0], default=base)
    row: Document = {"backend": best, "device": device}
    if best != base:
        middle, low, high = (round(bound, 4) for bound in over[best])
        why = f"{speed_text(*over[best])} over {base}, timed beside it"
        return row | {"reason": why, "speedup": middle, "low": low, "high": high}
    told = ", ".join(f"{name} is {speed_text(*found)} over it" for name, found in over.items())
    return row | {"reason": f"no other is surely faster: {told}" if told else "no other that is installed runs it here"}
