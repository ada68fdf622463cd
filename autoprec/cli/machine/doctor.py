"""``autoprec doctor``: devices, backends, recipes, packages: what works here, and why not; the hardware table."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import click

from autoprec._version import __version__
from autoprec.cli import options
from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.errors import AutoPrecError, UsageError
from autoprec.policy import dump_yaml
from autoprec.precision.hardware import (
    TARGETS,
    Target,
    by_device_name,
    cores,
    cpu_instructions,
    load_targets,
    target,
)
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import EXTRAS, how_to_install, installed_version, is_available
from autoprec.support.tables import Table
from autoprec.support.units import memory_text

#: Sizes of the GEMM that recipes are tried on: a multiple of every alignment rule.
PROBE_SIZE = 1024
#: Peaks that the hardware table shows.
_FORMATS = ("fp32", "tf32", "bf16", "fp8", "nvfp4", "int8")


def _products() -> str:
    """Return what one thread of this CPU multiplies, timed here and now."""
    from autoprec.cost.device.cpu import measure, rates_text

    try:
        return rates_text(measure())
    except RuntimeError as error:
        return f"no product could be timed: {str(error).splitlines()[0]}"


def _devices(torch: Any) -> list[dict[str, Any]]:
    from autoprec.cost.device.cpu import cpu_model

    note = "; ".join(filter(None, (f"{cores()} cores", cpu_instructions(), _products())))
    rows = [{"device": "cpu", "name": cpu_model(), "target": "cpu", "note": note}]
    if not torch.cuda.is_available():
        built = f"this PyTorch has CUDA {torch.version.cuda}" if torch.version.cuda else "this PyTorch has no CUDA"
        return [*rows, {"device": "cuda", "name": "none", "target": "", "note": f"no GPU is usable: {built}"}]
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        known = by_device_name(found.name)
        memory = f"compute {found.major}.{found.minor}, {found.total_memory / 2**30:.0f} GiB"
        target = known.name if known is not None else ""
        note = memory if target else f"{memory}; not in the hardware table: describe it (docs/cost-model.md)"
        rows.append({"device": f"cuda:{index}", "name": found.name, "target": target, "note": note})
    return rows


def _backends(devices: list[str]) -> list[dict[str, Any]]:
    from autoprec.backends import BACKENDS, get

    rows = []
    for name in BACKENDS:
        for device in devices:
            experimental = False
            try:
                backend = get(name)
                found = backend.available(device)
                ok, reason, experimental = found.ok, found.reason, backend.is_experimental(device)
            except AutoPrecError as error:
                ok, reason = False, f"{error.what}; {error.fix}"
            row = {"backend": name, "device": device, "ok": ok, "reason": reason, "experimental": experimental}
            rows.append(row)
    return rows


def _recipes(usable: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return, for every built-in recipe and usable (backend, device), whether fprop runs and why not."""
    from autoprec.backends import get

    size = PROBE_SIZE
    rows = []
    for recipe_name, recipe in BUILTIN_RECIPES.items():
        for backend, device in usable:
            found = get(backend).capability(recipe, gemm="fprop", m=size, k=size, n=size, device=device)
            row = {"recipe": recipe_name, "backend": backend, "device": device, "ok": found.ok, "reason": found.reason}
            rows.append(row)
    return rows


def _packages() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in ("torch", "numpy", "optuna", "mlflow-skinny"):
        rows.append({"package": name, "version": installed_version(name), "ok": True, "note": "required"})
    for name, (_, oldest, _) in EXTRAS.items():
        ok = is_available(name)
        note = "" if ok else f"optional, {oldest} or newer: {how_to_install(name)}"
        rows.append({"package": name, "version": installed_version(name), "ok": ok, "note": note})
    return rows


