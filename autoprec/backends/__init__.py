"""The backends that run GEMMs, by name, and the one that suits a device.

A backend answers one question, "can you run this GEMM, under this recipe, at this size, here?", with yes or a reason a
person can read, and hands out an execution for a layer's plan. ``emulated`` runs every recipe anywhere with true values
and no speed-up; ``native`` calls torch's scaled products; ``torchao`` and ``transformer_engine`` call theirs from the
layer's own forward. No rule of a policy names a backend: what a layer *is* does not depend on its backend, and the
conformance suite (:mod:`tests.conformance.backends`) holds each of them to that. A policy's evidence may name the one
it was found with (:mod:`autoprec.applying.binding`).
"""

from __future__ import annotations

import importlib

from autoprec.backends.base import Backend
from autoprec.backends.emulated import EmulatedBackend
from autoprec.errors import UnknownNameError
from autoprec.numerics.execution import Execution
from autoprec.precision.hardware import Capability

__all__ = ["BACKENDS", "Backend", "Capability", "Execution", "choose", "get"]


#: Module and class of each backend, by name; optional packages are imported when a backend is asked for, not here.
BACKENDS = {
    "emulated": ("emulated", "EmulatedBackend"),
    "native": ("native", "NativeBackend"),
    "torchao": ("torchao", "TorchaoBackend"),
    "transformer_engine": ("transformer_engine", "TransformerEngineBackend"),
}


def get(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        UnknownNameError: with the nearest valid name.
    """
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, [*BACKENDS, "auto"])
    module, cls = BACKENDS[name]
    found: Backend = getattr(importlib.import_module(f"{__name__}.{module}"), cls)()
    return found


def choose(name: str, device: str) -> Backend:
    """Return the backend ``name``, or for ``auto`` the one that suits a device.

    On a GPU that is ``native``, for what no timing decides. On a CPU it is ``emulated``, which runs everything but
    plain casts faster than the CPU kernels of ``torch._scaled_mm`` would; plain casts are this CPU's own, however slow,
    because ``auto`` is what is timed. ``emulated`` by name emulates them as well where the CPU has no bfloat16 units.
    """
    if name != "auto":
        return get(name)
    return get("native") if device.startswith("cuda") else EmulatedBackend(casts=False)
