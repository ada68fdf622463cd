"""Products and blocks on a GPU: rehearsed on a CPU, told beside bf16, and what fails costs its own row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import speed as gpu_speed
from benchmarks.gpu.parts import Parts


def test_products_of_both_accumulations_are_told_and_one_that_fails_is_told_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Bench:
        def gemm(self, family: str, m: int, k: int, n: int, *, fast: bool) -> float | None:
            if fast:
                raise RuntimeError("no such kernel\nand more")
            return 2 * m * k * n / 1e12  # a second per TFLOP

    monkeypatch.setattr(gpu_speed, "_cpu_bench", Bench)
    lines = gpu_speed.products(tiny=True)
    assert "| bf16 | 1 |" in lines
    assert "| fp8_row, full accumulation | 1 |" in lines
    assert "| fp8_row, fast accumulation | RuntimeError: no such kernel |" in lines


def test_a_cpu_stands_in_for_the_device_of_products() -> None:
    assert len(gpu_speed.products(tiny=True)) == 2 + 2 + 5


def test_a_block_runs_in_a_recipe_and_is_audited() -> None:
    rows = {name: gpu_speed.block_row(name, "eager", tiny=True) for name in ("bf16", "native-fp8_rowwise")}
    assert rows["native-fp8_rowwise"]["executed"] == "as asked"
    assert rows["native-fp8_rowwise"]["loss"] == pytest.approx(rows["bf16"]["loss"], rel=0.02)
    assert rows["native-fp8_rowwise"]["gradient"] != rows["bf16"]["gradient"]


def test_rows_are_told_beside_bf16_of_the_same_kind() -> None:
    def row(step_ms: float) -> dict[str, Any]:
        return {"step_ms": step_ms, "loss": 2.0, "gradient": 1.0, "breaks": 0}

    rows: dict[str, dict[str, Any]] = {
        "bf16": {"eager": row(4.0), "compiled": row(2.0)},
        "te-current": {"eager": row(2.0), "compiled": {"failed": "it breaks"}},
        "te-delayed": {"failed": "no module"},
    }
    text = "\n".join(gpu_speed.table(rows))
    assert "| te-current | eager | 2.00 | 2.000 | - | 0 | 1.000 | 1.000 |  |" in text
    assert "| te-current | compiled | failed: it breaks |" in text
    assert "| te-delayed | | failed: no module |" in text
    rows["native-fp8_tensorwise"] = {"eager": row(1.0), "compiled": row(1.0)}
    assert gpu_speed.beside_libraries(rows) == ["- te-current / native-fp8_tensorwise, eager: 2.000"]


def test_a_precision_that_compiles_for_too_long_keeps_its_eager_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "python"
    child.write_text('#!/bin/sh\necho \'{"eager": {"step_ms": 2.0}}\'\nexec sleep 30\n')
    child.chmod(0o755)
    monkeypatch.setattr(gpu_speed.sys, "executable", str(child))
    monkeypatch.setattr(gpu_speed, "LIMIT", 1.0)
    found = gpu_speed.one("bf16", tiny=True)
    assert found == {"eager": {"step_ms": 2.0}, "compiled": {"failed": "not done after 1 s"}}


def test_a_precision_whose_process_dies_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed.sys, "executable", "/bin/false")
    found = Parts(tmp_path).get("te-current", lambda: gpu_speed.one("te-current", tiny=True))
    assert found == {"failed": "exit 1"}
    assert (tmp_path / "te-current.json").exists()
