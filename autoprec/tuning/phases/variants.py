"""Variants: other ways to run the same optimisation step, beside the script as it was given.

A larger micro-batch with fewer accumulations, no activation checkpointing, torch.compile: such arguments change how
long a step takes and not what it computes, and which precision is fastest may depend on them. A variant under which the
script's losses, one for each optimizer step, are not those of the script as given changes the training and is refused.

:func:`choose` times the script itself under every other one, in runs that take turns. Where one is surely faster, the
search is of the script under it. Where none is, :class:`Variants` runs the policies that were found under each, and the
answer is a pair of policy and variant where that is surely faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoprec.errors import AutoPrecError
from autoprec.support.units import percent_text, speed_text
from autoprec.trial.command import ScriptCommand, Variant, parse_variants
from autoprec.trial.intervals import FEWEST, median_interval
from autoprec.trial.protocol import HostInfo, TrialResult, TrialSpec
from autoprec.tuning.decide.decision import Decision, Standing
from autoprec.tuning.decide.metrics import divergence, score, step_time
from autoprec.tuning.decide.sentences import Reason
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.paired import PairedRunner, baseline_of
from autoprec.tuning.setup import Setup
from autoprec.tuning.study.run import VARIANT, Run
from autoprec.tuning.workers.local import HostPool, RunnerFactory

#: Share of a time budget that the search itself may take where variants come after it.
SEARCH_SHARE = 0.6
#: Policies that are run under a variant beside the script itself.
_MOST_POLICIES = 3
#: A variant under which the script is slower by more than this factor has no policy tried, and a pair whose trial is
#: slower than the answer by more than this is not timed.
_HOPELESS, _CLOSE = 1.5, 1.03
#: Steps of a run of those that are timed in turns, and how many such rounds there are at most.
_STEPS, _WARMUP, _ROUNDS = 6, 2, 2 * FEWEST
#: Half the width of a speed-up's interval that ends the rounds.
_PRECISE = 0.03
#: Seconds of its own without a step after which a variant hangs: it may compile.
_HUNG_S = 300.0
#: Losses apart by less are float32 rounding of another order of sums.
_ROUNDING = 1e-6
SCRIPT = "script"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Base:
    """What a variant has to repeat: the script's model, its losses, and how far a harmless change moves them."""

    host: HostInfo
    losses: tuple[float, ...]
    samples: int
    reach: float

    def accepts(self, info: HostInfo, own: TrialResult, row: Row) -> bool:
        """Say whether a variant takes the same optimisation steps, and in its row why it does not."""
        why = self._changed(info, own, row) if own.ok else ""
        row |= {"status": "refused" if why else "accepted" if own.ok else "failed", "reason": why}
        if not own.ok:
            row["reason"] = f"the script ended as {own.status} under it: {_first_line(own.reason)}"
        return own.ok and not why

    def _changed(self, info: HostInfo, own: TrialResult, row: Row) -> str:
        now, before = (host.model.get("parameters") for host in (info, self.host))
        if now != before:
            return f"it changes the model: {now} parameters, where as given there are {before}"
        if self.samples and own.samples and self.samples != own.samples:
            return f"it changes the training: {own.samples} samples in a step, as given {self.samples}"
        gap, limit = divergence(own.losses, self.losses), max(self.reach, _ROUNDING)
        row |= {"divergence": gap, "limit": limit}
        if gap <= limit:
            return ""
        return (
            f"it changes the training: the script's own losses under it are {percent_text(gap)} from those as given, "
            f"and a harmless change moves them by at most {100 * limit:.2g} %"
        )