def diagnose() -> dict[str, Any]:
    """Return everything ``autoprec doctor --json`` prints."""
    import torch

    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries that are only asked whether they work warn of what they lack,
        logging.disable(logging.WARNING)  # each in its own way
        devices = _devices(torch)
        backends = _backends([row["device"] for row in devices if row["name"] != "none"])
        usable = [(row["backend"], row["device"]) for row in backends if row["ok"]]
        recipes = _recipes(usable)
        logging.disable(logging.NOTSET)
    variables = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "OPTUNA_STORAGE", "OMP_NUM_THREADS", "NO_COLOR")
    return {
        "autoprec": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "devices": devices,
        "backends": backends,
        "recipes": recipes,
        "packages": _packages(),
        "environment": {name: os.environ[name] for name in variables if name in os.environ},
    }


def _yes(ok: bool) -> str:
    return "yes" if ok else "no"


def _print(found: dict[str, Any]) -> None:
    console = stdout_console()
    console.print(f"autoprec {found['autoprec']}, Python {found['python']}, PyTorch {found['torch']}")
    console.print(found["platform"], markup=False)
    rows = [(row["device"], row["name"], row["target"] or "-", row["note"]) for row in found["devices"]]
    console.print(plain_table(("device", "name", "target", ""), rows))
    rows = [
        (row["backend"], row["device"], _yes(row["ok"]) + ", experimental" * row["experimental"], row["reason"])
        for row in found["backends"]
    ]
    console.print(plain_table(("backend", "device", "works", "why"), rows))
    pairs = list(dict.fromkeys((row["backend"], row["device"]) for row in found["recipes"]))
    cells: dict[str, list[str]] = {}
    for row in found["recipes"]:
        cells.setdefault(row["recipe"], []).append("yes" if row["ok"] else f"no: {row['reason']}")
    headings = ("recipe", *(f"{backend} on {device}" for backend, device in pairs))
    console.print(plain_table(headings, [(name, *row) for name, row in cells.items()]))
    rows = [(r["package"], r["version"] or "-", _yes(r["ok"]), r["note"]) for r in found["packages"]]
    console.print(plain_table(("package", "version", "works", ""), rows))
    for name, value in found["environment"].items():
        console.print(f"{name}={value}", markup=False)


def _print_targets(names: tuple[str, ...], *, as_json: bool) -> None:
    """Print the hardware table; of ``names`` the whole entry. ``FILE.yaml`` and ``FILE.yaml:NAME`` are a user's own.

    Raises:
        UnknownNameError, FileError: no such target, or not a file of targets.
    """
    chosen: list[Target] = []
    for name in names:
        chosen += load_targets(Path(name)).values() if name.endswith((".yaml", ".yml")) else [target(name)]
    chosen = chosen or list(TARGETS.values())
    if as_json:
        print_json({"targets": [entry.to_json() for entry in chosen]})
        return
    rows = []
    for entry in chosen:
        peaks = [f"{entry.peaks[name]:g}" if name in entry.peaks else "-" for name in _FORMATS]
        bandwidth = f"{entry.bandwidth / 1e12:.2f} TB/s" if entry.bandwidth else "measured"
        rows.append((entry.name, entry.title, *peaks, memory_text(entry.memory_bytes), bandwidth, entry.date))
    echo(Table(("target", "device", *_FORMATS, "memory", "bandwidth", "date"), tuple(rows)).text())
    echo("dense TFLOP/s (int8: TOP/s), no sparsity, FP32 accumulation")
    for entry in chosen if names else ():
        echo(f"\n{dump_yaml(entry.to_json()).rstrip()}")


@click.command("doctor", short_help="What works here, and why not; the hardware table.")
@click.argument("names", nargs=-1)
@click.option("--targets", is_flag=True, help="The hardware table instead; details of NAMES, or of FILE.yaml[:NAME].")
@options.as_json("Everything")
def doctor(names: tuple[str, ...], targets: bool, as_json: bool) -> None:
    """Print what works on this machine and why the rest does not; the block to paste into a bug report."""
    if names and not targets:
        raise UsageError(f"'{names[0]}' is not asked for", fix=f"autoprec doctor --targets {names[0]}")
    if targets:
        _print_targets(names, as_json=as_json)
        return
    found = diagnose()
    if as_json:
        print_json(found)
    else:
        _print(found)
