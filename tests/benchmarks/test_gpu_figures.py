"""The day's figures: told of rows alone, strict, and silent about nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.figures import FIGURES_FILE, figures, table


def put(folder: Path, **rows: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, row in rows.items():
        (folder / f"{name.replace('__', '-')}.json").write_text(json.dumps(row))


def run(items: float, losses: tuple[float, ...] = (2.0, 1.0)) -> dict[str, Any]:
    return {"items_per_s": items, "losses": list(losses)}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Rows of a day on which every goal was met."""
    gradients = {name: {"probes": 9, "of": 9, "median": 0.01, "largest": 0.03} for name in ("native", "torchao")}
    gradients["transformer_engine"] = {"probes": 6, "of": 9, "median": 0.02, "largest": 0.1}
    times = {
        "label": "calibrated",
        "rows": [
            {"policy": "as written", "measured_ms": 10.0, "modelled_ms": 10.5},
            {"policy": "all", "measured_ms": 8.0, "modelled_ms": 7.4},
        ],
    }
    put(tmp_path / "fidelity", **{FIGURES_FILE.removesuffix(".json"): {"gradients": gradients, "times": times}})
    compiled = {"native-fp8_rowwise": 2.0, "torchao-rowwise": 2.1, "native-fp8_tensorwise": 2.0}
    for name, step_ms in (compiled | {"torchao-tensorwise": 1.97}).items():
        put(tmp_path / "blocks", **{name: {"compiled": {"step_ms": step_ms}, "eager": {"step_ms": 9.0}}})
    parts = tmp_path / "end_to_end" / "parts"
    for model in ("gpt2-124m", "llama-1.3b"):
        put(
            parts,
            **{
                f"{model}-bf16": run(100.0),
                f"{model}-autoprec": run(130.0, (2.0, 1.001)),
                f"{model}-torchao-rowwise": run(125.0, (2.0, 1.002)),
                f"{model}-te-current": run(200.0, (2.0, 1.2)),
                f"{model}-te-delayed": {"failed": "it does"},
                f"{model}-search": {
                    "wall_s": 200.0,
                    "seconds": 190.0,
                    "trials": {"complete": 4},
                    "verdict": "adopt",
                },
            },
        )
    return tmp_path


def test_every_figure_has_a_row_with_goal_and_verdict(out: Path) -> None:
    found = figures(out)
    assert [one.verdict for one in found] == ["met"] * 7
    told = "\n".join(table(found))
    assert "native 3.0% at most (median 1.0%, 9 of 9 probes)" in told
    assert "| >= 0.98x | tensorwise 0.985x, rowwise 1.050x | met |" in told
    assert "1.040x (of torchao-rowwise, best of 2); te-delayed failed; te-current diverges more" in told
    assert "| policy / bf16 + compile, llama-1.3b | >= 1.2x | 1.300x, divergence 0.100% | met |" in told
    assert "-7.5% at most (all), median 6.2% of 2 policies" in told
    assert "| search of gpt2-124m | <= 480 s | 200 s, 4 trials, adopt | met |" in told


def test_one_value_beyond_a_goal_misses_it(out: Path) -> None:
    kept = json.loads((out / "fidelity" / FIGURES_FILE).read_text())
    kept["gradients"]["torchao"]["largest"] = 0.11
    kept["times"]["rows"][1]["modelled_ms"] = 7.3
    (out / "fidelity" / FIGURES_FILE).write_text(json.dumps(kept))
    put(out / "blocks", **{"torchao-tensorwise": {"compiled": {"step_ms": 1.95}}})
    put(
        out / "end_to_end" / "parts",
        **{
            "gpt2-124m-autoprec": run(124.0),
            "llama-1.3b-autoprec": run(119.0),
            "gpt2-124m-search": {"wall_s": 9.0, "seconds": 481.0, "trials": {"complete": 4}, "verdict": "adopt"},
        },
    )
    assert [one.verdict for one in figures(out)] == ["missed"] * 7


def test_a_search_that_was_cut_short_met_nothing(out: Path) -> None:
    cut = {"wall_s": 400.0, "trials": {"complete": 2}, "verdict": "undecided", "cut_short": "the time budget"}
    put(out / "end_to_end" / "parts", **{"gpt2-124m-search": cut})
    assert figures(out)[-1].verdict == "missed"
    assert "cut short: the time budget" in figures(out)[-1].measured


def test_what_is_missing_is_named(out: Path, tmp_path: Path) -> None:
    assert [one.verdict.partition(":")[0] for one in figures(tmp_path / "nothing")] == ["not measured"] * 7
    kept = json.loads((out / "fidelity" / FIGURES_FILE).read_text())
    kept["gradients"]["transformer_engine"] = {"probes": 0, "of": 9}
    kept["times"]["rows"] = []
    (out / "fidelity" / FIGURES_FILE).write_text(json.dumps(kept))
    put(out / "blocks", **{"torchao-rowwise": {"eager": {"step_ms": 2.0}, "compiled": {"failed": "late"}}})
    for name in ("torchao-rowwise", "te-current"):
        put(out / "end_to_end" / "parts", **{f"gpt2-124m-{name}": {"failed": "late"}})
    put(out / "end_to_end" / "parts", **{"llama-1.3b-autoprec": {"failed": "CUDA out of memory"}})
    verdicts = [one.verdict for one in figures(out)]
    assert verdicts[0].startswith("not measured: transformer_engine ran no probe; native 3.0%")
    assert verdicts[1] == "not measured: torchao-rowwise failed"
    assert verdicts[2].startswith("not measured: no FP8 preset of gpt2-124m to compare with; torchao-rowwise failed")
    assert verdicts[3] == "not measured: llama-1.3b-autoprec failed: CUDA out of memory"
    assert verdicts[5] == "not measured: no step was timed"


def test_a_preset_whose_loss_is_not_a_number_is_not_equally_close(out: Path) -> None:
    put(out / "end_to_end" / "parts", **{"gpt2-124m-te-current": run(500.0, (2.0, float("nan")))})
    assert figures(out)[2].verdict == "met"
    assert "te-current diverges more" in figures(out)[2].measured


def test_rows_of_a_model_whose_name_begins_alike_are_not_its_presets_and_odd_rows_end_nothing(out: Path) -> None:
    put(out / "end_to_end" / "parts", **{"gpt2-124m-llama-search": {"wall_s": 1.0}, "llama-1.3b-bf16": {"odd": 1}})
    verdicts = [one.verdict for one in figures(out)]
    assert verdicts[2] == "met"
    assert all(verdict.startswith("not told: KeyError") for verdict in verdicts[3:5])
