"""Variants: other ways to run the same optimisation step, beside the script as it was given.

A larger micro-batch with fewer accumulations, no activation checkpointing, torch.compile: such arguments change how
long a step takes and not what it computes, and which precision is fastest may depend on them. A variant under which the
script's losses, one for each optimizer step, are not those of the script as given changes the training and is refused.

:func:`choose` times the script itself under every variant, in runs that take turns. The fastest is the reference of the
search, whose parameter ``variant`` has all that are accepted: what a person writes by hand is run under those that are
nearly as fast as well, and what that teaches of a variant's time says whether a policy is worth a run under it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.support.units import percent_text, speed_text
from autoprec.trial.command import ScriptCommand, parse_variants
from autoprec.trial.intervals import FEWEST, median_interval
from autoprec.trial.protocol import OUT_OF_TIME, PATIENCE_S, REFERENCE, HostInfo, TrainSpec, TrialResult
from autoprec.tuning.decide.metrics import divergence, step_time
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.paired import baseline_of
from autoprec.tuning.study.kept import KeptAnswers
from autoprec.tuning.timing.in_turns import STEPS_APART, WARMUP_APART, take_turns, times_of
from autoprec.tuning.workers.local import HostPool, RunnerFactory

#: Share of a time budget that variants may take before the search.
SHARE = 0.4
#: A variant under which one run of the script is slower by more than this factor is not timed.
_CLOSE = 1.03
#: One under which the script is slower than under the fastest by no more than this factor may be fastest with a policy.
NEAR = 1.1
#: The script without further arguments, as a value of the parameter ``variant``; the status of one left out for time.
AS_GIVEN, NOT_TRIED = "as given", "not tried"
#: Half the width of a speed-up's interval that ends the rounds.
_PRECISE = 0.03
#: Seconds of its own without a step after which a variant hangs.
_HUNG_S = 300.0
#: How many times as long as the script as given one may take to the end of its first run, whatever is left for others.
_SLOWER = 2.0
#: Losses apart by less are float32 rounding of another order of sums.
_ROUNDING = 1e-6

Row = dict[str, Any]
#: Seconds that the time budget leaves for variants.
Left = Callable[[], float]


def choose(
    options: SearchOptions,
    command: ScriptCommand,
    hosts: Callable[[ScriptCommand, float], RunnerFactory],
    folder: Path,
    left: Left,
    keep: ExitStack,
    answers: Callable[[HostInfo], KeptAnswers],
) -> tuple[list[Row], dict[str, HostPool]]:
    """Time the script under each variant; the row of the fastest that is surely faster says ``chosen``.

    Args:
        hosts: starts a command that may take so many seconds to its first step.
        folder: for logs.
        keep: closes the hosts that go on.
        answers: returns those that an earlier session was given, by what the host of the script as given found.

    Returns:
        A row of the result for each variant; none where the script itself does not run as it was given, which the
        search then says. And the hosts that a search may need, by the variant's name; the others are closed.
    """
    spec = TrainSpec(steps=options.steps, warmup=options.warmup, anneal=True, timeout_s=_HUNG_S, alone=True)
    rows: list[Row] = []
    given = keep.enter_context(HostPool(hosts(command, PATIENCE_S), folder / "as-given"))
    pools, info = {AS_GIVEN: given}, given.info()
    known = answers(info)
    spec = replace(spec, seed=None if info.launch == "fork" else options.seed)
    runs = [spec, spec, replace(spec, perturb="bf16")] if left() > 0 else []
    results = [known.ask(one, given.host().run) for one in runs]
    if not all(result.ok for result in results):
        return [], pools
    needed = info.setup_s + results[0].wall_s if results else math.inf
    best: Row = {"name": "the script as given", "speedup": 1.0}
    ran: list[tuple[Row, HostPool]] = []
    variants = parse_variants(options.variant)
    for number, variant in enumerate(variants):
        row: Row = {"name": variant.name, "arguments": variant.arguments, "status": "failed"}
        rows.append(row)
        rest, asked = left(), {"first run": variant.arguments, "steps": options.steps, "warmup": options.warmup}
        earlier = known.found(asked)
        if earlier is None and (rest < needed or not results):
            row |= {"status": NOT_TRIED, "reason": "the time budget left no time for it"}
            continue
        # its share of what is left, so that one that hangs leaves the others theirs
        within = min(rest, max(_SLOWER * needed, rest / (len(variants) - number)))
        pool = HostPool(hosts(command.under(variant), min(PATIENCE_S, within)), folder / variant.name)
        pools[variant.name] = keep.enter_context(pool)
        row |= _first_run(row, spec, (info, results), pool, within) if earlier is None else earlier["row"]
        if earlier is None and row["status"] != NOT_TRIED:
            known.keep(asked, {"row": row})
        if row["status"] == "accepted":
            ran.append((row, pool))
        else:
            pools.pop(variant.name).close()
    for row, other in sorted(ran, key=lambda pair: -float(pair[0]["speedup"])):  # when all had their first run
        try:
            _time_script(row, spec, (given, other), best, left, known)
        except AutoPrecError as error:
            row |= {"status": "failed", "reason": _in_short(error)}
            pools.pop(row["name"]).close()
        if row["status"] == "accepted" and row.get("low", 0.0) > 1.0 and row["speedup"] > best["speedup"]:
            best = row
    best["chosen"] = True
    near = [name for name, (slower, _) in shapes(rows).items() if slower <= NEAR]
    for name in [name for name in pools if name not in (near or (AS_GIVEN,))]:
        pools.pop(name).close()
    return rows, pools


def shapes(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return how long a step of the script takes under each variant that is accepted, and how much memory.

    Both over those of the reference, which is the first; nothing where no variant was accepted.
    """
    accepted = {row["name"]: row for row in rows if row["status"] == "accepted"}
    if not accepted:
        return {}
    known = {AS_GIVEN: {"speedup": 1.0, "memory": 1.0}, **accepted}
    base = next((name for name, row in accepted.items() if row.get("chosen")), AS_GIVEN)
    names, first = [base, *(name for name in known if name != base)], known[base]
    return {n: (first["speedup"] / known[n]["speedup"], known[n]["memory"] / first["memory"]) for n in names}


