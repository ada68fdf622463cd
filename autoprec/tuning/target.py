"""Which device a search is for, whether that device is the one at hand, and which calibration belongs to it."""

from __future__ import annotations

from typing import Any

from autoprec.cost.calibrate.calibration import check_target, kept_calibration, load_calibration
from autoprec.errors import UsageError
from autoprec.precision.hardware import Target, by_device_name, target
from autoprec.tuning.options import SearchOptions


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


def calibration_of(options: SearchOptions, device: str = "") -> dict[str, Any] | None:
    """Return the calibration laid over the default rates of the target; None where none was asked for.

    Args:
        device: what the script trains on; empty before it was started, and then what is certain is refused.

    Raises:
        FileError: it is not a calibration.
        UsageError: it was measured on another target, or this search has no use for it: no time of it is modelled,
            and the file does not say which backend runs a recipe fastest.
    """
    path = options.calibration
    if not path:
        return None
    document = load_calibration(path)
    asked: Target | None
    if device:
        asked, here = resolve_target(options.target, device)
    else:  # auto is the device at hand, whichever that is; a named one may turn out to be it
        asked, here = (None, True) if options.target == "auto" else (target(options.target), False)
    if asked is not None:
        check_target(document, asked, path)
    if asked is not None and asked.is_cpu:
        raise UsageError(
            "--calibration has no effect on the CPU, whose rates are measured on this machine and cached",
            where=path,
            fix="leave --calibration out; `autoprec calibrate --target cpu` measures again",
        )
    if here and not options.cost_scale and not document.get("linears"):
        raise UsageError(
            "--calibration without timed linears is for modelled times, and this search times its steps itself",
            where=path,
            fix=f"leave --calibration out, or rehearse: --target {document.get('target', 'NAME')} on another machine, "
            "or --cost-scale for another size; `autoprec calibrate` of this version times linears by every backend",
        )
    return document


def calibration_here(options: SearchOptions, device: str) -> dict[str, Any] | None:
    """Return the calibration asked for; without one, what `autoprec calibrate` kept of the device at hand.

    Raises:
        FileError, UsageError: as :func:`calibration_of`.
    """
    if options.calibration:
        return calibration_of(options, device)
    found, here = resolve_target(options.target, device)
    document = kept_calibration(device) if here and not found.is_cpu else None
    return document if document is not None and document.get("target") == found.name else None
