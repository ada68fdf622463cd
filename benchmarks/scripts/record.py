"""Hooks of the benchmark itself, copied as ``sitecustomize.py`` beside a bare run: what loss bits did the script see?

Nothing of AutoPrec is used, so that a claim of AutoPrec about determinism can be held against it. Before the script's
first line every generator is seeded; each call of ``torch.autograd.backward`` or ``torch.autograd.grad`` appends the
bits of what was differentiated. ``SCRIPTS_RECORD`` names the folder, ``SCRIPTS_CALLS`` ends the process after so many.
"""

import atexit
import os
import random
import struct
import sys
from typing import Any

CALLS = int(os.environ.get("SCRIPTS_CALLS", "0"))
seen: list[str] = []


def write() -> None:
    if seen:
        with open(os.path.join(os.environ["SCRIPTS_RECORD"], f"{os.getpid()}.txt"), "w", encoding="ascii") as file:
            file.write("\n".join(seen))


def record(outputs: Any) -> None:
    import torch

    found = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    with torch.no_grad():
        seen.append("".join(struct.pack("<d", float(one.detach().double().sum())).hex() for one in found))
    if CALLS and len(seen) >= CALLS:
        write()
        sys.stdout.flush()
        os._exit(0)


def install() -> None:
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    for name, first in (("backward", "tensors"), ("grad", "outputs")):
        plain = getattr(torch.autograd, name)

        def hooked(*args: Any, _plain: Any = plain, _first: str = first, **kwargs: Any) -> Any:
            record(args[0] if args else kwargs[_first])
            return _plain(*args, **kwargs)

        setattr(torch.autograd, name, hooked)
    atexit.register(write)


if os.environ.get("SCRIPTS_RECORD"):
    install()
