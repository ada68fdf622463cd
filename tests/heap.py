"""What was there before the tests is left alone by the collector, and so by whoever asks it for living objects.

A process that has collected the suite holds a million objects. Going through them takes a tenth of a second, which an
optimizer that is wrapped, a policy that is put on and a model that is found each do several times over, and every
script that is forked copies their pages as well. A script or a test has made none of them.
"""

from __future__ import annotations

import gc

#: More objects than so are set aside between two files: looking at them takes every search for living ones 10 ms.
_MANY = 100_000
_REAL = gc.freeze, gc.unfreeze, gc.get_freeze_count


def set_aside() -> None:
    """From now on only what is made from now on is seen, as in a new process; a freeze of ours changes nothing."""
    known()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.get_freeze_count = lambda: 0


def known() -> None:
    """From now on everything is seen again that whoever asks takes out of the freezer."""
    gc.freeze, gc.unfreeze, gc.get_freeze_count = _REAL


def set_aside_again() -> None:
    """Between two files of tests: what the first has imported is not an object of the next one's either.

    Dynamo, Inductor or transformers that a test imports are half a million objects, through which every search for
    living models in the tests that follow would go.
    """
    if len(gc.get_objects()) > _MANY:
        gc.collect()
        set_aside()
