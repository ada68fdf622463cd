"""``autoprec calibrate``: measure this device for the cost model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from autoprec.cli.echo import echo
from autoprec.cost.calibrate.calibration import calibrate as measure
from autoprec.cost.calibrate.calibration import kept_file
from autoprec.cost.calibrate.cpu import CpuCost, cache_file, cpu_rates
from autoprec.cost.calibrate.linears import Linears
from autoprec.errors import FileError, UnsupportedError, UsageError
from autoprec.precision.hardware import by_device_name, target
from autoprec.support.files import check_kind, holds_keys, write_json


def _cpu() -> int:
    rates, label = cpu_rates(refresh=True)
    echo(f"{label}; cached in {cache_file()}\non one thread {CpuCost(rates).gain_of_int8()}")
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _bench(name: str) -> tuple[Any, Any, str]:
    """Return the bench, the target and the device's name.

    Raises:
        UnsupportedError: torch sees no accelerator here.
        UsageError: the device is not in the hardware table and ``--target`` names none.
    """
    import torch

    from autoprec.cost.calibrate.cuda_bench import CudaBench

    if not _has_gpu():
        raise UnsupportedError(
            "torch sees no CUDA or ROCm device here",
            fix="run it on the GPU machine and pass the file on with --calibration; `--target cpu` measures the CPU",
        )
    device = torch.cuda.get_device_name()
    found = target(name) if name else by_device_name(device)
    if found is None:
        raise UsageError(
            f"'{device}' is not in the hardware table",
            fix="name its entry with --target NAME, or describe it in YAML: --target FILE.yaml:NAME",
        )
    return CudaBench(), found, device


@click.command("calibrate")
@click.option("--target", default="", metavar="NAME",
              help="cpu, or the GPU's entry in the hardware table; default: the GPU, without one the CPU.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Of a GPU; default: calibration-<target>.json")
def calibrate(target: str, output: Path | None) -> int:
    """Measure whole linears by every backend on this device, a copy and launches, for the cost model and for `auto`.

    Searches on this device use what was measured; what was measured of a GPU is written to a file as well.
    """
    if not (target or output or _has_gpu()):
        echo("torch sees no CUDA or ROCm device here: the CPU is measured, as with --target cpu", err=True)
        target = "cpu"
    if target == "cpu":
        return _cpu()
    bench, found, name = _bench(target)
    path = output or Path(f"calibration-{found.name}.json")
    check_kind(path, "a calibration", holds_keys("schema", "device", "rates"))

    def say(line: str) -> None:
        echo(line, err=True)

    start = time.monotonic()
    document = measure(bench, found, name, time.strftime("%Y-%m-%d"), say)
    write_json(path, document)  # whatever becomes of the libraries that are timed next
    document["linears"] = _linears(found, say)
    document["seconds"] = round(time.monotonic() - start, 1)
    write_json(path, document)
    here = "searches on this device use it as it is"
    try:
        write_json(kept_file(name), document)
    except (FileError, OSError) as error:
        here = f"searches on this device will not find it by themselves: {error}"
    timed = sum(1 for row in document["linears"] if row["seconds"])
    options = f"--target {found.name} --calibration {path} train.py"
    lines = [
        f"{name}: {len(document['rates'])} rates, {timed} linears in {document['seconds']} s, written to {path}",
        *chosen_backends(document),
        f"use it: autoprec estimate {options}",
        f"or, where this device is not: autoprec search {options}",
        here,
    ]
    echo("\n".join(lines))
    return 0


def _linears(target: Any, say: Callable[[str], None]) -> list[dict[str, Any]]:
    from autoprec.cost.calibrate.linear_bench import time_linears

    return [row.to_json() for row in time_linears(target, say)]


def chosen_backends(document: Mapping[str, Any]) -> list[str]:
    """Return which backend runs each recipe by ``auto``, and why, a line each."""
    linears = Linears.of(document)
    return [f"{how}: {choice.reason}" for how in ("compiled", "eager") for choice in linears.choices(how).values()]
