"""``autoprec targets``: the hardware table, each figure with its source and date."""

from __future__ import annotations

import json
from pathlib import Path

import click

__all__ = ["targets"]

_FORMATS = ("fp32", "tf32", "bf16", "fp8", "nvfp4", "int8")


def _row(values: list[str], widths: list[int]) -> str:
    return "  ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)).rstrip()


@click.command("targets")
@click.argument("names", nargs=-1)
@click.option("--file", "own", type=click.Path(path_type=Path), help="Show the targets of your own YAML file.")
@click.option("--json", "as_json", is_flag=True, help="The whole table as JSON on stdout.")
def targets(names: tuple[str, ...], own: Path | None, as_json: bool) -> int:
    """The hardware table: dense peaks, memory, links, what each GPU multiplies, sources. NAMES shows details."""
    from autoprec.errors import UnknownNameError
    from autoprec.hardware import TARGETS, load_targets

    table = load_targets(own) if own else dict(TARGETS)
    for name in names:
        if name.lower() not in table:
            raise UnknownNameError("target", name, table)
    chosen = {name: table[name] for name in (n.lower() for n in names)} if names else table
    if as_json:
        click.echo(json.dumps({"targets": [entry.to_json() for entry in chosen.values()]}))
        return 0
    header = ["target", "device", *(f"{name}" for name in _FORMATS), "memory", "bandwidth", "date"]
    rows = [header]
    for entry in chosen.values():
        peaks = [f"{entry.peaks[name]:g}" if name in entry.peaks else "-" for name in _FORMATS]
        bandwidth = f"{entry.bandwidth / 1e12:.2f} TB/s" if entry.bandwidth else "measured"
        rows.append([entry.name, entry.title, *peaks, f"{entry.memory_bytes / 1e9:.0f} GB", bandwidth, entry.date])
    widths = [max(len(row[index]) for row in rows) for index in range(len(header))]
    click.echo("\n".join(_row(row, widths) for row in rows))
    click.echo("dense TFLOP/s (int8: TOP/s), no sparsity, FP32 accumulation")
    if names:
        for entry in chosen.values():
            click.echo(f"\n{entry.title}\n  source: {entry.source}")
            for family, capability in entry.recipes.items():
                word = "yes" if capability.ok else "no"
                detail = "; ".join(filter(None, (capability.needs, capability.reason)))
                click.echo(f"  {family:<12} {word:<4} {detail}".rstrip())
    return 0
