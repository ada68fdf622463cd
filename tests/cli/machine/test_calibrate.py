from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.machine import calibrate as command
from autoprec.cost.calibrate import calibration, cpu
from autoprec.cost.calibrate.calibration import load_calibration
from autoprec.cost.calibrate.linears import LINEAR_SHAPES, Linear
from autoprec.errors import FileError, UnsupportedError, UsageError
from autoprec.precision.hardware import TARGETS


class Bench:
    def warm(self) -> None:
        return None

    def copy(self, size: int) -> float:
        return 2.0 * size / (0.8 * TARGETS["h100"].bandwidth)

    def launch(self) -> float:
        return 4e-6

    def host(self) -> float:
        raise RuntimeError("no clock")

    def versions(self) -> dict[str, str]:
        return {"torch": "test"}


LINEARS = [
    Linear("fp8_rowwise", backend, "compiled", LINEAR_SHAPES[0], seconds, 0.01, 0.03).to_json()
    for backend, seconds in (("native", 5e-3), ("torchao", 4e-3))
]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_has_gpu", lambda: True)
    monkeypatch.setattr(command, "_bench", lambda name: (Bench(), TARGETS[name or "h100"], "Fake H100"))
    monkeypatch.setattr(command, "_linears", lambda _target, _say: LINEARS)
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "cache")


def test_a_device_is_measured_and_written(fake_gpu: None) -> None:
    path = Path("calibration-h100.json")
    found = CliRunner().invoke(command.calibrate, ["-o", str(path)], catch_exceptions=False)
    assert found.exit_code == 0
    assert "Fake H100: 2 rates, 2 linears" in found.output
    assert "compiled: torchao: 1.25x native at fp8_rowwise, measured" in found.output
    assert f"--calibration {path}" in found.output
    document = load_calibration(path)
    assert document["device"] == "Fake H100"
    assert document["rates"] == pytest.approx({"bandwidth": 0.8, "launch_us": 4.0})
    assert document["linears"] == LINEARS
    assert load_calibration(calibration.kept_file("Fake H100")) == document


def test_a_library_that_takes_the_process_along_leaves_what_was_measured_before(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(_target: object, _say: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_linears", crash)
    path = Path("calibration-h100.json")
    CliRunner().invoke(command.calibrate, [])
    assert load_calibration(path)["rates"]["bandwidth"]


def test_a_folder_that_cannot_be_written_costs_no_calibration(
    fake_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibration, "cache_folder", lambda: tmp_path / "file")
    found = CliRunner().invoke(command.calibrate, [], catch_exceptions=False)
    assert found.exit_code == 0
    assert "searches on this device will not find it by themselves" in found.output
    assert "searches on this device use it as it is" not in found.output


def test_a_calibration_replaces_nothing_but_a_calibration(fake_gpu: None) -> None:
    path = Path("calibration-h100.json")
    path.write_text("print('hello')\n")
    with pytest.raises(FileError, match="is not a calibration"):
        CliRunner().invoke(command.calibrate, [], catch_exceptions=False)
    assert path.read_text() == "print('hello')\n"
    path.unlink()
    for _ in range(2):
        assert CliRunner().invoke(command.calibrate, [], catch_exceptions=False).exit_code == 0


def test_without_a_gpu_it_says_what_to_do() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedError, match="sees no CUDA"):
        CliRunner().invoke(command.calibrate, ["--target", "h100"], catch_exceptions=False)


def test_a_device_nobody_knows_is_named_or_described(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some Accelerator 9000")
    with pytest.raises(UsageError, match="9000' is not in the hardware table\n  fix: name its entry with --target"):
        CliRunner().invoke(command.calibrate, [], catch_exceptions=False)


def test_the_cpu_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []

    def probe() -> dict[str, object]:
        calls.append(1)
        return dict(cpu.FALLBACK)

    monkeypatch.setattr(cpu, "_probe", probe)
    cpu._load.cache_clear()
    for _ in range(2):
        cpu._load.cache_clear()
        found = CliRunner().invoke(command.calibrate, ["--target", "cpu"], catch_exceptions=False)
        assert found.exit_code == 0
    assert "on one thread int8 gains 1." in found.output
    assert len(calls) == 2
    assert list(tmp_path.glob("autoprec/cpu-*.json"))
    cpu._load.cache_clear()


def test_without_a_gpu_the_default_measures_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended with exit code 1; what is asked of a GPU by name still does."""
    monkeypatch.setattr(command, "_has_gpu", lambda: False)
    monkeypatch.setattr(command, "_cpu", lambda: 0)
    found = CliRunner().invoke(command.calibrate, [], catch_exceptions=False)
    assert found.exit_code == 0
    assert "torch sees no CUDA or ROCm device here: the CPU is measured" in found.output
    assert isinstance(CliRunner().invoke(command.calibrate, ["--target", "h100"]).exception, UnsupportedError)