def choose(
    options: SearchOptions,
    command: ScriptCommand,
    hosts: Callable[[ScriptCommand], RunnerFactory],
    folder: Path,
    late: Callable[[], bool],
) -> list[Row]:
    """Time the script under each variant; the row of the fastest that is surely faster says ``chosen``.

    Args:
        hosts: starts a command.
        folder: for logs.
        late: whether the time budget leaves no time for a further variant.

    Returns:
        A row of the result for each variant; none where the script itself does not run as it was given, which the
        search then says.
    """
    spec = TrialSpec(steps=options.steps, warmup=options.warmup, anneal=True, timeout_s=_HUNG_S)
    rows: list[Row] = []
    with HostPool(hosts(command), folder / "as-given") as given:
        info = given.info()
        spec = replace(spec, seed=None if info.launch == "fork" else options.seed)
        runs = [] if late() else [spec, spec, replace(spec, perturb="bf16")]
        results = [given.run(one) for one in runs]
        if not all(result.ok for result in results):
            return []
        for variant in parse_variants(options.variant):
            row: Row = {"name": variant.name, "arguments": variant.arguments, "status": "failed"}
            rows.append(row)
            if late() or not results:
                row |= {"status": "not tried", "reason": "the time budget left no time for it"}
                continue
            first, second, *benign = results
            base = _Base(info, first.losses, first.samples, baseline_of(first, second, benign).reach)
            with HostPool(hosts(command.under(variant)), folder / variant.name) as pool:
                try:
                    if base.accepts(pool.info(), own := pool.run(spec), row):
                        _time_script(row, spec, (first, given), (own, pool))
                except AutoPrecError as error:
                    row |= {"status": "failed", "reason": _in_short(error)}
    fastest = max((row for row in rows if row.get("low", 0.0) > 1.0), key=lambda row: row["speedup"], default=None)
    if fastest is not None:
        fastest["chosen"] = True
    return rows


def _time_script(
    row: Row, spec: TrialSpec, given: tuple[TrialResult, HostPool], other: tuple[TrialResult, HostPool]
) -> None:
    """Time the script under a variant beside the script as given, where one run does not show that it is slower."""
    first, second = (step_time(result.step_ms, result.warmup) for result, _ in (given, other))
    row |= {"speedup": first / second, "memory_bytes": other[0].memory_bytes, "policy": SCRIPT}
    if second > _CLOSE * first:
        row["reason"] = f"the script is {speed_text(row['speedup'])} over the script as given: no faster"
        return
    short = replace(spec, steps=_STEPS, warmup=_WARMUP)
    times, why = in_turns([lambda: given[1].run(short), lambda: other[1].run(short)])
    if why:
        row["reason"] = f"it could not be timed: {why}"
        return
    middle, low, high = median_interval([one[0] / one[1] for one in times])
    row |= {"speedup": middle, "low": low, "high": high}
    row["reason"] = f"the script is {speed_text(middle, low, high)} over the script as given"


def in_turns(contest: Sequence[Callable[[], TrialResult]]) -> tuple[list[list[float]], str]:
    """Run contestants in turns, whose order changes, until the first one's time over the second's is known well.

    Returns:
        Milliseconds per step of each, round by round; and why a run failed, empty where none did.
    """
    rounds: list[list[float]] = []
    while len(rounds) < _ROUNDS:
        times = [0.0] * len(contest)
        for at in sorted(range(len(contest)), key=lambda k: (k + len(rounds)) % len(contest)):
            result = contest[at]()
            if not result.ok:
                return rounds, f"{result.status}: {_first_line(result.reason)}"
            times[at] = step_time(result.step_ms, result.warmup)
        rounds.append(times)
        if len(rounds) >= FEWEST:
            middle, low, high = median_interval([one[0] / one[1] for one in rounds])
            if high - low < 2 * _PRECISE * middle:
                break
    return rounds, ""


@dataclass(frozen=True, slots=True)
class _Gain:
    """A pair of policy and variant that is surely faster than the answer without variants."""

    run: Run | None
    speedup: float
    low: float
    high: float
    row: Row


