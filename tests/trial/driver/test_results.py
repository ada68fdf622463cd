"""Results of one process and of several ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

from autoprec.trial.driver.results import load_result, over_ranks
from autoprec.trial.protocol import TrialResult


def test_losses_are_the_meanover_ranks_and_memory_is_that_of_the_fullest(tmp_path: Path) -> None:
    def write(name: str, result: TrialResult) -> None:
        (tmp_path / name).write_text(json.dumps(result.to_json()))

    first = TrialResult("ok", losses=(1.0, 2.0), memory_bytes=5, step_ms=(1.0, 1.0))
    write("r.json", first)
    write("r.json.rank1", replace(first, losses=(3.0, 4.0), memory_bytes=9))
    write("r.json.rank2", replace(first, losses=(math.nan, math.nan)))  # a stage without a loss
    write("r.json.rank3", replace(first, losses=(7.0,)))  # ended elsewhere
    found = over_ranks(tmp_path / "r.json")
    assert found == replace(first, losses=(2.0, 3.0), memory_bytes=9)
    assert not list(tmp_path.iterdir())
    write("r.json.rank1", TrialResult("oom", "CUDA out of memory"))
    assert over_ranks(tmp_path / "r.json") == TrialResult("oom", "CUDA out of memory")
    assert over_ranks(tmp_path / "r.json") is None
    write("r.json", replace(first, status="diverged"))
    write("r.json.rank1", replace(first, losses=(3.0, 4.0)))
    assert over_ranks(tmp_path / "r.json") == replace(first, status="diverged")


def test_what_is_not_whole_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text('{"status": ')
    assert load_result(tmp_path / "half.json") is None
    assert load_result(tmp_path / "absent.json") is None
