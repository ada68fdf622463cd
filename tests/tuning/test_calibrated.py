"""A rehearsal under ``--calibration FILE``: whose rates it uses, what it says, when the file is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.cost.calibrate import calibration as calibrations
from autoprec.cost.calibrate.calibration import kept_file
from autoprec.cost.calibrate.linears import LINEAR_SHAPES, Linear
from autoprec.errors import FileError, StudyError, UsageError
from autoprec.policy import load_policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.tuning import engine
from autoprec.tuning.setup import timed_backends
from tests.tuning.test_engine import H100, options, plain_search, script, search, trained


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def calibration(path: Path, **changes: object) -> str:
    """A file as `autoprec calibrate` writes it on an H100."""
    document = {
        "schema": "autoprec.calibration/3",
        "device": "My H100",
        "target": "h100",
        "date": "2026-01-02",
        "rates": {"host_us": 6.0},
    }
    path.write_text(json.dumps(document | changes))
    return str(path)


def test_a_calibrated_rehearsal_uses_its_rates_and_says_so_everywhere(here: Path) -> None:
    _, _, plain, folder = plain_search(target="h100")
    assert "times are modelled, uncalibrated, compiled" in plain.notes
    assert load_policy(folder / plain.policy).evidence["cost"] == "modelled, uncalibrated, compiled"
    low, high = plain.best["intervals"]["speedup_over_16bit"]
    assert low < plain.best["speedup_over_16bit"] < high, "a modelled speed-up has the model's bounds"
    assert load_policy(folder / plain.policy).evidence["speedup_over_16bit_low"] == pytest.approx(low, rel=1e-3)
    same = next(row for row in plain.presets if row.get("speedup_over_16bit") == 1.0)
    assert "speedup_over_16bit" not in same["intervals"], "the 16-bit run is not unsure over itself"
    about = {"source": "modelled", "written": "fp32", "cost": "modelled, uncalibrated, compiled", "as_compiled": True}
    assert plain.budget.items() >= about.items()
    given = calibration(here / "c.json", linears=linears("bf16", native=8.0))  # slower than the default says
    asked = options(target="h100", study="calibrated", trials=4, calibration=given)
    made, result = search(script(device="cpu"), asked)
    label = "modelled, calibrated on My H100 (2026-01-02), compiled"
    assert f"times are {label}" in result.notes
    assert load_policy(here / result.policy).evidence["cost"] == label
    assert load_policy(made.study_dir / "best.yaml").evidence["cost"] == label
    assert result.reference["step_time_ms"] == plain.reference["step_time_ms"]  # fp32, which the file leaves alone
    times = [
        {row["name"]: row["step_time_ms"] for row in done.presets if row["status"] == "ok"} for done in (plain, result)
    ]
    assert times[1]["all bf16"] > 1.2 * times[0]["all bf16"]


def test_a_calibrated_study_is_resumed_under_the_same_calibration_only(here: Path) -> None:
    given = calibration(here / "c.json")
    asked = options(target="h100", study="mine", trials=1, seeds=1, sampler="random", calibration=given)
    made, _ = search(script(device="cpu"), asked)
    assert f"--calibration {given}" in made.options.resume_command()
    again = replace(asked, resume=True, trials=2)
    other = calibration(here / "other.json", date="2026-01-03")
    with pytest.raises(StudyError, match=r"calibration: was 'My H100 \(2026-01-02\).*', is 'My H100 \(2026-01-03\)"):
        search(script(device="cpu"), replace(again, calibration=other))
    with pytest.raises(StudyError, match=r"calibration: was 'My H100 .*', is None"):
        search(script(device="cpu"), replace(again, calibration=""))
    Path(given).unlink()  # the study's own copy will do
    _, result = search(script(device="cpu"), replace(again, calibration=str(made.study_dir / "calibration.json")))
    assert result.trials["complete"] == 2
    assert "times are modelled, calibrated on My H100 (2026-01-02), compiled" in result.notes


@pytest.mark.parametrize(
    ("device", "changes", "says"),
    [
        ("cpu", {"target": "b200"}, r"target h100\), not on b200"),
        ("cpu", {"target": "cpu"}, r"target h100\), not on cpu"),
        ("cpu", {"cost_scale": "width=2"}, r"target h100\), not on cpu"),
        (H100, {}, "times its steps"),
        (H100, {"target": "h100"}, "times its steps"),
    ],
)
def test_a_calibration_that_nothing_would_use_is_refused_before_a_study_is_begun(
    here: Path, device: str, changes: dict[str, object], says: str
) -> None:
    asked = options(study="mine", calibration=calibration(here / "c.json"), **changes)
    with pytest.raises(UsageError, match=says) as refused:
        search(script(device=device), asked)
    assert "--calibration" in f"{refused.value.what} {refused.value.fix}"
    assert not (here / "autoprec-runs" / "mine" / "study.db").exists()


def test_a_file_that_is_no_calibration_is_refused_before_the_script_starts(here: Path) -> None:
    simulated = script(device="cpu")
    wrong = calibration(here / "c.json", rates={"bandwidth": 7.0})
    for path, says in (("missing.json", "no such file"), ("train.py", "not a mapping"), (wrong, "a share above 1")):
        with pytest.raises(FileError, match=says):
            search(simulated, options(target="h100", calibration=path))
    with pytest.raises(UsageError, match="times its steps"):  # whatever the device turns out to be
        search(simulated, options(calibration=calibration(here / "c.json")))
    assert simulated.calls == []
    assert not (here / "autoprec-runs").exists()


def test_the_cpu_is_calibrated_on_its_own(here: Path) -> None:
    asked = options(target="cpu", cost_scale="width=2", calibration=calibration(here / "c.json", target="cpu"))
    with pytest.raises(UsageError, match="has no effect on the CPU"):
        search(script(device="cpu"), asked)


def test_a_calibration_serves_the_calibrated_device_itself_at_another_size(here: Path) -> None:
    asked = options(cost_scale="width=2", trials=3, calibration=calibration(here / "c.json"))
    _, result = search(script(), asked)
    assert "times are modelled, calibrated on My H100 (2026-01-02), compiled, at scale width=2" in result.notes


def linears(recipe: str = "fp8_rowwise", **times: float) -> list[dict[str, object]]:
    """Timed linears of a recipe, the same eager and compiled, in milliseconds by backend."""
    return [
        Linear(recipe, backend, how, LINEAR_SHAPES[0], 1e-3 * value, 0.01, 0.03).to_json()
        for backend, value in times.items()
        for how in ("eager", "compiled")
    ]


def record(policy: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What a policy's evidence says of its recipes, if fp8_delayed is faster by Transformer Engine."""
    said = "transformer_engine: 1.25x native at fp8_delayed, measured"
    found = {"fp8_delayed": {"backend": "transformer_engine", "reason": said}}
    return {name: row for name, row in found.items() if name in policy["recipes"]}