class Variants:
    """Runs what a search found under the variants that were asked for.

    Args:
        hosts: starts a variant's script.
        budget_s: of the whole search; None for no limit.
    """

    def __init__(
        self,
        setup: Setup,
        runner: PairedRunner,
        ledger: Ledger,
        hosts: Callable[[Variant], RunnerFactory],
        budget_s: float | None,
    ) -> None:
        self._setup, self._runner, self._ledger = setup, runner, ledger
        self._hosts, self._budget = hosts, budget_s

    def compare(self, variants: Sequence[Variant], decision: Decision) -> Decision:
        """Return the decision over every pair: as it was where no variant is surely faster."""
        began, best = time.monotonic(), None
        for variant in variants:
            if self._budget is not None and self._ledger.elapsed() > self._budget:
                self._ledger.cut(f"the time budget left no time for the variant {variant.label}")
                continue
            row: Row = {"name": variant.name, "arguments": variant.arguments, "status": "failed"}
            self._ledger.variants[:] = [row if old["name"] == variant.name else old for old in self._ledger.variants]
            gain = self._tried(variant, row, decision)
            self._ledger.note(f"variant {variant.label}: {row['status']}: {row['reason']}")
            if gain is not None and (best is None or gain.speedup > best.speedup):
                best = gain
        self._ledger.add_seconds("variants_s", time.monotonic() - began)
        return decision if best is None else adopted(decision, best)

    def _tried(self, variant: Variant, row: Row, decision: Decision) -> _Gain | None:
        """Run one variant, and say in its row how that went; a script that fails under it fails nothing else."""
        with HostPool(self._hosts(variant), self._setup.study_dir / "hosts" / f"variant-{variant.name}") as pool:
            try:
                info = pool.info()
                runner = PairedRunner(self._setup, pool, self._ledger, may_compile_blocks=False)
                own = runner.run(runner.spec(self._setup.reference_policy(), timeout_s=_HUNG_S))
                known = self._ledger.reference
                base = _Base(self._setup.host, known.losses, known.samples, known.baseline.reach)
                return self._fastest(variant, row, runner, own, decision) if base.accepts(info, own, row) else None
            except AutoPrecError as error:
                row |= {"status": "failed", "reason": _in_short(error)}
                return None

    def _fastest(
        self, variant: Variant, row: Row, runner: PairedRunner, own: TrialResult, decision: Decision
    ) -> _Gain | None:
        """Run the best policies under a variant that is accepted, and time the fastest pair in turns."""
        reference = self._ledger.reference
        ms = step_time(own.step_ms, own.warmup)
        pairs: list[tuple[float, Run | None, Row]] = [(ms, None, {"memory_bytes": own.memory_bytes, "policy": SCRIPT})]
        for run in contenders(decision) if ms < _HOPELESS * reference.step_ms else ():
            tried = self._trial(run, variant, runner)
            if self._ledger.acceptable(tried):
                about = {"memory_bytes": tried["memory_bytes"], "policy": run.name}
                pairs.append((tried["step_time_ms"], run, about))
        ms, best, about = min(pairs, key=lambda pair: pair[0])
        row |= about | {"speedup": reference.step_ms / ms}
        answer = decision.chosen.speedup if decision.chosen is not None else 1.0
        if ms > _CLOSE * reference.step_ms / answer:
            row["reason"] = f"{_who(best)} is {speed_text(row['speedup'])} over the script as given: no faster"
            return None
        return self._timed(row, runner, best, decision)

    def _trial(self, run: Run, variant: Variant, runner: PairedRunner) -> Run:
        """Run a policy under a variant, and store it: its losses are compared with the script's as given."""
        began = time.time(), time.monotonic()
        number, ledger = self._ledger.store.next_number(), self._ledger
        plan = replace(run, number=number, kind=VARIANT, variant=variant.name, tags=(), metrics={}, seed=0)
        plan = replace(plan, name=f"{run.name} under {variant.name}")
        result = runner.run(runner.spec(run.policy, timeout_s=_HUNG_S))
        done = score(plan, result, ledger.reference, estimate=None, error=run["gradient_error"])
        done = replace(done, started=began[0], seconds=time.monotonic() - began[1])
        ledger.store.add(done)
        ledger.listener.trial(done, 0, 0, None, 0.0)
        return done

    def _timed(self, row: Row, runner: PairedRunner, run: Run | None, decision: Decision) -> _Gain | None:
        """Time a pair beside the script and the answer without variants; None where it is not surely faster."""
        script, answer = self._setup.reference_policy(), decision.run.policy if decision.run is not None else None
        contest = [(self._runner, script), (runner, run.policy if run is not None else script)]
        contest += [(self._runner, answer)] if answer is not None else []

        def runs(host: PairedRunner, policy: dict[str, Any] | None) -> Callable[[], TrialResult]:
            return lambda: host.duel(host.spec(policy, steps=_STEPS, warmup=_WARMUP, by_block=False))

        rounds, why = in_turns([runs(*one) for one in contest])
        if why:
            row["reason"] = f"it could not be timed: {why}"
            return None
        middle, low, high = median_interval([times[0] / times[1] for times in rounds])
        over, least, most = median_interval([times[-1 if answer is not None else 0] / times[1] for times in rounds])
        row |= {"speedup": middle, "low": low, "high": high, "over_answer": over}
        row["reason"] = f"{_who(run)} is {speed_text(middle, low, high)} over the script as given"
        if answer is not None:
            row["reason"] += f", and {speed_text(over, least, most)} over the answer without it"
        return _Gain(run, middle, low, high, row) if least > 1.0 else None


