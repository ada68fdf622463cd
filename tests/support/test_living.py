import gc
import weakref

import pytest

from autoprec.support import living as module
from autoprec.support.living import living, referrers


class Base:
    pass


class Left(Base):
    pass


class Right(Base):
    pass


class Both(Left, Right):
    pass


class Pretender:
    asked = False

    @property
    def __class__(self):  # a lazy proxy
        Pretender.asked = True
        return Base


@pytest.mark.parametrize("few", [0, 32])
def test_instances_of_a_class_and_its_subclasses_are_found_once(few, monkeypatch):
    monkeypatch.setattr(module, "_FEW", few)
    held = [Base(), Left(), Both(), Pretender(), object()]
    assert sorted(map(id, living(Base))) == sorted(map(id, held[:3]))
    assert not Pretender.asked
    assert living(Right) == [held[2]]


def test_what_is_found_is_not_kept_alive():
    gone = Left()
    watch = weakref.ref(gone)
    assert living(Left) == [gone]
    del gone
    assert watch() is None


@pytest.mark.usefixtures("whole_heap")
def test_what_was_frozen_for_a_fork_is_found_and_stays_frozen():
    kept, holder = Base(), {"name": (value := Base())}
    gc.freeze()
    try:
        assert {id(each) for each in living(Base)} == {id(kept), id(value)}
        assert any(each is holder for each in referrers([value]))
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