def _first_run(
    row: Row, spec: TrainSpec, given: tuple[HostInfo, Sequence[TrialResult]], pool: HostPool, within: float
) -> Row:
    """Return the row of a variant after its first run, in so many seconds: whether it is accepted, and why not.

    Args:
        given: the script as given: what it looks like from the inside, and its two runs and the perturbed ones.
        pool: the variant's host.
    """
    (info, (first, second, *rounding_gaps)), row, ends = given, dict(row), time.monotonic() + within
    limit = max(baseline_of(first, second, rounding_gaps).noise_floor_upper, _ROUNDING)
    try:
        now = pool.info()
        within = max(1.0, ends - time.monotonic())
        own = pool.host().run(replace(spec, within_s=within, timeout_s=min(_HUNG_S, within)))
        if _is_same(row, (info, first), (now, own), limit):
            _compare(row, first, own)
    except AutoPrecError as error:
        row |= {"status": "failed", "reason": _in_short(error)}
    return row


def _is_same(row: Row, given: tuple[HostInfo, TrialResult], other: tuple[HostInfo, TrialResult], limit: float) -> bool:
    """Say whether a variant takes the same optimisation steps, and in its row why it does not.

    Args:
        given, other: the script as given, and under the variant: what it looks like from the inside, and a run.
        limit: divergence from the script as given that a harmless change explains.
    """
    (before, first), (now, own) = given, other
    if own.status == OUT_OF_TIME:
        row |= {"status": NOT_TRIED, "reason": f"the time budget left too little time for it: {own.reason}"}
        return False
    if not own.ok:
        row["reason"] = f"the script ended as {own.status} under it: {_first_line(own.reason)}"
        return False
    parameters, as_given = now.model.get("parameters"), before.model.get("parameters")
    row |= {"divergence": divergence(own.losses, first.losses), "limit": limit}
    why = ""
    if parameters != as_given:
        why = f"it changes the model: {parameters} parameters, where as given there are {as_given}"
    elif first.samples and own.samples and first.samples != own.samples:
        why = f"it changes the training: {own.samples} samples in a step, as given {first.samples}"
    elif row["divergence"] > limit:
        why = (
            f"it changes the training: the script's own losses under it are {percent_text(row['divergence'])} from "
            f"those as given, and a harmless change moves them by at most {100 * limit:.2g} %"
        )
    row |= {"status": "refused" if why else "accepted", "reason": why}
    return not why


def _compare(row: Row, given: TrialResult, other: TrialResult) -> None:
    """Note how fast the script is under a variant, and in how much memory, by one run of each."""
    first, second = (step_time(result.step_ms, result.warmup) for result in (given, other))
    row |= {"speedup": first / second, "memory_bytes": other.memory_bytes}
    row["memory"] = (other.memory_bytes or 1) / given.memory_bytes if given.memory_bytes else 1.0


def _time_script(
    row: Row, spec: TrainSpec, pools: tuple[HostPool, HostPool], best: Row, left: Left, known: KeptAnswers
) -> None:
    """Time the script under a variant beside the script as given, where one run does not show that another is faster.

    In turns, whose order changes, until the speed-up is known well; with no seconds ``left`` once it has an interval.

    Args:
        pools: hosts of the script as given, and under the variant.
        best: ``name`` and ``speedup`` over the script as given of the fastest so far.
        known: has the rounds of an earlier session.
    """
    over = f"the script is {speed_text(row['speedup'])} over the script as given"
    if row["speedup"] * _CLOSE < best["speedup"]:
        row["reason"] = f"{over}: no faster than {best['name']}"
        return
    if left() <= 0:
        row["reason"] = f"{over} in one run: the time budget left no time for more"
        return
    short = replace(spec, steps=STEPS_APART, warmup=WARMUP_APART)
    log = known.turns({"in turns": row["arguments"], "steps": short.steps, "warmup": short.warmup})
    name = row["name"]

    def interval(rounds: Sequence[Mapping[str, float]]) -> tuple[float, float, float]:
        ratios = [before / ms for before, ms in times_of(rounds, name)]
        return median_interval(ratios) if len(ratios) >= FEWEST else (1.0, 0.0, math.inf)

    def enough(rounds: Sequence[Mapping[str, float]], _: float) -> bool:
        middle, low, high = interval(rounds)
        return high - low < 2 * _PRECISE * middle or (len(rounds) >= FEWEST and left() <= 0)

    contest = {key: partial(pool.host().run, short) for key, pool in zip((REFERENCE, name), pools, strict=True)}
    rounds, failed = take_turns(contest, log, enough)
    for result in failed.values():
        row["reason"] = f"it could not be timed: {result.status}: {_first_line(result.reason)}"
        return
    middle, low, high = interval(rounds)
    row |= {"speedup": middle, "low": low, "high": high}
    row["reason"] = f"the script is {speed_text(middle, low, high)} over the script as given"


def _in_short(error: AutoPrecError) -> str:
    """Return what failed, and the last line of what the script said of it; where it said nothing, what to do."""
    what, *said = (error.what.strip() or "it failed").splitlines()
    last = [line.strip() for line in said or error.fix.splitlines() if line.strip()]
    return what + (f": {last[-1]}" if last else "")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]
