"""``search --dry-run`` says what would be tried and how long it takes, runs no trial and leaves nothing behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.cli.phases import Phases
from autoprec.cli.scripts.plan import _lines, _policies, make_plan
from autoprec.errors import NothingAcceptableError, ScriptError
from autoprec.graph.census import Judged, Observation
from autoprec.trial.protocol import HostInfo, RecordSpec, TrialResult, TrialSpec
from autoprec.tuning.phases.soundness import MENDED
from tests.cli.helpers import autoprec
from tests.cli.test_recording import TRAIN
from tests.simulated import SimulatedRunner, SimulatedScript, simulated_graph
from tests.tuning.phases.test_soundness import LOST
from tests.tuning.test_engine import engine, here, options, plain_search, script  # noqa: F401


def plan(simulated: SimulatedScript, runner: Any = SimulatedRunner, **changes: object) -> dict[str, Any]:
    with Phases(quiet=True) as phases:
        return make_plan(options(**changes), phases, lambda seed, _folder: runner(simulated, seed))


def row(found: dict[str, Any], name: str) -> str:
    return " ".join(line for line in _lines(found) if line.startswith(name))


def test_one_step_is_recorded_and_nothing_else_is_run(here: Path) -> None:  # noqa: F811
    simulated = script()
    found = plan(simulated, trials=20)
    assert [(seed, type(spec)) for seed, spec in simulated.calls] == [(0, RecordSpec)]
    assert [path.name for path in here.iterdir()] == ["train.py"]
    assert (found["target"], found["source"], found["study"]) == ("h100", "measured", "train")


def test_what_is_planned_is_what_the_search_runs(here: Path) -> None:  # noqa: F811
    """The same space, the policies of the plan, written by hand first, and no more than it says."""
    _, made, result, _ = plain_search(trials=20)
    found = plan(script(), trials=20)
    assert made.setup is not None
    assert found["space"]["choices"] == list(made.setup.problem.choice_names)
    assert list(found["space"]["groups"]) == [group.name for group in made.setup.problem.groups]
    tried = [run.name for run in made.records if run.kind == "preset"]
    assert set(found["by_hand"]) <= set(tried) <= set(found["presets"])
    assert tried[: len(found["by_hand"])] == found["by_hand"]
    assert found["verdict"]["bound"] == pytest.approx(result.budget["bound_speedup"])
    assert found["usual"]["trials"] <= found["most"]["trials"] == 20
    assert sum(result.trials.values()) <= 20


def test_the_parts_of_the_time_are_the_whole(here: Path) -> None:  # noqa: F811
    found = plan(script())
    for name in ("usual", "most"):
        seconds = found[name]["seconds"]
        assert seconds["total"] == pytest.approx(sum(value for part, value in seconds.items() if part != "total"))
    assert found["most"]["seconds"]["trials"] == pytest.approx(14 * found["run_s"])
    assert found["step_s"]["source"] == "modelled"
    assert 0 < found["step_s"]["value"] * (8 + 3) <= found["run_s"]


def test_a_budget_ends_the_plan_too(here: Path) -> None:  # noqa: F811
    assert plan(script(), budget_s=5.0)["most"]["seconds"]["total"] == 5.0
    assert "cut short by --budget 5 s" in row(plan(script(), budget_s=5.0), "duration")
    assert "cut short" not in row(plan(script(), budget_s=1e6), "duration")


def test_a_space_with_few_policies_has_few_trials(here: Path) -> None:  # noqa: F811
    Path("two.yaml").write_text("schema: autoprec.space/1\nname: two\nchoices: [{match: '*', choices: [keep, bf16]}]\n")
    small = script(graph=replace(simulated_graph(1, width=4096, tokens=16384)))
    found = plan(small, space="two.yaml", trials=1000)
    assert found["most"]["trials"] == found["space"]["policies"] == pytest.approx(2**5)


@pytest.mark.parametrize("force", [False, True])
def test_a_search_that_ends_with_its_bound_runs_nothing(here: Path, force: bool) -> None:  # noqa: F811
    tiny = replace(simulated_graph(2, width=64, tokens=64))
    sixteen = replace(tiny, layers=tuple(replace(layer, dtype="bfloat16") for layer in tiny.layers))
    found = plan(SimulatedScript(sixteen), target="h100", force=force)
    assert found["ends"] is not force
    assert found["most"]["trials"] == (14 if force else 0)
    assert ("none: the search ends with its bound" in row(found, "trials")) is not force
    if not force:
        assert found["most"]["seconds"]["total"] < 10


def test_where_only_16_bits_are_tried_nothing_else_is_planned(here: Path) -> None:  # noqa: F811
    found = plan(SimulatedScript(simulated_graph(2, width=64, tokens=64)), target="h100", force=False)
    assert found["by_hand"]
    assert not any("fp8" in name for name in (*found["presets"], *found["space"]["choices"]))
    assert "only 16-bit policies are tried" in row(found, "note")


def test_what_a_policy_mends_is_planned_as_it_is_searched(here: Path) -> None:  # noqa: F811
    lost = Judged(observations=(Observation("updates-lost", "train.py:5", figures=LOST),))

    class Mends(SimulatedRunner):
        def run(self, spec: TrialSpec) -> TrialResult:
            if isinstance(spec, RecordSpec) and spec.policy is not None:
                return TrialResult("ok", answer=replace(self.script.graph, judged=Judged()))
            return super().run(spec)

    faulty = replace(simulated_graph(), judged=lost)
    found = plan(script(graph=faulty), Mends, trials=4)
    assert found["by_hand"][0] == MENDED
    assert found["space"]["parameters"]["optimizer.weights"] == ["fp32", "bf16_kahan"]
    assert 'neither "stay" nor a divergence of 0: train.py:5' in row(found, "note")
    assert "--reference fp32 compares with a run in fp32" in row(found, "note")
    simulated = script(graph=faulty)
    made = engine(simulated, options(trials=4))
    made._factory = lambda seed, _folder: Mends(simulated, seed)
    made.run()
    assert made.setup is not None
    assert found["by_hand"][0] == next(run.name for run in made.records if run.kind == "preset")
    assert list(found["space"]["parameters"]) == list(made.setup.problem.parameters)


@pytest.mark.parametrize(("workers", "at_once"), [(1, 1), (3, 3)])
def test_trials_beside_each_other_take_less(here: Path, workers: int, at_once: int) -> None:  # noqa: F811
    found = plan(script(device="cpu"), target="h100", workers=workers)
    assert found["at_once"] == at_once
    alone = plan(script(device="cpu"), target="h100", workers=1)
    assert found["most"]["seconds"]["trials"] == pytest.approx(alone["most"]["seconds"]["trials"] / at_once)


def test_variants_are_named(here: Path) -> None:  # noqa: F811
    found = plan(script(), variant=("mb16: --micro-batch 16",))
    assert found["variants"] == ["mb16: --micro-batch 16"]
    assert found["space"]["parameters"]["variant"] == ["as given", "mb16"]
    assert "timed first" in row(found, "variants")


def test_what_a_script_compiles_is_not_counted_and_that_is_said(here: Path) -> None:  # noqa: F811
    assert "not counted" in row(plan(script(compile_s=60.0)), "one run")
    assert "not counted" not in row(plan(script()), "one run")


def test_a_study_that_is_there_is_passed_by(here: Path) -> None:  # noqa: F811
    (here / "autoprec-runs" / "train").mkdir(parents=True)
    (here / "autoprec-runs" / "train" / "study.db").touch()
    assert plan(script())["study"] == "train-2"
    assert "autoprec-runs/train-2/" in row(plan(script()), "writes")
    assert [path.name for path in (here / "autoprec-runs").iterdir()] == ["train"]


def test_a_script_that_fails_is_an_error_as_in_a_search(here: Path) -> None:  # noqa: F811
    class Refuses(SimulatedRunner):
        def start(self) -> HostInfo:
            raise ScriptError("the script ended with exit code 2 before its first training step")

    with pytest.raises(ScriptError, match="exit code 2"):
        plan(script(), Refuses)
    with pytest.raises(ScriptError, match="could not be recorded: it broke"):
        plan(script(fail=lambda _policy: ("crashed", "it broke")))
    with pytest.raises(NothingAcceptableError, match="no trainable GEMM"):
        plan(script(graph=replace(simulated_graph(1), layers=())))
    assert [path.name for path in here.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--resume"], 2, "--dry-run begins nothing, and --resume continues"),
        (["--resume", "--study", "mine"], 2, "leave one of them out"),
        (["--target", "h1000"], 2, "h1000"),
        (["--space", "nowhere"], 2, "nowhere"),
        (["--variant", "a: --b", "--target", "h100"], 2, "--variant is timed"),
        (["--max-divergence", "0"], 2, "--max-divergence"),
        (["--storage", "nothing://x"], 2, "--storage"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_the_script_is_started(
    here: Path,  # noqa: F811
    words: list[str],
    code: int,
    said: str,
) -> None:
    Path("train.py").write_text("raise SystemExit('it was started')")
    found = autoprec("search", "--dry-run", *words, "train.py")
    assert (found.code, found.out) == (code, "")
    assert said in found.err
    assert "it was started" not in found.err
    assert [path.name for path in here.iterdir()] == ["train.py"]


def test_a_person_reads_how_many_policies_there_are() -> None:
    assert [_policies(n) for n in (1, 8190, 3.2e9)] == ["1 policy", "8,190 policies", "3.2e+09 policies"]
    assert "more policies than" in _policies(1e30)
    assert "more policies than" in _policies(None)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_real_script_is_planned_and_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN.replace("range(3)", "range(30)"), encoding="utf-8")
    words = ["search", "--dry-run", "--target", "h100", "--cost-scale", "width=64,tokens=512", "--trials", "12"]
    found = autoprec(*words, "--budget", "30m", "--max-memory", "60GiB", "--force", "--json", "train.py")
    assert found.code == 0, found.err
    document = found.json()
    assert document["source"] == "modelled"
    assert document["limits"] == {
        "max_divergence": 0.0025,
        "max_gradient_error": 0.12,
        "max_memory": 60 * 2**30,
        "budget_s": 1800.0,
        "trials": 12,
        "objective": "throughput",
    }
    assert document["most"]["trials"] == 12
    assert 0 < document["setup_s"] < document["usual"]["seconds"]["total"] <= 1800
    assert "fp8_rowwise, head in bf16" in document["presets"]
    assert "recording one training step" in found.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
