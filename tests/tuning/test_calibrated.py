"""A rehearsal under ``--calibration FILE``: whose rates it uses, what it says, when the file is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import FileError, StudyError, UsageError
from autoprec.policy import load_policy
from tests.tuning.test_engine import H100, options, script, search


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def calibration(path: Path, **changes: object) -> str:
    """A file as `autoprec calibrate` writes it on an H100 whose FP8 is slower than the default says."""
    document = {
        "schema": "autoprec.calibration/1",
        "device": "My H100",
        "target": "h100",
        "date": "2026-01-02",
        "rates": {"gemm": {"bf16": 0.5, "fp8_tensor": 0.4, "fp8_row": 0.4}},
    }
    path.write_text(json.dumps(document | changes))
    return str(path)


def test_a_calibrated_rehearsal_uses_its_rates_and_says_so_everywhere(here: Path) -> None:
    _, plain = search(script(device="cpu"), options(target="h100", study="plain", trials=4))
    assert "times are modelled, uncalibrated" in plain.notes
    assert load_policy(here / plain.policy).evidence["cost"] == "modelled, uncalibrated"
    asked = options(target="h100", study="calibrated", trials=4, calibration=calibration(here / "c.json"))
    made, result = search(script(device="cpu"), asked)
    label = "modelled, calibrated on My H100 (2026-01-02)"
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
    asked = options(target="h100", study="mine", trials=3, sampler="random", calibration=given)
    made, _ = search(script(device="cpu"), asked)
    assert f"--calibration {given}" in made.options.resume_command()
    again = replace(asked, resume=True, trials=5)
    other = calibration(here / "other.json", date="2026-01-03")
    with pytest.raises(StudyError, match=r"calibration: was 'My H100 \(2026-01-02\).*', is 'My H100 \(2026-01-03\)"):
        search(script(device="cpu"), replace(again, calibration=other))
    with pytest.raises(StudyError, match=r"calibration: was 'My H100 .*', is None"):
        search(script(device="cpu"), replace(again, calibration=""))
    Path(given).unlink()  # the study's own copy will do
    _, result = search(script(device="cpu"), replace(again, calibration=str(made.study_dir / "calibration.json")))
    assert result.trials["complete"] == 5
    assert "times are modelled, calibrated on My H100 (2026-01-02)" in result.notes


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
    wrong = calibration(here / "c.json", rates={"gemm": {"bf16": 7.0}})
    for path, says in (("missing.json", "no such file"), ("train.py", "not a mapping"), (wrong, "share of the peak")):
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
    assert "times are modelled, calibrated on My H100 (2026-01-02), at scale width=2" in result.notes
