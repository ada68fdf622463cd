"""DataLoaders without workers give the same batches."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, get_worker_info

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
        from autoprec.trial.inside.isolate.loaders import Loading

        loading = Loading()
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


def test_loaders_get_their_workers_back() -> None:
    def work() -> None:
        from autoprec.trial.inside.isolate.loaders import Loading

        loading = Loading()
        loader = DataLoader(WhereLoaded(), batch_size=2, num_workers=2, persistent_workers=True)
        assert [batch.tolist() for batch in loader] == [[-1, -1]] * 2
        assert loader.num_workers == 2
        loading.undo()
        assert [batch.tolist() for batch in loader] == [[0, 0], [1, 1]]

    assert in_fork(work)


class WhereLoaded(Dataset[int]):
    """Each item is the worker that loaded it, -1 for the training process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        worker = get_worker_info()
        return -1 if worker is None else worker.id
