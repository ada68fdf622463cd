from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.cost.calibrate import calibration
from autoprec.cost.calibrate.calibration import (
    SCHEMA,
    Point,
    calibrate,
    check_target,
    fit_rates,
    kept_calibration,
    kept_file,
    load_calibration,
)
from autoprec.cost.calibrate.linears import Linears
from autoprec.cost.kernels import cast_traffic, gemm_seconds
from autoprec.cost.rates import Rates, default_rates
from autoprec.errors import FileError, UsageError
from autoprec.precision.hardware import TARGETS

H100 = TARGETS["h100"]
#: What the fake device really reaches: unlike the defaults in every respect.
TRUTH: Rates = replace(
    default_rates(H100),
    gemm={"bf16": 0.61, "fp32": 0.5, "fp8_tensor": 0.55, "fp8_row": 0.44},
    cast={"fp8_tensor": 0.33, "fp8_row": 0.21},
    quantise_us={"fp8_tensor": 9.0, "fp8_row": 14.0},
    bandwidth=0.88,
    launch_us=5.0,
)


class FakeBench:
    """A device that obeys TRUTH; it has no delayed, block, MX or NVFP4 kernels to measure."""

    def warm(self) -> None:
        self.warmed = True

    def host(self) -> float | None:
        return 7e-6

    def gemm(self, family: str, m: int, k: int, n: int) -> float | None:
        return gemm_seconds(H100, TRUTH, family, m, k, n) if family in TRUTH.gemm else None

    def cast(self, family: str, rows: int, columns: int) -> float | None:
        if family not in TRUTH.cast:
            return None
        moved, _ = cast_traffic(family, (0, 1), 2.0, layouts=H100.layouts, library=False)
        return rows * columns * moved / (H100.bandwidth * TRUTH.cast[family]) + TRUTH.quantise_us[family] * 1e-6

    def copy(self, size: int) -> float | None:
        return 2.0 * size / (H100.bandwidth * TRUTH.bandwidth)

    def launch(self) -> float | None:
        return TRUTH.launch_us * 1e-6

    def versions(self) -> dict[str, str]:
        return {"torch": "0.0"}


class DeadBench(FakeBench):
    def gemm(self, family: str, m: int, k: int, n: int) -> float | None:
        return None

    def cast(self, family: str, rows: int, columns: int) -> float | None:
        return None

    def copy(self, size: int) -> float | None:
        return None

    def launch(self) -> float | None:
        return None

    def host(self) -> float | None:
        return None

    def warm(self) -> None:
        raise RuntimeError("no device")


def test_calibration_finds_what_the_device_reaches() -> None:
    lines: list[str] = []
    document = calibrate(FakeBench(), H100, "Fake H100", "2026-01-02", lines.append)
    rates = document["rates"]
    for family, share in TRUTH.gemm.items():
        assert rates["gemm"][family] == pytest.approx(share, rel=0.03)
    for family, share in TRUTH.cast.items():
        assert rates["cast"][family] == pytest.approx(share, rel=0.05)
        assert rates["quantise_us"][family] == pytest.approx(TRUTH.quantise_us[family], rel=0.1)
    assert rates["bandwidth"] == pytest.approx(0.88, rel=0.01)
    assert rates["launch_us"] == pytest.approx(5.0)
    assert rates["host_us"] == pytest.approx(7.0)
    assert "fp8_block" not in rates["gemm"]
    assert rates["gemm"]["fp8_delayed"] == rates["gemm"]["fp8_tensor"]  # the same kernel
    assert sum(" us" in line for line in lines) == len(document["points"])
    assert any("fp8_block" in line and "default is kept" in line for line in lines)
    assert document["drift"] == 0.0
    assert document["versions"] == {"torch": "0.0"}


def test_a_written_file_is_read_back_and_labels_figures(tmp_path: Path) -> None:
    document = calibrate(FakeBench(), H100, "Fake H100", "2026-01-02")
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document))
    found = load_calibration(path)
    assert found["label"] == "modelled, calibrated on Fake H100 (2026-01-02)"
    merged = default_rates(H100).merged(found["rates"], found["label"])
    assert merged.gemm["bf16"] == pytest.approx(0.61, rel=0.03)
    assert merged.gemm["fp8_block"] == default_rates(H100).gemm["fp8_block"]  # not measured: as it was


