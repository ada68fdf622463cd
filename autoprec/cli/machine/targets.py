"""What ``autoprec doctor --targets`` prints: the hardware table, each figure with its source and date."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoprec.precision.hardware import Target

from autoprec.cli.console import print_json
from autoprec.cli.echo import echo
from autoprec.support.tables import Table
from autoprec.support.units import memory_text

_FORMATS = ("fp32", "tf32", "bf16", "fp8", "nvfp4", "int8")


def _details(entry: Target) -> list[str]:
    """Return what the table has no room for: source, links, and each recipe with its toolkit, alignment and reason."""
    links = ", ".join(f"{name.replace('_', '-')} {speed / 1e9:g} GB/s" for name, speed in entry.links.items())
    device = f"{entry.architecture} {entry.capability}".strip()
    lines = [
        f"\n{entry.title}",
        f"  source: {entry.source}",
        f"  device: {device}, {entry.units} {'threads' if entry.is_cpu else 'units'}",
    ]
    lines += [f"  links per GPU and direction: {links}"] if links else []
    lines += [f"  note: {note}" for note in entry.notes]
    for family, capability in entry.recipes.items():
        word = "yes" if capability.ok else "no"
        multiple = entry.multiple(family) if capability.ok else 1
        sizes = f"M, K, N multiples of {multiple}" if multiple > 1 else ""
        detail = "; ".join(filter(None, (capability.needs, sizes, capability.reason)))
        lines.append(f"  {family:<12} {word:<4} {detail}".rstrip())
    return lines


def print_targets(names: tuple[str, ...], *, as_json: bool) -> None:
    """Print the hardware table; of ``names`` every detail. ``FILE.yaml`` and ``FILE.yaml:NAME`` are a user's own.

    Raises:
        UnknownNameError, FileError: no such target, or not a file of targets.
    """
    from autoprec.precision.hardware import TARGETS, load_targets, target

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
        echo("\n".join(_details(entry)))
