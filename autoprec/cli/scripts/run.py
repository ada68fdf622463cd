"""``autoprec run``: the unmodified script, to its own end, under a policy."""

from __future__ import annotations

from pathlib import Path

import click

from autoprec.cli import options
from autoprec.cli.script import script_command

__all__ = ["run"]


@script_command("run")
@click.option("--policy", type=click.Path(path_type=Path), help="Policy file; without one the script runs as written.")
@options.backend
@click.option("--run-steps", type=click.IntRange(min=1), metavar="N",
              help="Optimizer steps of the whole run, for a policy whose phases begin at a share of it.")  # fmt: skip
@click.option("--follow", metavar="every=N",
              help="Measure gradient errors again every N steps, and change layers where that matters.")  # fmt: skip
@click.option("--audit", type=click.Path(path_type=Path), metavar="FILE", help="Write asked/executed here at the end.")
def run(
    script: tuple[str, ...],
    policy: Path | None,
    backend: str,
    run_steps: int | None,
    follow: str | None,
    audit: Path | None,
) -> int:
    """Run a training script, unmodified, under a policy.

    The exit code is the script's own. Its output, files and arguments are untouched.
    """
    from autoprec.errors import UsageError
    from autoprec.policy import load_policy
    from autoprec.support.files import check_writable
    from autoprec.trial.command import ScriptCommand
    from autoprec.trial.driver.script import run_script

    command = ScriptCommand.parse(script)
    loaded = load_policy(policy) if policy is not None else None
    if follow is not None and loaded is None:
        raise UsageError("--follow is about a policy", fix="give one with --policy")
    if audit is not None:
        check_writable(audit)
    code = run_script(
        command,
        loaded,
        backend=backend,
        audit=audit if audit is not None else False,
        run_steps=run_steps,
        follow=follow,
    )
    return code if code >= 0 else 128 - code