@pytest.fixture
def kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `autoprec calibrate` kept of the device that the script trains on."""
    monkeypatch.setattr(calibrations, "installed_version", {"torch": "2.11.0", "torchao": "0.18.0"}.get)
    path = kept_file(H100)
    path.parent.mkdir()
    versions = {"torch": "2.11.0+cu130", "torchao": "0.18.0"}
    timed = [*linears("bf16", native=8.0), *linears("fp8_delayed", native=4.0, transformer_engine=3.2)]
    calibration(path, device=H100, versions=versions, linears=timed)
    return path


def test_a_timed_search_runs_each_recipe_by_the_backend_that_was_timed_fastest(here: Path, kept: Path) -> None:
    simulated = script()
    made, result = search(simulated, options(study="mine"))
    said = (
        "transformer_engine: 1.25x native at fp8_delayed, measured (eager linears, NVIDIA H100 80GB HBM3, 2026-01-02)"
    )
    assert f"who runs the GEMMs: {said}" in result.notes
    written = [load_policy(path).to_dict() for path in (made.study_dir / "front").glob("*.yaml")]
    written.append(load_policy(here / result.policy).to_dict())
    trained = [spec.policy for _, spec in simulated.calls if spec.kind == "train" and spec.policy is not None]
    for found in (*trained, *written):
        assert found.get("evidence", {}).get("backends", {}) == record(found)
    assert any(record(found) for found in trained)
    assert any(record(found) for found in written)
    assert {spec.backend for _, spec in simulated.calls} == {"auto"}
    assert made.setup is not None
    assert made.setup.cost.label == f"modelled, calibrated on {H100} (2026-01-02), not compiled"


def test_what_people_write_by_hand_runs_where_the_linears_say_that_nothing_gains(here: Path, kept: Path) -> None:
    """On an H100 a search ended after 37 s, "at most 1.00x", by linears whose launches were taken for their time."""
    timed = linears("bf16", native=1.0)
    for name in ("fp8_rowwise", "fp8_tensorwise", "fp8_delayed", "fp8_block"):
        timed += linears(name, native=90.0)
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"linears": timed}))
    simulated = script(compile_s=3.0)
    made, result = search(simulated, options(force=False))
    assert made.setup is not None
    verdict = made.setup.verdict()
    assert verdict.bound_speedup < 1.03
    stay = replace(verdict, kind="stay")
    assert engine._told(stay, measured=True) == f"by the cost model, which the trials check: {stay.reason}"
    assert engine._told(stay, measured=False) == stay.reason
    ran = " ".join(policy for _, policy, _ in trained(simulated))
    assert "fp8_tensorwise" in ran
    assert "fp8_delayed" in ran
    assert result.best["speedup_over_16bit"] > 1.1  # as the simulated script is: the model was wrong


def test_a_study_goes_on_under_what_it_was_begun_with(here: Path, kept: Path) -> None:
    asked = options(study="mine", trials=1, seeds=1, sampler="random")
    search(script(), asked)
    kept.unlink()  # or measured again: the study has its own
    _, result = search(script(), replace(asked, resume=True, trials=2))
    assert result.trials["complete"] == 2
    assert any("who runs the GEMMs: transformer_engine" in note for note in result.notes)


def test_a_study_begun_without_goes_on_without(here: Path, kept: Path) -> None:
    before = kept.read_text()
    kept.unlink()
    asked = options(study="mine", trials=1, seeds=1, sampler="random")
    search(script(), asked)
    kept.write_text(before)
    _, result = search(script(), replace(asked, resume=True, trials=2))
    assert result.trials["complete"] == 2
    assert not any("who runs" in note for note in result.notes)


@pytest.mark.parametrize("changes", [{"device": H100, "target": "h200"}, {"device": "NVIDIA H200"}, {"linears": []}])
def test_of_another_device_or_without_linears_nothing_is_chosen(
    here: Path, kept: Path, changes: dict[str, object]
) -> None:
    document = json.loads(kept.read_text())
    kept.write_text(json.dumps(document | changes))
    _, result = search(script(), options(trials=1, seeds=1, sampler="random"))
    assert not any("who runs" in note for note in result.notes)


def test_a_backend_asked_for_by_name_is_not_chosen_again(here: Path, kept: Path) -> None:
    simulated = script()
    _, result = search(simulated, options(trials=1, seeds=1, sampler="random", backend="native"))
    assert not any("who runs" in note for note in result.notes)
    assert all("backends" not in str(spec.policy) for _, spec in simulated.calls)


def test_a_file_with_linears_serves_a_search_that_times_its_steps(here: Path) -> None:
    given = calibration(here / "c.json", linears=linears(native=5.0, torchao=4.0))
    _, result = search(script(), options(calibration=given, trials=1, seeds=1, sampler="random"))
    assert any("torchao: 1.25x native at fp8_rowwise" in note for note in result.notes)


def test_what_a_policy_executes_as_decides_which_linears_count() -> None:
    rows = linears(native=5.0, torchao=4.0)
    eager = [row | {"how": "eager"} for row in linears(native=4.0, torchao=5.0)]
    document = {"linears": [*[row for row in rows if row["how"] == "compiled"], *eager[::2]]}
    backends = timed_backends(document, "auto", compiled=False)
    assert backends is not None
    recipes = {"fp8_rowwise": BUILTIN_RECIPES["fp8_rowwise"]}
    assert backends(recipes, "compile")["fp8_rowwise"]["backend"] == "torchao"
    assert backends(recipes, "keep")["fp8_rowwise"]["backend"] == "native"
    assert timed_backends({}, "auto", compiled=True) is None
