"""Variants of the script's arguments: which are the same training, which is fastest, and what the answer says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autoprec.errors import ScriptError, StudyError, UsageError
from autoprec.policy import load_policy
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.base import Runner
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import OUT_OF_TIME, REFERENCE, DuelRounds, HostInfo, TrialResult, TrialSpec
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.phases.variants import choose
from autoprec.tuning.study.kept import KeptAnswers
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.telling import introduction
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph
from tests.tuning.study.test_kept import killed_every
from tests.tuning.test_engine import here, options  # noqa: F401


class Other(SimulatedRunner):
    """A simulated script whose results are changed."""

    def __init__(self, script: SimulatedScript, change: Callable[[TrialSpec, TrialResult], TrialResult]) -> None:
        super().__init__(script)
        self._change = change

    def run(self, spec: TrialSpec) -> TrialResult:
        result = super().run(spec)
        return self._change(spec, result) if spec.kind in ("train", "duel") and result.ok else result


class Broken(SimulatedRunner):
    def start(self) -> HostInfo:
        said = "usage: train.py\ntrain.py: error: unrecognized arguments: --crash"
        what = f"the script ended with exit code 2 before its first training step\n{said}"
        raise ScriptError(what, fix="does `train.py --crash` run to its first step? If it does, please report this")


def faster(share: float) -> Callable[[TrialSpec, TrialResult], TrialResult]:
    def change(spec: TrialSpec, result: TrialResult) -> TrialResult:
        factor = 1.0 if spec.policy else share
        return replace(result, step_ms=tuple(ms * factor for ms in result.step_ms))

    return change


def hosts(simulated: SimulatedScript, **variants: Callable[[SimulatedScript], Runner]) -> Any:
    def factory(_seed: int, folder: Path) -> Runner:
        name = folder.parent.name.removeprefix("variant-")
        return variants[name](simulated) if name in variants else SimulatedRunner(simulated, _seed)

    return factory


def search(simulated: SimulatedScript, asked: SearchOptions, factory: Any) -> tuple[Search, SearchResult]:
    made = Search(asked, ScriptCommand.parse(asked.command), Listeners(), factory)
    return made, made.run()


VARIANTS = (
    "half: --half",
    "slow: --slow",
    "wrong: --wrong",
    "crash: --crash",
    "wide: --wide",
    "batch: --batch",
    "oom: --oom",
)


def all_kinds(simulated: SimulatedScript) -> Any:
    wide = simulated_graph(2, width=128)
    return hosts(
        simulated,
        half=lambda s: Other(s, faster(0.5)),
        slow=lambda s: Other(s, faster(2.0)),
        wrong=lambda s: Other(s, lambda _, r: replace(r, losses=tuple(1.01 * loss for loss in r.losses))),
        crash=lambda s: Broken(s),
        wide=lambda s: SimulatedRunner(replace(s, graph=wide)),
        batch=lambda s: Other(s, lambda _, r: replace(r, samples=16)),
        oom=lambda s: Other(s, lambda _, r: replace(r, status="oom", reason="out of memory: 3 GiB\nmore")),
    )


def chosen_of(asked: SearchOptions, start: Any, folder: Path, left: Callable[[], float] = lambda: math.inf) -> Any:
    with ExitStack() as keep:
        command = ScriptCommand.parse(("train.py",), folder)
        answers = KeptAnswers(folder / "kept", folder / "hosts", "")
        return choose(asked, command, start, folder / "hosts", left, keep, lambda _: answers)[0]


def test_each_variant_is_accepted_refused_or_fails_with_one_sentence(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    asked = options(variant=VARIANTS, target="cpu")
    factory = all_kinds(simulated)
    rows = chosen_of(asked, lambda *_: factory, here)
    told = {row["name"]: row for row in rows}
    assert list(told) == [text.partition(":")[0] for text in VARIANTS]
    states = {name: row["status"] for name, row in told.items()}
    assert [name for name, state in states.items() if state == "accepted"] == ["half", "slow"]
    assert [name for name, state in states.items() if state == "refused"] == ["wrong", "wide", "batch"]
    assert [name for name, state in states.items() if state == "failed"] == ["crash", "oom"]
    assert told["half"]["chosen"]
    assert told["half"]["reason"] == "the script is 2.00x [2.00, 2.00] over the script as given"
    assert told["slow"]["reason"] == "the script is 0.50x over the script as given: no faster than half"
    assert "it changes the training: the script's own losses under it are 1.000 % from" in told["wrong"]["reason"]
    assert told["batch"]["reason"] == "it changes the training: 16 samples in a step, as given 8"
    assert told["wide"]["reason"].startswith("it changes the model: ")
    ended = "the script ended with exit code 2 before its first training step"
    assert told["crash"]["reason"] == f"{ended}: train.py: error: unrecognized arguments: --crash"
    assert told["oom"]["reason"] == "the script ended as oom under it: out of memory: 3 GiB"
    assert all("\n" not in row["reason"] for row in rows)


def test_variants_of_a_search_that_was_killed_are_not_tried_again(
    here: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All were, from the first one on, and a study that was not there yet could not be continued."""
    simulated, starts = SimulatedScript(), list[str]()
    asked = options(variant=VARIANTS, target="cpu", space="cpu", trials=2, seeds=1)
    _, whole = search(simulated, replace(asked, study="whole"), all_kinds(simulated))
    alone = len(simulated.calls)
    plain = Broken.start

    def start(broken: Broken) -> HostInfo:
        starts.append("crash")
        return plain(broken)

    monkeypatch.setattr(Broken, "start", start)
    simulated.calls.clear()
    _, result = killed_every(
        2,  # runs that take turns are measured anew where only one of them was
        monkeypatch,
        lambda resume: search(simulated, replace(asked, study="killed", resume=resume), all_kinds(simulated)),
    )
    assert result.variants == whole.variants
    assert (result.verdict, result.best) == (whole.verdict, whole.best)
    assert len(simulated.calls) <= alone + 2
    assert starts == ["crash"]


