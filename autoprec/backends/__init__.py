"""Who runs a GEMM: backends by name, and the one that suits a device."""

from __future__ import annotations

from autoprec.backends.base import Backend, BackendFactory, Capability, Execution
from autoprec.backends.emulated import EmulatedBackend
from autoprec.backends.native import NativeBackend
from autoprec.errors import UnknownNameError

__all__ = ["BACKENDS", "Backend", "Capability", "Execution", "choose", "get"]


def _torchao() -> Backend:
    from autoprec.backends.torchao import TorchaoBackend

    return TorchaoBackend()


def _transformer_engine() -> Backend:
    from autoprec.backends.transformer_engine import TransformerEngineBackend

    return TransformerEngineBackend()


def _msamp() -> Backend:
    from autoprec.backends.msamp import MsampBackend

    return MsampBackend()


#: Builders by name; optional packages are imported when a backend is asked for, not here.
BACKENDS: dict[str, BackendFactory] = {
    "emulated": EmulatedBackend,
    "native": NativeBackend,
    "torchao": _torchao,
    "transformer_engine": _transformer_engine,
    "msamp": _msamp,
}


def get(name: str) -> Backend:
    """Return a backend by name.

    Raises:
        UnknownNameError: with the nearest valid name.
    """
    try:
        return BACKENDS[name]()
    except KeyError:
        raise UnknownNameError("backend", name, [*BACKENDS, "auto"]) from None


def choose(name: str, device: str) -> Backend:
    """Return the backend ``name``, or for ``auto`` the one that suits a device.

    On a GPU that is ``native``. On a CPU it is ``emulated``, which runs plain casts natively and everything else
    faster than the CPU kernels of ``torch._scaled_mm`` would.
    """
    if name != "auto":
        return get(name)
    return get("native" if device.startswith("cuda") else "emulated")
