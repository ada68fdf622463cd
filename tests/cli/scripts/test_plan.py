"""``search --dry-run`` tells what would be tried and how long it takes, begins no study and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.cli.scripts.plan import _policies
from tests.cli.helpers import autoprec
from tests.cli.test_recording import TRAIN

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]


def test_the_plan_of_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN.replace("range(3)", "range(30)"), encoding="utf-8")
    words = ["search", "--dry-run", "--target", "h100", "--cost-scale", "width=64,tokens=512", "--trials", "12"]
    found = autoprec(*words, "--budget", "30m", "--max-memory", "60GiB", "--force", "--json", "train.py")
    assert found.code == 0, found.err
    plan = found.json()
    assert plan["source"] == "modelled"
    assert plan["trials"] == 12
    assert plan["limits"] == {
        "max_divergence": 0.0025,
        "max_gradient_error": 0.12,
        "max_memory": 60 * 2**30,
        "budget_s": 1800.0,
        "trials": 12,
        "objective": "throughput",
    }
    assert plan["trials_s"] == pytest.approx(12 * plan["trial_s"])
    assert plan["finalist_runs"] == 3 * 1
    parts = plan["setup_s"] + plan["scan_s"] + plan["trials_s"] + plan["finalists_s"] + plan["closing_s"]
    assert 0 < plan["total_s"] == pytest.approx(min(parts, 1800))
    assert "fp8_rowwise, head in bf16" in plan["presets"]
    assert "timing a run under a preset" in found.err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_script_with_too_few_steps_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN, encoding="utf-8")
    found = autoprec("search", "--dry-run", "--target", "h100", "train.py")
    assert found.code == 3
    assert "the script ended after" in found.err


def test_what_a_search_would_not_run_is_not_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At these shapes nothing beats 16 bit: a search tries 16-bit policies alone, and the plan listed FP8 presets."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN.replace("range(3)", "range(30)"), encoding="utf-8")
    words = ["search", "--dry-run", "--target", "h100", "--cost-scale", "width=64,tokens=512"]
    plan = autoprec(*words, "--json", "train.py").json()
    assert plan["presets"]
    assert plan["trials"] <= plan["policies"]
    assert not any("fp8" in name for name in (*plan["presets"], *plan["choices"])), plan
    assert "only 16-bit policies" in plan["limited"]


def test_a_person_reads_how_many_policies_there_are() -> None:
    assert [_policies(n) for n in (1, 8190, 3.2e9)] == ["1 policy", "8,190 policies", "3.2e+09 policies"]
    assert "more policies than" in _policies(1e30)
