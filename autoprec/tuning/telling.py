"""What a search says before its first run: what is searched, and what the bound of the gain means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from autoprec.cost import Verdict
from autoprec.cost.device.cpu import UNCALIBRATED
from autoprec.precision.recipes import KEEP
from autoprec.support.plain import Document
from autoprec.support.units import speed_text
from autoprec.trial.command import ScriptCommand
from autoprec.tuning.events import SearchInfo
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import slow_sixteen_bit

ONLY_SIXTEEN_BIT = (
    "no choice beyond 16 bit can gain at these shapes and the script is not in 16 bit yet: only 16-bit policies are "
    "tried (--force searches the whole space)"
)
ONE_THREAD = "with --workers above 1 each trial has one thread, and its speed-up is that of one thread; a duel has all"
NOTHING_KNOWN = "the rates of this CPU could not be measured beforehand; the trials decide"
STANDS_IN = "if the model stands in for a larger one, judge it at that size: --cost-scale width=16,depth=4,tokens=32"


def introduction(
    setup: Setup, command: ScriptCommand, options: SearchOptions, storage: str, variant: Document | None
) -> SearchInfo:
    """Return what is told of a search before its first run: model, device, choices and budget.

    Args:
        options: the options as they were given; those of ``setup`` may be narrowed.
        storage: its address, without a password.
        variant: the row of the variant that it is of; None for the script as it was given.
    """
    host, graph = setup.host, setup.graph
    asked = {key: value for key, value in asdict(setup.options).items() if key not in ("command", "track")}
    named = typed(variant) if variant is not None else None
    return SearchInfo(
        study=options.study,
        script=command.label,
        target=setup.target.name,
        source=setup.source,
        launch=host.launch,
        device=host.device,
        model=graph.model,
        groups={group.name: group.layers for group in setup.problem.groups},
        notes=(*host.notes, *graph.notes),
        study_dir=str(options.study_dir()),
        storage=storage,
        trials=options.trials,
        resume_command=options.resume_command(stored=True),
        options=asked | {"variant": named, "variants": options.variant or None},
        folder=str(command.folder),
    )


def verdict_text(setup: Setup, verdict: Verdict) -> str:
    """Return the bound in words: beside real timings it covers GEMMs, not attention or casts, and claims no more."""
    if not setup.measured:
        return verdict.reason
    if setup.cost.label.startswith(UNCALIBRATED):
        return NOTHING_KNOWN
    if verdict.kind == "stay":
        return f"{verdict.reason}. This is by the cost model, and the trials check it"
    what = "GEMMs" if verdict.execution == KEEP else "torch.compile and GEMMs"
    bound = speed_text(verdict.bound_speedup, verdict.low, verdict.high)
    return f"{what} could gain about {bound} by the cost model; the trials decide"


def notes_of_bound(setup: Setup, *, narrow: bool, beyond: bool) -> Iterator[str]:
    """Yield what follows from the bound.

    Args:
        narrow: only 16-bit policies are tried.
        beyond: the bound is worth a search of the whole space.
    """
    if narrow:
        yield ONLY_SIXTEEN_BIT
    if setup.measured and setup.target.is_cpu:
        if not setup.is_timed_alone:
            yield ONE_THREAD
        if slow := slow_sixteen_bit(setup.graph):
            yield slow
    if not beyond and not setup.measured and not setup.options.cost_scale:
        yield STANDS_IN


def typed(variant: Document) -> str:
    """Return a variant, a row of the result, as it is given on the command line."""
    return f"{variant['name']}: {variant['arguments']}"
