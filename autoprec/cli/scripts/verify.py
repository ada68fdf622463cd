"""``autoprec verify``: longer paired runs of a policy beside the reference and the presets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from autoprec.cli import options
from autoprec.cli.console import plain_table, print_json, stdout_console
from autoprec.cli.echo import echo
from autoprec.cli.phases import Phases
from autoprec.cli.policies.published import policy_of
from autoprec.cli.script import script_command
from autoprec.errors import NothingAcceptableError
from autoprec.support.units import counted, gap_name, memory_text
from autoprec.trial.command import ScriptCommand
from autoprec.trial.processes import scratch
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.study.run import error_text
from autoprec.tuning.workers.local import HostPool

if TYPE_CHECKING:
    from autoprec.tuning.verify import Verification


@script_command("verify")
@click.option("--policy", "policy_path", required=True, metavar="FILE", help="Policy file, or published:NAME.")
@options.of_search("steps", default=40, help="Measured steps per run.")
@options.of_search("seeds", default=4, help="Paired seeds.", hidden=False)
@options.of_search(
    "max_divergence",
    default=None,
    show_default=False,
    help="Largest acceptable mean relative loss gap; default: the search's, else 0.25%.",
)
@options.of_search(
    "max_change",
    show_default=False,
    help="Largest acceptable change of its search's metric; default: the search's.",
)
@options.of_search(
    "max_gradient_error",
    default=None,
    show_default=False,
    help="In units of the mini-batch gradient noise; default: the search's, else 0.12.",
)
@options.backend
@options.as_json("The result")
def verify(script: tuple[str, ...], policy_path: str, as_json: bool, **values: Any) -> int:
    """Verify a policy on SCRIPT over several paired seeds that its search did not use.

    Presets run beside it under the first seed and are timed with it; one that is ahead runs under the others as well.
    A policy that has surely failed runs under no more. Exit code 1 when it does not hold, 3 when so few seeds cannot
    tell.
    """
    from autoprec.trial.driver.runner import TrialRunner
    from autoprec.tuning.verify import (
        contenders,
        first_fresh_seed,
        is_timed,
        limits_of,
        refuse_another_model,
        searched,
        setup_of,
    )
    from autoprec.tuning.verify import verify as run_verification

    policy = policy_of(policy_path, script)
    command, first = ScriptCommand.parse(script), first_fresh_seed(policy)
    given = {name: values.pop(name) for name in ("max_divergence", "max_gradient_error", "max_change")}
    asked = SearchOptions(command=script, **values, **limits_of(policy, **given))
    with (
        Phases() as phases,
        scratch() as folder,
        HostPool(lambda n, own: TrialRunner(command, run_dir=own, seed_offset=first + n), folder) as pool,
    ):
        phases.begin(f"running {command.label} to its first training step")
        host = pool.info()
        refuse_another_model(policy, pool, asked.backend)
        setup = setup_of(policy, pool, asked)
        policies = contenders(policy, setup, phases.say)
        phases.begin(f"{len(policies)} policies beside the reference, seed after seed", total=asked.seeds)
        finished: list[str] = []

        def tell(line: str) -> None:
            finished.append(line)
            phases.say(line)
            phases.advance(len(finished))

        timed = is_timed(policy, host.device)
        result = run_verification(pool, setup, policies, folder, first_seed=first, timed=timed, tell=tell)
    if as_json:
        print_json(result.to_json(), indent=1)
    else:
        _print(result, searched(policy, host.model))
    return {"holds": 0, "fails": 1}.get(result.verdict, NothingAcceptableError.exit_code)


def _print(result: Verification, searched: str) -> None:
    limits = result.limits
    noise, limit = limits.get("gradient_noise"), limits.get("gradient_error")
    budget = [f"{gap_name(result.metric)} {limits['divergence']:.3%}"] if limits.get("divergence") else []
    budget += [f"gradient error {error_text(limit, noise)}"] if limit is not None else []
    rows = [("reference", "1.00x", "", f"floor {result.noise_floor:.3%}", "", "")]
    for row in result.rows:
        one = row.standing
        low, high = row.range
        spread = f"{low:.2f}-{high:.2f}x" if result.timed and high > low else ""
        speed = f"{one.speedup:.2f}x" if result.timed else "not judged"
        gap = f"{row.divergence:.3%}" if row.measured else "; ".join(row.failures)[:60]
        error = error_text(one.gradient_error, noise) if one.gradient_error is not None else "-"
        rows.append((row.name, speed, spread, gap, error, memory_text(int(one.memory_bytes))))
    told = {"holds": "holds", "fails": "does not hold"}.get(result.verdict, result.verdict)
    notes = [f"limits: {', '.join(budget)}" if budget else "", f"{told}: {result.why}"]
    if result.first_seed:
        notes.append(
            f"these seeds are new: the search measured the policy under {counted(result.first_seed, 'other one')}"
        )
    notes.append(f"its search found: {searched}" if searched else "")
    headings = ("", "speed-up", "range", gap_name(result.metric), "gradient error", "memory")
    title = f"{counted(result.seeds, 'paired seed')}, {counted(result.steps, 'step')} each"
    stdout_console().print(plain_table(headings, rows, title))
    echo("\n".join(filter(None, notes)))
