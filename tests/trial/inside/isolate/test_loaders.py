"""DataLoaders without workers give the same batches."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from .test_overlay import in_fork


def batches(workers: int) -> list[list[float]]:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(12.0))
    options = {"persistent_workers": True, "prefetch_factor": 2} if workers else {}
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, **options)
    return [batch[0].tolist() for batch in loader]


def test_same_batches_and_time_is_credited() -> None:
    expected = batches(0)

    def work() -> None:
        from autoprec.trial.inside.isolate.loaders import load_in_process

        loading = load_in_process()
        charged: list[float] = []
        loading.charge = charged.append
        assert batches(2) == expected
        assert loading.loaders == 1
        assert not loading.iterable
        assert len(charged) >= 3
        charged.clear()
        assert batches(0) == expected  # the script's own choice is charged
        assert charged == []

    assert in_fork(work)