def test_without_time_nothing_is_run(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    factory = hosts(simulated)
    rows = chosen_of(options(variant=VARIANTS), lambda *_: factory, here, lambda: 0.0)
    assert {row["status"] for row in rows} == {"not tried"}
    assert simulated.calls == []


def test_an_answer_without_variants_that_were_left_out_for_time_is_not_to_stay(here: Path) -> None:  # noqa: F811
    """It said "stay" although nothing was known of a variant that was asked for."""
    simulated = SimulatedScript()
    out = TrialResult(OUT_OF_TIME, "a step takes 9 s")
    asked = options(variant=("half: --half",), target="cpu", space="cpu", budget_s=10_000.0, force=False)
    _, result = search(simulated, asked, hosts(simulated, half=lambda s: Other(s, lambda _, __: out)))
    assert [row["status"] for row in result.variants] == ["not tried"]
    assert result.cut_short == "the time budget left no time for the script under half"
    assert result.verdict != "stay"
    _, again = search(simulated, replace(asked, resume=True, study=result.study_name), hosts(simulated))
    assert again.cut_short == ""


def test_what_the_budget_leaves_for_variants_limits_each_of_them(here: Path) -> None:  # noqa: F811
    """One that hung took ten minutes of a search of two, and then all that there was for the others."""
    simulated, starts = SimulatedScript(), []
    out = TrialResult(OUT_OF_TIME, "a step takes 9 s: 20 steps take more than the 40 s there are")
    factory = hosts(simulated, slow=lambda s: Other(s, lambda _, __: out))
    seconds = iter((100.0, 90.0, 0.0))

    def start(_command: ScriptCommand, start_s: float) -> Any:
        starts.append(start_s)
        return factory

    asked = options(variant=("slow: --slow", "half: --half"), target="cpu")
    rows = chosen_of(asked, start, here, lambda: next(seconds))
    assert starts == [600.0, 45.0]
    assert [row["status"] for row in rows] == ["not tried"] * 2
    assert rows[0]["reason"] == f"the time budget left too little time for it: {out.reason}"
    spec = simulated.calls[-1][1]
    assert spec.within_s == spec.timeout_s == pytest.approx(45.0, abs=5.0)


def test_the_first_is_timed_when_all_others_had_a_run(here: Path) -> None:  # noqa: F811
    """What timed the first took all that there was, and no other was tried."""
    simulated = SimulatedScript()
    factory = hosts(simulated, half=lambda s: Other(s, faster(0.5)), third=lambda s: Other(s, faster(0.3)))
    asked = options(variant=("half: --half", "third: --third"), target="cpu")
    half, third = chosen_of(asked, lambda *_: factory, here, lambda: 60.0 - 10.0 * len(simulated.calls))
    assert (half["status"], third["status"]) == ("accepted", "accepted")
    assert third.get("chosen")
    assert third["low"] > 1.0
    assert "low" not in half


def test_one_that_is_slower_than_another_variant_is_not_timed_further(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    factory = hosts(simulated, half=lambda s: Other(s, faster(0.5)), some=lambda s: Other(s, faster(0.8)))
    asked = options(variant=("half: --half", "some: --some"), target="cpu")
    rows = chosen_of(asked, lambda *_: factory, here)
    assert [row.get("chosen") for row in rows] == [True, None]
    assert rows[1]["reason"] == "the script is 1.25x over the script as given: no faster than half"
    assert "low" not in rows[1]


def test_the_search_is_of_the_script_under_the_fastest_variant_and_says_so(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    asked = options(variant=VARIANTS, target="cpu", space="cpu", trials=6, study="one")
    made, result = search(simulated, asked, all_kinds(simulated))
    assert made.command.args == ("--half",)
    assert {row["name"]: row["status"] for row in result.variants}["half"] == "accepted"
    assert [reason["code"] for reason in result.reasons][-1] == "under_variant"
    assert "give the script --half: the search was of the script under this variant (half)" in result.reason
    assert load_policy(here / "policy.yaml").evidence["variant"] == "half: --half"
    assert made.setup is not None
    told = introduction(
        made.setup, made.command, made.options, "", made._chosen
    ).options  # what MLflow's parameters are made of
    assert (told["variant"], told["variants"]) == ("half: --half", VARIANTS)
    _, again = search(simulated, replace(asked, resume=True, trials=8), all_kinds(simulated))
    assert again.variants == result.variants
    with pytest.raises(StudyError, match="variant: was 'half: --half', is None"):
        search(simulated, replace(asked, resume=True, variant=()), all_kinds(simulated))


def paced(written: float, policies: float) -> Callable[[SimulatedScript], Runner]:
    """Return a host whose script takes ``written`` times as long, and a policy under it ``policies`` times."""

    def change(spec: TrialSpec, result: TrialResult) -> TrialResult:
        factor = policies if spec.policy else written
        answer = result.answer
        if isinstance(answer, DuelRounds):
            names = {REFERENCE: written}
            timed = tuple({n: ms * names.get(n, policies) for n, ms in one.items()} for one in answer.rounds)
            answer = replace(answer, rounds=timed)
        return replace(result, step_ms=tuple(ms * factor for ms in result.step_ms), answer=answer)

    return lambda script: Other(script, change)


def test_the_variant_is_a_parameter_of_the_study_and_a_policy_may_win_under_another_one(here: Path) -> None:  # noqa: F811
    """It was chosen before the study, by the script's own times, and no run of a policy could say otherwise."""
    simulated = SimulatedScript()
    variants = ("whole: --whole", "fused: --fused", "slow: --slow")
    factory = hosts(simulated, whole=paced(0.93, 0.93), fused=paced(1.0, 0.5), slow=paced(1.5, 1.5))
    asked = options(variant=variants, target="cpu", space="cpu", trials=8, study="pair")
    made, result = search(simulated, asked, factory)
    assert [row["name"] for row in result.variants if row.get("chosen")] == ["whole"]
    study = optuna.load_study(study_name="pair", storage=result.storage)
    trials = [trial for trial in study.trials if trial.user_attrs["kind"] in ("preset", "search", "finalist", "duel")]
    assert {tuple(trial.distributions["variant"].choices) for trial in trials} == {
        ("whole", "as given", "fused", "slow")
    }
    ran = {trial.user_attrs["name"]: trial.params["variant"] for trial in trials}
    assert (ran["bf16 autocast"], ran["bf16 autocast, fused"], ran["bf16 autocast, as given"]) == (
        "whole",
        "fused",
        "as given",
    )
    assert "slow" not in ran.values()  # modelled before tried
    assert result.best["name"].endswith(", fused")
    assert load_policy(here / "policy.yaml").evidence["variant"] == "fused: --fused"
    assert [row["name"] for row in result.variants if row["adopted"]] == ["fused"]
    assert "give the script --fused: what is adopted was fastest so; gains are over the script under whole" in (
        result.reason
    )
    times = next(run for run in made.records if run.kind == "duel" and run.name == result.best["name"])
    assert times["speedup"] == pytest.approx(0.93 / 0.5 * 100.0 / simulated.milliseconds(times.policy))
    _, again = search(simulated, replace(asked, resume=True), factory)
    assert again.best["name"] == result.best["name"]


def test_an_answer_for_the_script_as_given_says_so_where_the_search_was_under_a_variant(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    factory = hosts(simulated, whole=paced(0.95, 1.6))
    asked = options(variant=("whole: --whole",), target="cpu", space="cpu", trials=8, study="given")
    _, result = search(simulated, asked, factory)
    assert result.best["name"].endswith(", as given")
    assert "variant" not in load_policy(here / "policy.yaml").evidence
    assert "give the script no further arguments: what is adopted was fastest so" in result.reason


def test_a_variant_that_gains_nothing_changes_no_answer(here: Path) -> None:  # noqa: F811
    simulated = SimulatedScript()
    asked = options(variant=("same: --same",), target="cpu", space="cpu", trials=6)
    _, result = search(simulated, asked, hosts(simulated))
    _, without = search(simulated, replace(asked, variant=(), study="without"), hosts(simulated))
    assert result.best["name"] == without.best["name"]
    assert [reason["code"] for reason in result.reasons] == [reason["code"] for reason in without.reasons]
    assert "variant" not in load_policy(here / "policy.yaml").evidence


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": ("mb16 --micro-batch 16",)}, "is not NAME: ARGS"),
        ({"variant": ("a: --x", "a: --y")}, "two variants are called a"),
        ({"variant": ("a: --x",), "target": "h100"}, "--variant is timed, and this is a rehearsal"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_script_starts(
    here: Path,  # noqa: F811
    changes: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        search(SimulatedScript(), options(**changes), hosts(SimulatedScript()))


SCRIPT = """
import argparse, time, torch
parser = argparse.ArgumentParser()
parser.add_argument("--micro", type=int, default=4)
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--sleep-at", type=int, default=-1)
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Dropout(args.dropout),
                            torch.nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
data, target = torch.randn(512, 16), torch.randint(0, 4, (512,))
for step in range(40):
    if step == args.sleep_at:
        time.sleep(1e9)
    for part in range(args.accum):
        rows = (torch.arange(args.micro) + (step * args.accum + part) * args.micro) % 512
        (torch.nn.functional.cross_entropy(model(data[rows]), target[rows]) / args.accum).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def runner(command: ScriptCommand, start_s: float) -> Any:
    return lambda seed, folder: TrialRunner(command, run_dir=folder, seed_offset=seed, setup_timeout_s=start_s)


@pytest.mark.usefixtures("warm")
def test_variants_that_hang_leave_time_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    variants = ("asleep: --sleep-at 0", "stuck: --sleep-at 3", "mb16: --micro 16 --accum 1")
    asked = SearchOptions(command=("train.py",), variant=variants, steps=8)
    asleep, stuck, same = chosen_of(asked, runner, tmp_path, lambda: 12.0)
    assert (asleep["status"], stuck["status"], same["status"]) == ("failed", "failed", "accepted")
    assert re.match(r"no training step began within [0-9.]{1,4} s: ", asleep["reason"])
    hung = "(its first training steps failed|the script ended as hung under it): no step and no result within "
    assert re.match(hung, stuck["reason"])


@pytest.mark.usefixtures("warm")
def test_a_real_script_repeats_its_losses_under_another_micro_batch_and_not_under_dropout(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    variants = ("mb16: --micro 16 --accum 1", "dropout: --micro 16 --accum 1 --dropout 0.1")
    asked = SearchOptions(command=("train.py",), variant=variants, steps=8)
    rows = chosen_of(asked, runner, tmp_path)
    same, other = rows
    assert same["status"] == "accepted", same
    assert same["divergence"] < 1e-5
    assert other["status"] == "refused", other
    assert other["divergence"] > 10 * other["limit"]
