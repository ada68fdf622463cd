"""Saved-tensor hooks: each storage once, nothing kept, off when torch.func begins."""

import weakref

import torch

from autoprec.graph.saved import SavedTensors, StorageTable


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


def test_addresses_are_not_reused_while_the_table_lives():
    table = StorageTable()
    seen = set()
    for _ in range(50):
        seen.add(table.key(torch.empty(1000))[0])
    assert len(seen) == 50
    assert table.live_bytes() == 0
    table.release()


def test_views_share_an_address_but_not_a_key():
    table = StorageTable()
    x = torch.randn(4, 6)
    keys = [table.key(t) for t in (x, x.t(), x[1:], x.view(torch.int32), x.detach())]
    assert len({key[0] for key in keys}) == 1
    assert len(set(keys)) == 4
    assert keys[0] == keys[4]
    assert table.live_bytes() == 4 * 24
    table.exclude(x)
    assert table.live_bytes() == 0
    table.release()


def test_nothing_is_kept_alive():
    table = StorageTable()
    x = torch.randn(3)
    table.key(x)
    gone = weakref.ref(x)
    del x
    assert gone() is None
    table.release()
