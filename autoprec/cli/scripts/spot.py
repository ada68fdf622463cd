"""The spot check of ``check --sensitivity N`` and ``transfer --spot N``: gradient errors on the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autoprec.cli.console import plain_table, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.recording import gradient_errors
from autoprec.errors import AuditError
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, save_policy
from autoprec.trial.protocol import HostInfo

if TYPE_CHECKING:
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.tuning.transfer.spot import SpotCheck

#: Training steps before the passes, at each of two moments: the first gradients are those of the initial weights, and
#: errors at one step differ from those some steps on by more than two batches of one step do.
MOMENTS = (5, 25)
#: The gradient error that a search allows by default, as a share of the mini-batch noise.
LIMIT = 0.12


def ask(
    runner: TrialRunner, host: HostInfo, label: str, policy: Policy, report: GraphReport, passes: int, backend: str
) -> SpotCheck:
    """Run the passes on a script that is held at its first step, at two moments of it where it has so many steps.

    Args:
        runner: holds the script.
        host: what the script was found to be.
        label: what it is called in messages.
        policy: what is checked.
        report: the recorded step.
        passes: how many forward and backward passes; the first is of the whole policy.
        backend: who multiplies: ``auto``, ``emulated`` or a library.

    Raises:
        ScriptError: they could not be run.
    """
    from autoprec.tuning.transfer.spot import judged, spot_probes

    probes = spot_probes(policy, report, passes)
    return judged(gradient_errors(runner, host, label, probes, MOMENTS, backend=backend), LIMIT)


def print_spot(found: SpotCheck) -> None:
    """Print the passes and what they say."""
    rows = [
        (row.name, f"{row.error:.4f}", f"{row.error / found.noise:.3f}" if found.noise == found.noise else "-")
        for row in found.rows
    ]
    stdout_console().print(plain_table(("gradient error of", "relative", "of the noise"), rows))
    limit = f"the limit is {found.limit:.4f} ({LIMIT:g} of the mini-batch noise, {found.noise:.3f})"
    echo(limit if found.noise == found.noise else "no limit: the mini-batch noise could not be seen")
    if found.within:
        echo("the policy holds on this model")


def settle(found: SpotCheck, policy: Policy, report: GraphReport, path: Path) -> None:
    """Write the corrected policy where the check failed.

    Args:
        found: outcome of the passes.
        policy: what was checked.
        report: the recorded step.
        path: of the policy: the corrected one is written beside it.

    Raises:
        AuditError: the policy is beyond the limit on this model; the message names the corrected one.
    """
    if found.within:
        return
    from autoprec.tuning.transfer.spot import corrected

    mended, removed = corrected(policy, report, found)
    stem = path.stem.replace(":", "-")  # of a published policy
    written = save_policy(mended, path.with_name(f"{stem}.checked{path.suffix or '.yaml'}"))
    raise AuditError(
        f"the gradient error is {found.error:.4f} on this model, beyond {found.limit:.4f}",
        where=str(path),
        fix=f"{written} has {', '.join(removed[:4])}{' and more' if len(removed) > 4 else ''} back in 16 bits: "
        "check that one",
    )
