from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.cost.calibrate import calibration
from autoprec.cost.calibrate.calibration import (
    SCHEMA,
    calibrate,
    check_target,
    kept_calibration,
    kept_file,
    load_calibration,
)
from autoprec.cost.calibrate.linears import Linears
from autoprec.cost.rates import Rates, default_rates
from autoprec.errors import FileError, UsageError
from autoprec.precision.hardware import TARGETS

H100 = TARGETS["h100"]
#: What the fake device really reaches: unlike the defaults.
TRUTH: Rates = replace(default_rates(H100), bandwidth=0.88, launch_us=5.0)


class FakeBench:
    """A device that obeys TRUTH."""

    def warm(self) -> None:
        self.warmed = True

    def host(self) -> float:
        return 7e-6

    def copy(self, size: int) -> float:
        return 2.0 * size / (H100.bandwidth * TRUTH.bandwidth)

    def launch(self) -> float:
        return TRUTH.launch_us * 1e-6

    def versions(self) -> dict[str, str]:
        return {"torch": "0.0"}


class DeadBench(FakeBench):
    def copy(self, size: int) -> float:
        raise RuntimeError("no device")

    launch = host = warm = copy


def test_calibration_finds_what_the_device_reaches() -> None:
    lines: list[str] = []
    document = calibrate(FakeBench(), H100, "Fake H100", "2026-01-02", lines.append)
    assert document["rates"] == pytest.approx({"bandwidth": 0.88, "launch_us": 5.0, "host_us": 7.0}, rel=0.01)
    assert [line.partition(":")[0] for line in lines] == list(document["rates"])
    assert document["versions"] == {"torch": "0.0"}


def test_a_rate_that_fails_keeps_its_default_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBench, "launch", DeadBench.copy)
    monkeypatch.setattr(FakeBench, "host", DeadBench.copy)
    lines: list[str] = []
    document = calibrate(FakeBench(), H100, "Fake H100", "2026-01-02", lines.append)
    assert list(document["rates"]) == ["bandwidth"]
    assert sum("default is kept" in line for line in lines) == 2


def test_a_written_file_is_read_back_and_labels_figures(tmp_path: Path) -> None:
    document = calibrate(FakeBench(), H100, "Fake H100", "2026-01-02")
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    found = load_calibration(path)
    assert found["label"] == "modelled, calibrated on Fake H100 (2026-01-02)"
    merged = default_rates(H100).merged(found["rates"], found["label"])
    assert merged.bandwidth == pytest.approx(0.88)
    assert merged.gemm == default_rates(H100).gemm  # not measured: as it was


def test_a_calibration_of_another_device_is_refused() -> None:
    check_target({"device": "NVIDIA H100", "target": "h100"}, H100, "c.json")
    check_target({"device": "NVIDIA H100"}, H100, "c.json")  # a file need not name one
    with pytest.raises(UsageError, match=r"c\.json: was measured on NVIDIA H100 \(target h100\), not on b200"):
        check_target({"device": "NVIDIA H100", "target": "h100"}, TARGETS["b200"], "c.json")


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing could be measured"):
        calibrate(DeadBench(), H100, "Dead", "2026-01-02")


GOOD = {"schema": SCHEMA, "device": "X", "date": "2026-01-02", "rates": {"bandwidth": 0.5}}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": "other/1"}, "schema"),
        ({"schema": "autoprec.calibration/1"}, "schema"),
        ({"rates": 5}, "no 'rates'"),
        ({"date": None}, "no 'date'"),
        ({"rates": {"gemm": {"bf16": 0.5}}}, "c.json: unknown rates.gemm\n  fix: valid: bandwidth"),
        ({"rates": {"bandwidth": 1.2}}, "a share above 1"),
    ],
)
def test_bad_files_say_what_is_wrong(tmp_path: Path, change: dict[str, object], match: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({k: v for k, v in {**GOOD, **change}.items() if v is not None}))
    with pytest.raises(FileError, match=match):
        load_calibration(path)


@pytest.mark.parametrize(
    "rates",
    [
        {"launch_us": 0},
        {"launch_us": float("nan")},
        {"launch_us": True},
        {"bandwidth": -1},
        {"launch_us": "x"},
        {"launch_us": float("inf")},
    ],
)
def test_rates_that_are_no_positive_numbers_are_refused(rates: dict[str, object]) -> None:
    with pytest.raises(FileError, match="not a positive number"):
        default_rates(H100).merged(rates, "test")


LINEAR = {
    "recipe": "fp8_rowwise",
    "backend": "torchao",
    "how": "compiled",
    "shape": [8192, 4096, 16384],
    "seconds": 4e-3,
    "spread": 0.01,
    "error": 0.03,
    "failed": "",
}


def test_a_file_without_linears_chooses_no_backend(tmp_path: Path) -> None:
    document = calibrate(FakeBench(), H100, "Fake H100", "2026-01-02")
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    assert Linears.of(load_calibration(path)).rows == ()
    path.write_text(json.dumps(document | {"linears": [LINEAR]}))
    assert len(Linears.of(load_calibration(path)).rows) == 1
    path.write_text(json.dumps(document | {"linears": [LINEAR | {"seconds": "fast"}]}))
    with pytest.raises(FileError, match=r"c\.json: .* is not a timed linear"):
        load_calibration(path)


def test_what_was_measured_here_is_found_by_the_device_until_a_library_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    installed = {"torch": "2.11.0", "torchao": "0.18.0"}
    monkeypatch.setattr(calibration, "installed_version", installed.get)
    assert kept_calibration("NVIDIA H100 80GB HBM3") is None
    path = kept_file("NVIDIA H100 80GB HBM3")
    assert path == tmp_path / "autoprec" / "calibration-nvidia-h100-80gb-hbm3.json"
    document = calibrate(FakeBench(), H100, "NVIDIA H100 80GB HBM3", "2026-01-02")
    document["versions"] = {"torch": "2.11.0+cu130", "runtime": "13.0", "torchao": "0.18.0"}
    path.parent.mkdir()
    path.write_text(json.dumps(document))
    found = kept_calibration("NVIDIA H100 80GB HBM3")
    assert found is not None
    assert found["rates"] == document["rates"]
    assert kept_calibration("NVIDIA H200") is None
    installed["transformer_engine"] = "2.20"  # not there when it was measured
    assert kept_calibration("NVIDIA H100 80GB HBM3") is None
    del installed["transformer_engine"]
    installed["torch"] = "2.12.0"
    assert kept_calibration("NVIDIA H100 80GB HBM3") is None
    installed["torch"] = "2.11.0"
    path.write_text("{")
    assert kept_calibration("NVIDIA H100 80GB HBM3") is None
