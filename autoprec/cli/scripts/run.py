"""``autoprec run``: the unmodified script, to its own end, under a policy."""

from __future__ import annotations

from pathlib import Path

import click

from autoprec.cli import options
from autoprec.cli.policies.published import policy_of
from autoprec.cli.script import script_command
from autoprec.errors import UsageError
from autoprec.support.files import check_kind, holds_keys
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.script import run_script


@script_command("run")
@click.option("--policy", type=click.Path(path_type=Path),
              help="Policy file, or published:NAME; without one the script runs as written.")  # fmt: skip
@options.backend
@click.option("--run-steps", type=click.IntRange(min=1), metavar="N", hidden=True,
              help="Optimizer steps of the whole run, for a policy whose phases begin at a share of it.")  # fmt: skip
@click.option("--audit", type=click.Path(path_type=Path), metavar="FILE", help="Write asked/executed here at the end.")
def run(
    script: tuple[str, ...],
    policy: Path | None,
    backend: str,
    run_steps: int | None,
    audit: Path | None,
) -> int:
    """Run a training script, unmodified, under a policy.

    The exit code is the script's own. Its output, files and arguments are untouched.
    """
    if policy is None:
        _refuse_late(script)
    command = ScriptCommand.parse(script)
    loaded = policy_of(policy, script) if policy is not None else None
    if audit is not None:
        check_kind(audit, "an audit", holds_keys("ok", "layers", "operators"), option="--audit")
    code = run_script(
        command,
        loaded,
        backend=backend,
        audit=audit if audit is not None else False,
        run_steps=run_steps,
    )
    return code if code >= 0 else 128 - code


def _refuse_late(script: tuple[str, ...]) -> None:
    """Refuse to train without a policy that somebody names behind the script; behind ``--`` it is the script's own."""
    mine = script[: script.index("--")] if "--" in script else script
    if any(token.partition("=")[0] == "--policy" for token in mine[1:]):
        raise UsageError(
            "--policy comes after the script, so it is the script's, and nothing would train under it",
            fix="autoprec run --policy FILE train.py [script args]; for a script with such an option of its own: "
            f"autoprec run -- python {' '.join(script)}",
        )
