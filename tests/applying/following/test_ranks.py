"""Ranks look at a run together: two processes over gloo."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec.applying.following import following_of, ranks
from autoprec.applying.following.recorded import RecordedStep
from tests.applying.following.helpers import DELAYED, FP8, Training, followed
from tests.warm import Ended, run_ranks


class Exchanging(nn.Linear):
    """Exchanges something in its forward, as sharded layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.ones(1))
        return super().forward(x)


def train(rank: int, follow: int | None, steps: int = 22, recipe: dict[str, Any] = FP8, **options: Any) -> Any:
    """Train under DDP with two micro-batches a step; return losses, what was seen, warnings and all Parameters."""
    training = Training()
    if options.get("exchanging"):
        training.model.head = Exchanging(16, 4)
    model = nn.parallel.DistributedDataParallel(training.model, gradient_as_bucket_view=True)
    followed(recipe, error=options.get("error", 0.2)).apply(model, backend="emulated", follow=follow)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator, losses = torch.Generator().manual_seed(rank), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            training.model.outlier = options.get("outlier", 0.0) if step > 3 else 0.0
            optimizer.zero_grad()
            for last in (False, True):
                model.require_backward_grad_sync = last
                x = torch.randn(32, 16, generator=generator)
                loss = nn.functional.cross_entropy(model(x), torch.randint(0, 4, (32,), generator=generator))
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
    following = following_of(model)
    looks = [] if following is None else [(look.step, look.error, look.change) for look in following.looks]
    said = [str(one.message) for one in caught if "not followed" in str(one.message)]
    return {"losses": losses, "looks": looks, "said": said, "weights": list(training.model.state_dict().values())}


def out_of_memory(at: int) -> Callable[..., float]:
    """Return a ``play`` that fails after some passes."""
    played, original = [0], RecordedStep.play

    def play(self: RecordedStep, **options: Any) -> float:
        played[0] += 1
        if played[0] == at:
            raise torch.OutOfMemoryError("no room for a pass")
        return original(self, **options)

    return play


def on_two_ranks(work: Callable[[int], Any], folder: Path) -> tuple[Ended, list[Any]]:
    def body(rank: int) -> None:
        dist.init_process_group("gloo")
        torch.save(work(rank), folder / f"out.{rank}")
        dist.destroy_process_group()

    ended = run_ranks(body, cwd=folder)
    return ended, [torch.load(path) for path in sorted(folder.glob("out.*"))]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [FP8, DELAYED])
def test_ranks_see_the_same_and_a_run_in_which_nothing_changes_computes_the_same_bits(
    tmp_path: Path, recipe: dict[str, Any]
) -> None:
    def work(rank: int) -> Any:
        return [train(rank, follow, recipe=recipe, error=0.05) for follow in (None, 10)]

    ended, found = on_two_ranks(work, tmp_path)
    assert ended.returncode == 0, ended.stderr
    for plain, looked in found:
        assert plain["losses"] == looked["losses"]
        assert same(plain["weights"], looked["weights"])
        assert looked["said"] == []
        assert [step for step, _, _ in looked["looks"]] == [10, 20]
    assert found[0][1]["looks"] == found[1][1]["looks"]


@pytest.mark.slow
def test_ranks_change_the_same_layers(tmp_path: Path) -> None:
    ended, found = on_two_ranks(lambda rank: train(rank, 10, outlier=1e6 * rank), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert found[0]["looks"] == found[1]["looks"]
    assert any("layers.1: fp8 -> keep" in change for _, _, change in found[0]["looks"])


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3])
def test_a_look_that_fails_on_one_rank_ends_on_all_and_the_training_goes_on_as_without(tmp_path: Path, at: int) -> None:
    def work(rank: int) -> Any:
        plain = train(rank, None)
        if rank == 1:
            RecordedStep.play = out_of_memory(at)  # type: ignore[method-assign]
        return [plain, train(rank, 10)]

    ended, found = on_two_ranks(work, tmp_path)
    assert ended.returncode == 0, ended.stderr
    for plain, looked in found:
        assert looked["said"] == ["the run is not followed any more: rank 1: OutOfMemoryError: no room for a pass"]
        assert looked["losses"] == plain["losses"]
        assert same(looked["weights"], plain["weights"])
        assert looked["looks"] == []


@pytest.mark.slow
def test_a_rank_that_fails_where_the_model_exchanges_ends_the_run_instead_of_mixing_tensors(tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        ranks.TIMEOUT_S = 2.0
        if rank == 1:
            RecordedStep.play = out_of_memory(2)  # type: ignore[method-assign]
        return train(rank, 10, exchanging=True)

    began = time.monotonic()
    ended, found = on_two_ranks(work, tmp_path)
    assert ended.returncode != 0
    assert found == []
    assert "RanksApartError" in ended.stderr
    assert "no room for a pass" in ended.stderr
    assert time.monotonic() - began < 50
