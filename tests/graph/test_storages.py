"""Storages name tensors apart without keeping them alive."""

import weakref

import torch

from autoprec.graph.storages import StorageTable


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