def test_a_calibration_of_another_device_is_refused() -> None:
    check_target({"device": "NVIDIA H100", "target": "h100"}, H100, "c.json")
    check_target({"device": "NVIDIA H100"}, H100, "c.json")  # a file need not name one
    with pytest.raises(UsageError, match=r"c\.json: was measured on NVIDIA H100 \(target h100\), not on b200"):
        check_target({"device": "NVIDIA H100", "target": "h100"}, TARGETS["b200"], "c.json")


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(UsageError, match="nothing could be measured"):
        calibrate(DeadBench(), H100, "Dead", "2026-01-02")


class Flaky(FakeBench):
    """Row-wise products raise, tensor-wise casts too after the first; the clock falls by a third."""

    def __init__(self) -> None:
        self.slower = 1.0
        self.casts = 0

    def gemm(self, family: str, m: int, k: int, n: int) -> float | None:
        if family == "fp8_row":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        found = super().gemm(family, m, k, n)
        return None if found is None else found * self.slower

    def cast(self, family: str, rows: int, columns: int) -> float | None:
        self.slower = 1.5
        if family == "fp8_tensor":
            self.casts += 1
            if self.casts > 1:
                raise ValueError("")
        return super().cast(family, rows, columns)


def test_a_family_that_fails_keeps_its_default_and_the_rest_is_measured() -> None:
    lines: list[str] = []
    document = calibrate(Flaky(), H100, "Flaky", "2026-01-02", lines.append)
    rates = document["rates"]
    assert "fp8_row" not in rates["gemm"]
    assert rates["gemm"]["fp8_tensor"] == pytest.approx(0.55, rel=0.03)
    assert rates["cast"]["fp8_row"] == pytest.approx(TRUTH.cast["fp8_row"], rel=0.05)
    assert rates["cast"]["fp8_tensor"] == pytest.approx(TRUTH.cast["fp8_tensor"], rel=0.1)  # from one point
    assert sum("CUBLAS_STATUS_NOT_SUPPORTED" in line for line in lines) == 1  # tried once, not per shape
    assert any("clocks moved" in line for line in lines)
    assert document["drift"] == pytest.approx(0.5)


def test_no_point_is_begun_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoprec.cost.calibrate import calibration

    clock = iter(range(0, 10_000, 10))
    monkeypatch.setattr("autoprec.cost.calibrate.calibration.time.monotonic", lambda: float(next(clock)))
    lines: list[str] = []
    points = calibration.measure_points(FakeBench(), H100, lines.append, limit_s=60.0)
    assert [point.kind for point in points] == ["copy", "launch", "host", "gemm", "gemm", "gemm"]
    assert "stopped after 60 s" in lines[-1]


def test_noise_in_one_point_moves_a_median_little() -> None:
    shapes = ((8192, 8192, 8192), (8192, 4096, 16384), (4096, 4096, 4096))
    points = [Point("gemm", "bf16", shape, gemm_seconds(H100, TRUTH, "bf16", *shape)) for shape in shapes]
    points[1] = replace(points[1], seconds=points[1].seconds * 3)
    assert fit_rates(H100, points)["gemm"]["bf16"] == pytest.approx(0.61, rel=0.1)


GOOD = {"schema": SCHEMA, "device": "X", "date": "2026-01-02", "rates": {"gemm": {"bf16": 0.5}}}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"schema": "other/1"}, "schema"),
        ({"ratez": 1}, "unknown key"),
        ({"rates": 5}, "not a mapping"),
        ({"date": None}, "'date' is missing"),
        ({"rates": {"gem": {"bf16": 0.5}}}, "unknown rates.gem\n  fix: valid: gemm"),
        ({"rates": {"gemm": {"bf61": 0.5}}}, "unknown rates.gemm.bf61"),
        ({"rates": {"gemm": "fast"}}, "c.json: rates.gemm is 'fast', not a mapping"),
        ({"rates": {"gemm": {"bf16": 50}}}, "rates.gemm.bf16 is 50, a share of the peak above 1"),
        ({"rates": {"bandwidth": 1.2}}, "a share of the peak above 1"),
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
        {"gemm": {"bf16": 0}},
        {"gemm": {"bf16": "fast"}},
        {"gemm": {"bf16": float("nan")}},
        {"gemm": {"bf16": True}},
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


def test_a_file_of_the_first_schema_is_still_read_and_chooses_no_backend(tmp_path: Path) -> None:
    document = calibrate(FakeBench(), H100, "Fake H100", "2026-01-02")
    path = tmp_path / "c.json"
    path.write_text(json.dumps(document | {"schema": "autoprec.calibration/1"}))
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
