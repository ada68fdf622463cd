"""``autoprec verify``: longer paired runs of a policy beside the reference and the presets."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from autoprec.cli.script import script_command
from autoprec.cli.scripts.search import parsed

__all__ = ["verify"]


@script_command("verify")
@click.option("--policy", "policy_path", required=True, metavar="FILE", help="Policy file to verify.")
@click.option("--steps", default=40, show_default=True, metavar="N", help="Measured steps per run.")
@click.option("--warmup", default=3, show_default=True, metavar="N", help="Steps before measuring.")
@click.option("--seeds", default=4, show_default=True, metavar="N", help="Paired seeds.")
@click.option("--max-divergence", default="0.25%", show_default=True, callback=parsed("parse_share"), metavar="SHARE",
              help="Largest acceptable mean relative loss gap.")  # fmt: skip
@click.option("--anneal/--no-anneal", default=True, show_default=True, help="Decay the learning rate over a run.")
@click.option("--backend", default="auto", metavar="NAME", help="Who runs the GEMMs.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON on stdout.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def verify(script: tuple[str, ...], policy_path: str, as_json: bool, quiet: bool, **values: Any) -> int:
    """Verify a policy on SCRIPT over several paired seeds; exit 1 when it does not hold."""
    from autoprec.policy import Policy, load_policy
    from autoprec.trial.command import ScriptCommand
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.trial.protocol import TrialSpec
    from autoprec.tuning.verify import contenders
    from autoprec.tuning.verify import verify as run_verification
    from autoprec.tuning.workers.local import HostPool

    policy: Policy = load_policy(policy_path)
    command = ScriptCommand.parse(script)
    with (
        tempfile.TemporaryDirectory(prefix="autoprec-verify-") as scratch,
        HostPool(lambda seed, folder: TrialRunner(command, run_dir=folder, seed_offset=seed), Path(scratch)) as pool,
    ):
        host = pool.info(0)
        emulated = host.device == "cpu" and any(recipe.scaled for recipe in policy.recipes.values())
        spec = TrialSpec(
            steps=values["steps"],
            warmup=values["warmup"],
            anneal=values["anneal"],
            backend=values["backend"],
            seed=None if host.launch == "fork" else 0,
        )
        result = run_verification(
            pool,
            contenders(policy),
            spec,
            seeds=values["seeds"],
            timed=not emulated,
            max_divergence=values["max_divergence"],
            tell=lambda line: None if quiet else click.echo(line, err=True),
        )
    if as_json:
        json.dump(result.to_json(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        _print(result)
    return 0 if result.ok else 1


def _print(result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result.seeds} paired seeds, {result.steps} steps each")
    for name in ("", "speed-up", "range", "divergence", "memory"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("reference", "1.00x", "", f"floor {result.noise_floor:.3%}", "")
    for row in result.rows:
        spread = f"{min(row.speedups):.2f}-{max(row.speedups):.2f}x" if row.speedups else ""
        speed = f"{row.speedup:.2f}x" if result.timed else "emulated"
        gap = f"{row.divergence:.3%}" if row.divergences else "; ".join(row.failures)[:60]
        table.add_row(row.name, speed, spread if result.timed else "", gap, f"{row.memory_bytes / 1e6:.0f} MB")
    console = Console(no_color=bool(os.environ.get("NO_COLOR")), highlight=False)
    console.print(table)
    console.print(("holds: " if result.ok else "does not hold: ") + result.reason, markup=False, soft_wrap=True)
