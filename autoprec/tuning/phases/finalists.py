"""The finalists: the best few policies again, over paired seeds and with an annealed learning rate.

One short trial cannot tell 0.25 % from chance (one paired seed of FP8 has a standard deviation near 0.15 %), and the
best of many noisy trials is biased by having been picked: everything that decides is measured again here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autoprec.errors import AutoPrecError
from autoprec.tuning.decide.decision import Candidate, choose
from autoprec.tuning.decide.metrics import Reference, divergence, signed_gap
from autoprec.tuning.decide.noise import Baseline, screening_limit
from autoprec.tuning.decide.shortlist import faster_ones, shortlist, smoothed_divergence
from autoprec.tuning.decide.table import SensitivityTable
from autoprec.tuning.ledger import Ledger
from autoprec.tuning.paired import PairedRunner
from autoprec.tuning.phases.answer import Answer
from autoprec.tuning.phases.reference import reference_of
from autoprec.tuning.phases.sensitivity import measure_errors
from autoprec.tuning.phases.trials import measured
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import sixteen_bit_speedup
from autoprec.tuning.study.records import TrialRecord

__all__ = ["pick_finalists", "run_finals"]

#: Bounds of the relative timing noise of a median over the seeds.
LEAST_NOISE, MOST_NOISE = 0.01, 0.10
#: A mean below this share of the budget is worth more seeds; this many finalists get them.
UNCERTAIN_SHARE, MOST_UNCERTAIN = 0.7, 3
#: Shares of the divergence budget that safer finalists must keep to, round after round.
SAFER_SHARES = (0.35, 0.15)
#: Step times closer than this are a tie (run-to-run noise of a shared machine); modelled ones have no noise.
TIE, MODELLED_TIE = 0.03, 0.01


def run_finals(setup: Setup, runner: PairedRunner, ledger: Ledger, table: SensitivityTable) -> Answer:
    """Measure the finalists over the paired seeds and decide; safer ones follow while none is surely acceptable.

    When one is, but slower than finalists that were rejected, what lies between them gets its chance, once.
    """
    began = time.monotonic()
    final = _Final(setup, runner, ledger, table)
    answer = final.run()
    for name, why in final.rejected.items():
        ledger.note(f"finalist {name} was rejected: {why}")
    ledger.timings["finalists_s"] = time.monotonic() - began
    return answer


def pick_finalists(setup: Setup, ledger: Ledger, table: SensitivityTable) -> list[TrialRecord]:
    """Return the records worth measuring again.

    The best few by the objective, the best preset, and the safest of the fast ones; and, because the fastest of many
    noisy trials is within the budget partly by luck, those whose divergence the model of all trials believes.
    """
    fit = [record for record in ledger.acceptable_ones() if not setup.problem.is_script(record.params)]
    if not fit:
        return []
    count = setup.options.finalists
    believed: list[TrialRecord] = []
    if len(fit) > count:
        believed = shortlist(
            setup.problem,
            table,
            fit,
            max_divergence=setup.limits.divergence,
            noise_floor=ledger.reference.noise_floor,
            count=max(1, count - 1),
        )
    best_preset = [record for record in fit if record.kind == "preset"][:1]
    close = [record for record in fit if ledger.rank(record) <= ledger.rank(fit[0]) * (1 + TIE)]
    safest = sorted(close, key=lambda record: record.metrics["gradient_error"])[:1]
    unique: dict[int, TrialRecord] = {}
    for record in (fit[0], *believed, *best_preset, *safest, *fit[1:count]):
        unique.setdefault(record.number, record)
    return list(unique.values())[: count + 1]


def pick_safer(
    setup: Setup, ledger: Ledger, table: SensitivityTable, tried: Sequence[TrialRecord], share: float
) -> list[TrialRecord]:
    """Return what to measure when none of the finalists so far is surely within the budget: safer, so slower ones.

    Args:
        setup, ledger, table: of the search.
        tried: the finalists so far.
        share: of the divergence budget, which the safer ones must keep to by all that is known of them.
    """
    known = {record.number for record in tried}
    rest = [r for r in ledger.store.learned() if ledger.acceptable(r) and r.number not in known]
    rest = [record for record in rest if not setup.problem.is_script(record.params)]
    if not rest:
        return []
    floor = ledger.reference.noise_floor
    believed = smoothed_divergence(setup.problem, table, rest, floor)
    worst = {r.number: max(b, r.metrics["divergence"]) for r, b in zip(rest, believed, strict=True)}
    limit = share * screening_limit(setup.limits.divergence, floor)
    safe = sorted((r for r in rest if worst[r.number] <= limit), key=ledger.rank)[:2]
    safest = min(rest, key=lambda record: worst[record.number])
    return list({record.number: record for record in (*safe, safest)}.values())


def timing_noise(measured_times: bool, speedups: Sequence[Sequence[float]]) -> float:
    """Return the relative noise of a median speed-up: twice the standard error seen over the seeds; 0 when modelled."""
    if not measured_times:
        return 0.0
    spreads = [statistics.stdev(s) / statistics.fmean(s) / math.sqrt(len(s)) for s in speedups if len(s) > 1]
    return min(MOST_NOISE, max(LEAST_NOISE, 2 * statistics.median(spreads))) if spreads else MOST_NOISE


class _Final:
    """The finalists of one search, and all that was measured of them.

    Attributes:
        tried: the finalists so far, as their trials measured them.
        rows: by a finalist's number, its records under the paired seeds.
        rejected: by name, why a finalist is not acceptable.
    """

    def __init__(self, setup: Setup, runner: PairedRunner, ledger: Ledger, table: SensitivityTable) -> None:
        self._setup, self._runner, self._ledger, self._table = setup, runner, ledger, table
        self.tried: list[TrialRecord] = []
        self.rows: dict[int, list[TrialRecord]] = {}
        self.rejected: dict[str, str] = {}
        self._errors: dict[str, float] = {}
        self._references: dict[int, Reference] = {}
        self._benign: dict[int, tuple[float, float]] = {}

    def run(self) -> Answer:
        """Measure round after round, and return the answer over everything measured."""
        setup, ledger = self._setup, self._ledger
        answer = Answer("stay", _why_nothing(setup, ledger), None, seeds=0)
        picked, seeds = pick_finalists(setup, ledger, self._table), setup.options.seeds
        for share in (*SAFER_SHARES, None):
            if not picked:
                break
            answer = self._round(picked)
            if self._all_rejected() and self._perturb_all():
                answer = self._decide()
            uncertain = self._uncertain(picked) if self._all_rejected() else []
            if uncertain and not self._over_budget():
                ledger.listener.note(f"within the budget on average, but not surely: {seeds} more paired seeds")
                self._measure(uncertain, range(seeds, 2 * seeds))
                answer = self._decide()
            if not self._all_rejected() or share is None or self._over_budget():
                break
            ledger.listener.note("none of these is surely within the limits over all seeds: safer ones are measured")
            picked = pick_safer(setup, ledger, self._table, self.tried, share)
        between = self._faster_than(answer.chosen.tag) if answer.chosen is not None else []
        if between and not self._over_budget():
            ledger.listener.note(
                "faster finalists were rejected: what lies between them and the best so far is measured"
            )
            answer = self._round(between)
        return answer

    def _round(self, picked: Sequence[TrialRecord]) -> Answer:
        """Measure some finalists under every seed, and decide over all so far."""
        self._measure(picked, range(self._setup.options.seeds))
        policies = {str(record.number): record.policy for record in picked}
        self._errors |= measure_errors(self._setup, self._runner, self._ledger, policies)
        self.tried += picked
        return self._decide()

    def _all_rejected(self) -> bool:
        return len(self.rejected) == len(self.tried)

    def _over_budget(self) -> bool:
        budget = self._setup.options.budget_s
        return budget is not None and self._ledger.elapsed() > budget

    # --- what to measure next ---------------------------------------------------------------------------------------
    def _uncertain(self, finalists: Sequence[TrialRecord]) -> list[TrialRecord]:
        """Return those whose mean is well within the budget while its bound is not: more seeds can tell.

        FP8 runs differ a lot from seed to seed (most at 0.02 %, some at 0.3 %): four of them bound a mean poorly.
        """
        limit = UNCERTAIN_SHARE * screening_limit(self._setup.limits.divergence, self._ledger.reference.noise_floor)
        out = []
        for record in finalists:
            runs = self.rows[record.number]
            if runs and all(run.ok for run in runs) and self._ledger.acceptable(record):
                out += [record] if statistics.fmean(run.metrics["divergence"] for run in runs) <= limit else []
        return sorted(out, key=self._ledger.rank)[:MOST_UNCERTAIN]

    def _faster_than(self, chosen: TrialRecord) -> list[TrialRecord]:
        """Return what lies between the chosen finalist and faster ones that were rejected."""
        setup, floor = self._setup, self._ledger.reference.noise_floor
        if setup.options.objective != "throughput":
            return []
        ahead = chosen.metrics["step_time_ms"] * (1 - (TIE if setup.measured else MODELLED_TIE))
        if all(record.metrics["step_time_ms"] >= ahead for record in self.tried):
            return []
        means = {
            number: statistics.fmean(run.metrics["divergence"] if run.ok else math.inf for run in runs)
            for number, runs in self.rows.items()
            if runs
        }
        return faster_ones(
            setup.problem,
            self._table,
            [r for r in self._ledger.store.learned() if not setup.problem.is_script(r.params)],
            means,
            limit=screening_limit(setup.limits.divergence, floor),
            noise_floor=floor,
            ahead_of_ms=ahead,
        )

    # --- measuring --------------------------------------------------------------------------------------------------
    def _measure(self, finalists: Sequence[TrialRecord], seeds: range) -> None:
        """Run the finalists under paired seeds, adding their records to :attr:`rows`."""
        began, ledger = time.monotonic(), self._ledger
        jobs, done = len(seeds) * len(finalists), 0
        for record in finalists:
            self.rows.setdefault(record.number, [])
        for seed in seeds:
            # the script's own seed and one more are always measured
            if seed >= 2 and self._over_budget():
                ledger.cut(f"the time budget ended the finalists after {seed} of {seeds.stop} paired seeds")
                break
            if seed + 1 in seeds:
                self._runner.prepare(seed + 1)
            try:
                reference = self._reference(seed)
            except AutoPrecError as error:
                ledger.note(f"paired seed {seed} could not be used: {error.what}")
                continue
            # the order changes from seed to seed, so that a drifting machine favours nobody
            shift = seed % len(finalists)
            for original, record in self._under_seed(seed, reference, [*finalists[shift:], *finalists[:shift]]):
                self.rows[original.number].append(record)
                done += 1
                left = (time.monotonic() - began) / done * (jobs - done)
                ledger.listener.trial(record, done, jobs, ledger.best(), left)

    def _reference(self, seed: int) -> Reference:
        """Return the annealed reference of a paired seed.

        Raises:
            AutoPrecError: it could not be run.
        """
        if seed not in self._references:
            result = self._runner.run(self._runner.spec(self._setup.reference_policy(), anneal=True), seed)
            if not result.ok:
                raise AutoPrecError(f"the reference failed: {result.status}: {result.reason}")
            own = self._ledger.reference
            reference = reference_of(self._setup, result).with_noise(own.baseline, own.deterministic)
            self._references[seed] = reference
            if own.baseline.reach > self._setup.limits.divergence:
                self._perturb(seed, reference)
        return self._references[seed]

    def _perturb_all(self) -> bool:
        """Run the benign perturbation under every seed so far where gaps beyond the budget are held against all.

        The noise floor is that of a short trial under one seed. Under another, or near a loss of zero, the same
        rounding may move the loss much further: that is known before anything is rejected for such a gap.
        """
        budget = self._setup.limits.divergence
        runs = [run for rows in self.rows.values() for run in rows if run.ok]
        if self._benign or self._over_budget() or all(run.metrics["divergence"] <= budget for run in runs):
            return False
        for seed, reference in self._references.items():
            self._perturb(seed, reference)
        return bool(self._benign)

    def _perturb(self, seed: int, reference: Reference) -> None:
        """Run the benign perturbation under a paired seed: what the gaps of finalists are compared with."""
        spec = self._runner.spec(self._setup.reference_policy(), anneal=True, perturb="bf16")
        result = self._runner.run(spec, seed)
        if result.ok:
            gap = divergence(result.losses, reference.losses)
            self._benign[seed] = (gap, signed_gap(result.losses, reference.losses))

    def _baseline(self) -> Baseline:
        """Return what candidates are compared with: benign gaps under the same seeds where they were measured."""
        known = self._ledger.reference.baseline
        if not self._benign:
            return known
        gaps, excess = zip(*self._benign.values(), strict=True)
        return replace(known, floor=max(known.floor, statistics.fmean(gaps)), benign=gaps, benign_excess=excess)

    def _under_seed(
        self, seed: int, reference: Reference, finalists: Sequence[TrialRecord]
    ) -> list[tuple[TrialRecord, TrialRecord]]:
        """Return (original, finalist record) of every finalist under one seed; stored ones are not run again."""
        ledger, runner = self._ledger, self._runner

        def one(original: TrialRecord) -> tuple[TrialRecord, TrialRecord, bool]:
            known = ledger.find("finalist", original.name, seed)
            if known is not None:
                return original, known, False
            plan = replace(original, kind="finalist", tags=("finalist",), seed=seed)
            error = original.metrics["gradient_error"]
            return original, measured(self._setup, runner, ledger, plan, reference, error, anneal=True), True

        out = []
        with runner.threads(runner.final_workers, "finalist") as threads:
            for original, record, is_new in threads.map(one, finalists):
                if is_new:  # stored as soon as it is known, so that a killed search repeats as little as possible
                    record = replace(record, number=ledger.store.next_number())
                    ledger.store.add(record)
                out.append((original, record))
        return out

    # --- deciding ---------------------------------------------------------------------------------------------------
    def _candidate(self, record: TrialRecord) -> Candidate:
        runs = self.rows[record.number]
        speeds = self._speeds(record)
        return Candidate(
            name=record.name,
            speedup=statistics.median(speeds) if speeds else 0.0,
            # a failed seed is an infinite divergence: such a candidate is never accepted
            divergences=tuple(run.metrics["divergence"] if run.ok else math.inf for run in runs),
            excess=tuple(signed_gap(run.losses, run.reference_losses) for run in runs if run.ok),
            gradient_error=self._errors.get(str(record.number), record.metrics["gradient_error"]),
            memory_bytes=record.metrics["memory_bytes"],
            preset=record.kind == "preset",
            tag=record,
        )

    def _speeds(self, record: TrialRecord) -> list[float]:
        return [run.metrics["speedup"] for run in self.rows[record.number] if run.ok]

    def _decide(self) -> Answer:
        """Return the answer over everything measured so far; :attr:`rejected` says why others are not acceptable."""
        setup, reference = self._setup, self._ledger.reference
        memory = reference.memory_bytes
        script = Candidate("script as written", 1.0, (0.0,), memory_bytes=memory, reference=True)
        candidates = [script, *map(self._candidate, self.tried)]
        noise = timing_noise(setup.measured, [self._speeds(record) for record in self.tried])
        decision = choose(
            candidates,
            max_divergence=setup.limits.divergence,
            baseline=self._baseline(),
            max_gradient=self._ledger.gradient_limit(),
            max_memory=setup.limits.memory,
            objective=setup.options.objective,
            timing_noise=noise,
            reference_memory=memory,
            sixteen_bit=sixteen_bit_speedup(setup, self._ledger.store.records),
            gradient_noise=self._ledger.gradient_noise,
        )
        self._ledger.timings["timing_noise"] = noise
        self.rejected = decision.rejected
        if decision.verdict != "adopt" or decision.index is None:
            rejected = dict(decision.rejected)
            return Answer(
                decision.verdict, decision.reason, None, seeds=0, interval=decision.interval, rejected=rejected
            )
        chosen = candidates[decision.index]
        return Answer(
            decision.verdict,
            decision.reason,
            chosen.tag,
            seeds=len(chosen.divergences),
            chosen=chosen,
            interval=decision.interval,
            caveat=decision.caveat,
            rejected=dict(decision.rejected),
        )


def _why_nothing(setup: Setup, ledger: Ledger) -> str:
    """Say why no measured trial qualifies: the limit that most of them broke."""
    tried = [r for r in ledger.store.learned() if r.ok and not setup.problem.is_script(r.params)]
    if not tried:
        return "no trial other than the script as written could be measured"
    broken = Counter(name for record in tried for name in ledger.exceeded(record))
    worst, count = broken.most_common(1)[0] if broken else ("divergence", 0)
    return f"none of {len(tried)} measured policies is within the limits; {count} exceed the {worst} limit"
