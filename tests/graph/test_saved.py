"""Saved-tensor hooks: each storage once, nothing kept, off when torch.func begins."""

import torch

from autoprec.graph.saved import SavedTensors
from autoprec.graph.storages import StorageTable


def test_each_storage_counts_once_and_excluded_ones_do_not():
    table = StorageTable()
    saved = SavedTensors(table)
    x = torch.randn(4, 8, requires_grad=True)
    table.exclude(x)
    saved.start()
    y = x.exp()  # saves its result
    z = y * y  # saves it again, twice
    saved.stop()
    assert sum(saved.take().values()) == y.untyped_storage().nbytes()
    assert not saved.take()
    z.sum().backward()
    assert torch.equal(x.grad, 2 * y * y)
    table.release()


def test_hooks_step_aside_for_transforms():
    saved = SavedTensors(StorageTable())
    saved.start()
    assert torch.func.grad(lambda x: x.square().sum())(torch.ones(2)).tolist() == [2.0, 2.0]
    assert not saved.complete
    saved.stop()
    assert not saved.take()
