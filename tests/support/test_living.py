import weakref

from autoprec.support.living import living


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


def test_instances_of_a_class_and_its_subclasses_are_found_once():
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