def contenders(decision: Decision) -> list[Run]:
    """Return the policies that are worth a run under a variant: what was adopted, and the fastest acceptable ones."""
    fit = [one for one in decision.ranking if one.run is not None and one.run.policy and not one.rejection]
    runs = [one.run for one in sorted(fit, key=lambda one: -one.speedup)]
    named = {run.name: run for run in (decision.run, *runs) if run is not None}
    return list(named.values())[:_MOST_POLICIES]


def adopted(decision: Decision, gain: _Gain) -> Decision:
    """Return the decision with a pair of policy and variant as its answer; with the script alone it is to stay."""
    reasons = (Reason("variant", dict(gain.row)), *decision.reasons)
    if gain.run is None:
        return replace(decision, verdict="stay", reasons=reasons, index=None, run=None, variant=gain.row)
    ranking = list(decision.ranking)
    index = next((i for i, one in enumerate(ranking) if one.name == gain.run.name), None)
    if index is None:
        index = len(ranking)
        ranking.append(Standing.of(gain.run.name, [gain.run], gain.run["gradient_error"]))
    timed = replace(ranking[index], speedup=gain.speedup, low=gain.low, high=gain.high, modelled=False)
    ranking[index] = replace(timed, memory_bytes=gain.row["memory_bytes"])
    return replace(
        decision, verdict="adopt", reasons=reasons, ranking=tuple(ranking), index=index, run=gain.run, variant=gain.row
    )


def figures(row: Row, reference: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of the script under a variant, from its row and the reference's metrics."""
    step = reference["step_time_ms"] / row["speedup"]
    rates = {name: reference[name] * row["speedup"] for name in ("throughput", "samples_per_s") if name in reference}
    out = reference | rates | {"step_time_ms": step, "memory_bytes": float(row["memory_bytes"])}
    bounds = {"speedup": (row["low"], row["high"])}
    return out | {"name": f"script under {row['name']}", "speedup": row["speedup"], "intervals": bounds}


def _who(run: Run | None) -> str:
    return "the script" if run is None else run.name


def _in_short(error: AutoPrecError) -> str:
    """Return what failed, and the last line of what the script said of it."""
    said = [line for line in error.fix.splitlines() if line.strip()]
    return _first_line(error.what) + (f": {said[-1].strip()}" if said else "")


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]
