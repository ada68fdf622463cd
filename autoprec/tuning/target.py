"""Which device a search is for, and whether that device is the one at hand."""

from __future__ import annotations

from autoprec.errors import UsageError
from autoprec.precision.hardware import Target, by_device_name, target


def resolve_target(name: str, device: str) -> tuple[Target, bool]:
    """Return (target, is it this device and therefore timed).

    Args:
        name: ``auto``, or a target.
        device: what the script trains on: ``cpu``, or the device name CUDA or ROCm prints.

    Raises:
        UnknownNameError: no such target, with the nearest valid name.
        UsageError: ``auto`` on a GPU the hardware table does not know, or ``cpu`` for a script that trains on a GPU.
    """
    here = target("cpu") if device == "cpu" else by_device_name(device)
    if name == "auto":
        if here is None:
            raise UsageError(
                f"the script trains on '{device}', which is not in the hardware table",
                fix="name the nearest one (`autoprec doctor --targets`), or describe yours in YAML: --target FILE.yaml",
            )
        return here, True
    asked = target(name)
    if asked.is_cpu and device != "cpu":
        raise UsageError(
            f"--target cpu, but the script trains on '{device}'", fix="make it train on the CPU, or use --target auto"
        )
    return asked, here is not None and here.name == asked.name
