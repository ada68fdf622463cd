"""Ranks report to each other whether a pass worked: two processes over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autoprec.trial.inside.sensitivity import ranks
from autoprec.trial.inside.sensitivity.ranks import EndedError, Ranks
from tests.warm import run_ranks


def test_one_process_alone_needs_no_group() -> None:
    alone = Ranks()
    assert alone.together(lambda: 3) == 3
    with pytest.raises(EndedError, match=r"^ZeroDivisionError: "):
        alone.together(lambda: 1 / 0)


@pytest.mark.slow
def test_what_fails_on_one_rank_fails_on_all_with_its_reason(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        both = Ranks()

        def work() -> int:
            if rank == 1:
                raise torch.OutOfMemoryError("no room for a pass")
            return rank

        assert both.together(lambda: rank) == rank
        with pytest.raises(EndedError, match=r"^rank 1: OutOfMemoryError: no room for a pass$"):
            both.together(work)
        assert both.together(lambda: rank) == rank
        dist.destroy_process_group()

    ended = run_ranks(body, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_rank_that_fails_while_another_waits_for_its_tensors_ends_the_process(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        ranks.TIMEOUT_S = 2.0
        dist.init_process_group("gloo")
        both = Ranks()

        def work() -> None:
            if rank == 1:
                raise torch.OutOfMemoryError("no room for a pass")
            dist.all_reduce(torch.ones(1))  # as a sharded layer does in its forward

        both.together(lambda: None)
        both.together(work)

    ended = run_ranks(body, cwd=tmp_path)
    assert ended.returncode != 0
    assert "RanksApartError" in ended.stderr
    assert "no room for a pass" in ended.stderr
