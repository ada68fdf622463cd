"""Answers that outlive a kill, and are found only by the search that they belong to."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoprec.errors import NoSpaceError
from autoprec.support.files import canonical_json
from autoprec.trial.command import ScriptCommand
from autoprec.trial.probe_log import append_round, append_row, read_rounds
from autoprec.trial.protocol import (
    DuelRounds,
    DuelSpec,
    GradientErrors,
    HostInfo,
    Probe,
    ProbeResult,
    RecordSpec,
    ScanSpec,
    TrainSpec,
    TrialResult,
    TrialSpec,
)
from autoprec.tuning.engine import Search
from autoprec.tuning.study import kept
from autoprec.tuning.study.kept import KeptAnswers, origin_of
from autoprec.tuning.study.records import SearchResult
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph
from tests.tuning.test_engine import here, options, script, search  # noqa: F401

RUN = TrialResult("ok", losses=(2.0, 1.0), step_ms=(3.0, 2.5), memory_bytes=7, wall_s=0.5)
SCAN = ScanSpec(probes=tuple(Probe(f"{k}|bf16", {"default": "bf16", "at": k}) for k in range(4)))
INFO = HostInfo("fork", {"class": "Net", "parameters": 9, "fingerprint": "sha256:1"}, ("up",), ("AdamW",), "cpu")
COMMAND = ScriptCommand("script", "train.py", ("--lr", "1"), Path())
SOURCES = {"train.py": "1a"}


def held(folder: Path, origin: str = "a") -> KeptAnswers:
    return KeptAnswers(folder / "kept", folder / "hosts", origin)


def rows(*numbers: int) -> tuple[ProbeResult, ...]:
    return tuple(ProbeResult(f"{k}|bf16", 0.1 * (1 + k)) for k in numbers)


def test_the_next_session_is_given_what_was_answered(tmp_path: Path) -> None:
    graph = simulated_graph()
    answers = [
        (TrainSpec(), RUN),
        (TrainSpec(perturb="bf16"), replace(RUN, losses=(2.0, 1.1))),
        (RecordSpec(), TrialResult("ok", answer=graph)),
        (SCAN, TrialResult("ok", answer=GradientErrors(rows(0, 1, 2, 3), 0.5, 4, ("up",), 2.0))),
    ]
    first = held(tmp_path)
    for spec, result in answers:
        question = first.question(spec)
        assert question.known is None
        assert question.finish(result) == result
    again = held(tmp_path)
    for spec, result in answers:
        known = again.question(spec).known
        assert known is not None
        assert known.to_json() == result.to_json()


def test_a_question_that_is_asked_twice_has_two_answers(tmp_path: Path) -> None:
    """The second run of the reference says whether a script is deterministic: it is not the first one once more."""
    other, first = replace(RUN, losses=(2.0, 1.01)), held(tmp_path)
    for result in (RUN, other):
        question = first.question(TrainSpec())
        assert question.known is None
        question.finish(result)
    again = held(tmp_path)
    assert [again.question(TrainSpec()).known for _ in range(3)] == [RUN, other, None]


@pytest.mark.parametrize(
    ("origin", "spec", "seed"),
    [
        ("b", TrainSpec(), 0),
        ("a", TrainSpec(steps=3), 0),
        ("a", TrainSpec(warmup=1), 0),
        ("a", TrainSpec(policy={"default": "bf16"}), 0),
        ("a", TrainSpec(perturb="bf16"), 0),
        ("a", TrainSpec(backend="native"), 0),
        ("a", TrainSpec(seed=3), 0),
        ("a", TrainSpec(variant="large"), 0),
        ("a", TrainSpec(by_block=True), 0),
        ("a", TrainSpec(), 1),
        ("a", RecordSpec(), 0),
    ],
)
def test_another_question_is_asked_anew(tmp_path: Path, origin: str, spec: TrialSpec, seed: int) -> None:
    held(tmp_path).question(TrainSpec()).finish(RUN)
    assert held(tmp_path, origin).question(spec, seed).known is None
    assert held(tmp_path).question(TrainSpec(within_s=3.0, timeout_s=1.0)).known == RUN, "how long it may take is not"


@pytest.mark.parametrize("status", ["crashed", "diverged", "out_of_time", "pruned", "oom"])
def test_what_did_not_come_to_its_end_is_not_kept(tmp_path: Path, status: str) -> None:
    failed = replace(RUN, status=status, losses=(2.0, math.nan))
    assert held(tmp_path).question(TrainSpec()).finish(failed) is failed
    assert held(tmp_path).question(TrainSpec()).known is None


@pytest.mark.parametrize("answered", [(0,), (0, 2), (3, 1), (0, 1, 2, 3)])
def test_of_a_scan_that_was_killed_the_rest_is_asked(tmp_path: Path, answered: tuple[int, ...]) -> None:
    started = held(tmp_path).question(SCAN).left
    assert isinstance(started, ScanSpec)
    folder = tmp_path / "hosts" / "host-0" / "slot-1"
    folder.mkdir(parents=True)
    for row in rows(*answered):
        append_row(folder / started.log, row)
    for origin, seed in (("b", 0), ("a", 1)):
        assert held(tmp_path, origin).question(SCAN, seed).left == replace(SCAN, log=_log_of(tmp_path, origin, seed))
    question = held(tmp_path).question(SCAN)
    left = question.left
    assert isinstance(left, ScanSpec)
    missing = [k for k in range(4) if k not in answered] or [3]
    assert [probe.id for probe in left.probes] == [row.id for row in rows(*missing)]
    found = question.finish(TrialResult("ok", answer=GradientErrors(rows(*missing), 0.5, 4)))
    assert found.answer == GradientErrors(rows(0, 1, 2, 3), 0.5, 4)
    known = held(tmp_path).question(SCAN).known
    assert known is not None
    assert known.answer == found.answer


def _log_of(folder: Path, origin: str, seed: int) -> str:
    left = held(folder, origin).question(SCAN, seed).left
    assert isinstance(left, ScanSpec)
    return left.log


def test_a_scan_that_ran_out_of_time_is_not_whole(tmp_path: Path) -> None:
    part = TrialResult("ok", answer=GradientErrors(rows(0, 1)))
    assert held(tmp_path).question(SCAN).finish(part) == part
    assert held(tmp_path).question(SCAN).known is None


DUEL = DuelSpec(probes=(Probe("all bf16", {"default": "bf16"}),), within_s=10.0)


@pytest.mark.parametrize(
    ("earlier", "seconds", "left"),
    [(0, 0.0, 10.0), (2, 1.0, 9.0), (4, 3.0, 7.0), (9, 7.0, 5.0), (3, 9.0, 5.0), (8, 8.5, None)],
)
def test_the_rounds_of_a_duel_that_was_killed_count(
    tmp_path: Path, earlier: int, seconds: float, left: float | None
) -> None:
    """A duel that takes longer than a session lasts comes to its end all the same."""
    asked: list[DuelSpec] = []

    def run(spec: TrialSpec) -> TrialResult:
        assert isinstance(spec, DuelSpec)
        asked.append(spec)
        return TrialResult("ok", answer=DuelRounds(({"": 9.0, "all bf16": 3.0},), steps=4))

    with pytest.raises(Killed):
        held(tmp_path).duel(DUEL, killed)
    (folder := tmp_path / "hosts" / "host-0").mkdir(parents=True)
    log = folder / f"part-{held(tmp_path)._key(DUEL, 0)}-0.jsonl"
    for number in range(earlier):
        append_round(log, {"": 8.0, "all bf16": 2.0 + number}, seconds * (number + 1) / earlier)
    session = held(tmp_path)
    answer = session.duel(DUEL, run).answer
    assert isinstance(answer, DuelRounds)
    assert [one["all bf16"] for one in answer.rounds[:earlier]] == [2.0 + number for number in range(earlier)]
    assert len(answer.rounds) == earlier + (left is not None)
    assert [spec.within_s for spec in asked] == ([] if left is None else [pytest.approx(left)])
    assert held(tmp_path).duel(DUEL, killed).answer == answer, "until it is stored"
    another = session.duel(DUEL, run).answer
    assert another == DuelRounds(({"": 9.0, "all bf16": 3.0},), steps=4), "in another process, as the script ends soon"
    session.duels_are_stored()
    assert not list(tmp_path.rglob("*.json*"))
    assert held(tmp_path).duel(DUEL, run).answer == another, "the next one"


def test_what_no_single_trial_finds_out_is_kept_until_the_search_has_ended(tmp_path: Path) -> None:
    one, row = held(tmp_path), {"name": "half", "speedup": 2.0}
    assert one.found({"variant": "half"}) is None
    one.keep({"variant": "half"}, {"row": row})
    assert held(tmp_path).found({"variant": "half"}) == {"row": row}
    assert held(tmp_path).found({"variant": "other"}) is None
    assert held(tmp_path, "b").found({"variant": "half"}) is None
    append_round(one.turns({"variant": "half"}), {"": 2.0}, 1.0)
    assert read_rounds([held(tmp_path).turns({"variant": "half"})]) == ([{"": 2.0}], 1.0)
    one.clear()
    assert held(tmp_path).found({"variant": "half"}) is None


def killed(_spec: TrialSpec) -> TrialResult:
    raise Killed


def test_a_damaged_file_is_asked_anew_and_replaced(tmp_path: Path) -> None:
    held(tmp_path).question(TrainSpec()).finish(RUN)
    (file,) = (tmp_path / "kept").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:20], b"", whole.replace(b'"memory_bytes": 7', b'"memory_bytes": 8'), b"\xff" * 9, b"[]"):
        file.write_bytes(damaged)
        question = held(tmp_path).question(TrainSpec())
        assert question.known is None
        question.finish(RUN)
        assert file.read_bytes() == whole


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise NoSpaceError("no space left on the device")

    monkeypatch.setattr(kept, "write_json", full)
    with pytest.raises(NoSpaceError):
        held(tmp_path).question(TrainSpec()).finish(RUN)


def test_cleared_answers_are_gone(tmp_path: Path) -> None:
    one = held(tmp_path)
    one.question(TrainSpec()).finish(RUN)
    folder = tmp_path / "hosts" / "host-0"
    folder.mkdir(parents=True)
    append_row(folder / _log_of(tmp_path, "a", 0), rows(0)[0])
    (folder / "host-0.log").write_text("its output", encoding="utf-8")
    one.clear()
    assert held(tmp_path).question(TrainSpec()).known is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["host-0.log"]
    one.clear()


# ------------------------------------------------------------------------------------------ to whom they belong
TEXTS = st.text(max_size=5)


@settings(max_examples=20)
@given(st.tuples(TEXTS, TEXTS, TEXTS), st.tuples(TEXTS, TEXTS, TEXTS))
def test_other_sources_arguments_or_models_are_another_origin(
    one: tuple[str, str, str], two: tuple[str, str, str]
) -> None:
    def origin(source: str, argument: str, model: str) -> str:
        return origin_of(
            replace(COMMAND, args=("--lr", argument)), {"train.py": source}, replace(INFO, model={"fingerprint": model})
        )

    assert (origin(*one) == origin(*two)) == (one == two)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("installed_version", lambda _name: "9.9"),
        ("__version__", "9.9"),
        ("cpu_model", lambda: "another processor"),
        ("cores", lambda: 999),
    ],
)
def test_other_versions_or_machines_are_another_origin(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = origin_of(COMMAND, SOURCES, INFO)
    assert origin_of(COMMAND, dict(SOURCES), INFO) == before
    monkeypatch.setattr(kept, name, value)
    assert origin_of(COMMAND, SOURCES, INFO) != before


def test_threads_and_devices_are_part_of_the_origin_and_a_job_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = origin_of(COMMAND, SOURCES, INFO)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert origin_of(COMMAND, SOURCES, replace(INFO, setup_s=9.0, notes=("slow",))) == before
    for changed in ({"device": "NVIDIA H100"}, {"world_size": 2}, {"gpus": 1}, {"launch": "process"}):
        assert origin_of(COMMAND, SOURCES, replace(INFO, **changed)) != before
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    assert origin_of(COMMAND, SOURCES, INFO) != before


# ------------------------------------------------------------------------------------------ in a search
def before_trials(simulated: SimulatedScript) -> Counter[str]:
    """Count what was asked of a script before its first trial: the step, the reference, the table of errors."""
    asked = Counter[str]()
    for seed, spec in simulated.calls:
        table = isinstance(spec, ScanSpec) and spec.probes[0].id[0].isdigit()
        if seed == 0 and not spec.policy and (table or isinstance(spec, (RecordSpec, TrainSpec))):
            asked[canonical_json(spec.to_json() | {"within_s": None, "timeout_s": 0.0, "log": ""})] += 1
    return asked


SHORT = {"trials": 3, "seeds": 2}


class Killed(BaseException):
    """What ``kill -9`` is to a search in this process: nothing of it runs any more."""


def killed_every(runs: int, monkeypatch: pytest.MonkeyPatch, session: Callable[[bool], Searched]) -> Searched:
    """Return what sessions come to each of which is killed when it begins one run of the script more than ``runs``."""
    asked, left, sessions = SimulatedRunner.run, [0], 0

    def mortal(runner: SimulatedRunner, spec: TrialSpec) -> TrialResult:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return asked(runner, spec)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedRunner, "run", mortal)
        while True:
            left[0], sessions = runs, sessions + 1
            assert sessions < 80, "it does not get on"
            try:
                found = session(sessions > 1)
            except Killed:
                continue
            assert sessions > 2
            return found


Searched = tuple[Search, SearchResult]
#: How far any change at all moves the loss of a run, by seed; more choices of the search; runs of each session.
KINDS = {
    "long before a trial": (lambda _seed: 0.0, {"sampler": "random"}, 2),
    "between the duels": (lambda _seed: 0.0, {}, 1),
    "between the references of further seeds": (lambda seed: 0.3 * (1 + seed), {"seeds": 3}, 1),
    "between perturbations that are asked for late": (lambda seed: 1.0 if seed else 0.0, {"seeds": 3}, 1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_that_is_ended_again_and_again_answers_as_one_that_was_not(
    kind: str,
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved, more, runs = KINDS[kind]
    simulated = script(error_scale=0.25, noise=lambda seed, spec: moved(seed) if _changed(spec) else 0.0)
    alone = replace(simulated, calls=[])
    _, whole = search(alone, options(study="whole", **SHORT | more))
    _, result = killed_every(
        runs,
        monkeypatch,
        lambda resume: search(simulated, options(study="killed", resume=resume, **SHORT | more)),
    )
    assert (result.verdict, result.best, result.reason) == (whole.verdict, whole.best, whole.reason)
    assert before_trials(simulated) == before_trials(alone), "what was done before a trial is not done again"
    # a run that was at work beside the one that is killed may be lost
    assert len(simulated.calls) <= len(alone.calls) + 2, "nor is what was done after it"
    assert not (here / "autoprec-runs" / "killed" / "kept").exists(), "the study has its answer"


def _changed(spec: TrialSpec) -> bool:
    return isinstance(spec, TrainSpec) and bool(spec.perturb or spec.policy)


def test_an_edited_script_is_not_given_the_old_ones_answers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Ended before the study was signed, a search goes on under the script of now."""
    simulated, asked = script(), SimulatedRunner.run

    def mortal(runner: SimulatedRunner, spec: TrialSpec) -> TrialResult:
        asked(runner, spec)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedRunner, "run", mortal)
        with pytest.raises(Killed):
            search(simulated, options(study="killed"))
    (here / "train.py").write_text("width = 2", encoding="utf-8")
    search(simulated, options(study="killed", resume=True, trials=1, seeds=1))
    assert sum(isinstance(spec, RecordSpec) for _, spec in simulated.calls) == 2
