"""The command line: one lazy table of commands, one place where errors become exit codes.

Nothing heavy is imported before a command runs, so ``autoprec --help`` costs what click costs.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from autoprec._version import __version__
from autoprec.cli.echo import echo
from autoprec.cli.signals import EXIT_INTERRUPTED, ended_once
from autoprec.errors import AutoPrecError, UnknownNameError, UsageError

__all__ = ["COMMANDS", "cli"]

#: command -> (module and attribute, the line that ``autoprec --help`` prints), in the order of a first visit
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("scripts.demo:demo", "See the whole product on a small GPT, on any machine."),
    "search": ("scripts.search:search", "Find the fastest precision policy for a training script."),
    "inspect": ("scripts.inspect:inspect", "Operators, their classes, the tunable share; gradient errors."),
    "estimate": ("scripts.estimate:estimate", "The verdict alone: what could be gained on a target."),
    "run": ("scripts.run:run", "Run the unmodified script under a policy."),
    "check": ("scripts.check:check", "Audit asked against executed, layer by layer."),
    "verify": ("scripts.verify:verify", "Longer paired runs: policy against reference and presets."),
    "transfer": ("scripts.transfer:transfer", "Carry a policy found on a small model over to a big one."),
    "show": ("policies.show:show", "Print a policy with its evidence, or what two differ in."),
    "lint": ("policies.lint:lint", "Is a policy or search space valid, and right for a script?"),
    "export": ("policies.export:export", "A policy as another training stack's configuration, or that as a policy."),
    "doctor": ("machine.doctor:doctor", "What works here, and why not; the hardware table."),
    "ui": ("machine.ui:ui", "Open the MLflow UI on the study's runs."),
}


def kebab(token: str) -> str:
    """Spell an option or command with dashes, so that ``--max_divergence`` is ``--max-divergence``."""
    return token.replace("_", "-")


class LazyGroup(click.Group):
    """Imports a command's module when the command is named, and turns every error into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the commands in the order of a first visit; none of them is imported."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a command and return it; None for a name that is not one.

        Raises:
            TypeError: the table names something else.
        """
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(f"autoprec.cli.{module}"), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"autoprec.cli.{module}:{attribute} is not a click command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return (name, command, its arguments); underscores in the name count as dashes.

        Raises:
            UnknownNameError: an unknown command; with the nearest one.
            UsageError: it has another name now.
        """
        name = kebab(args[0]) if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            raise UnknownNameError("command", args[0], COMMANDS)
        return super().resolve_command(ctx, [name, *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the table of commands into ``autoprec --help``."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]
        """Run a command line and leave with its exit code (docs/cli.md)."""
        extra["standalone_mode"] = False
        _open_standard_streams()
        with ended_once():
            code = self._run(args, prog_name or "autoprec", extra)
        sys.exit(code)

    def _run(self, args: Sequence[str] | None, prog_name: str, extra: dict[str, Any]) -> int:
        try:
            result = super().main(args, prog_name, **extra)
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
        except click.ClickException as error:
            error.show()
            return error.exit_code
        except (KeyboardInterrupt, click.Abort):
            _say("interrupted")
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # the reader (``| head``) has ended: nothing can be told
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except AutoPrecError as error:
            return _report(error)
        except OSError as error:
            from autoprec.support.files import resource_error

            if (known := resource_error(error, str(error.filename or ""))) is not None:
                return _report(known)
            if _directory_is_gone():
                return _report(UsageError("the working directory has been removed", fix="cd to one that exists"))
            return _report_defect()
        except Exception:
            return _report_defect()


def _open_standard_streams() -> None:
    """Put ``/dev/null`` where a caller closed stdin, stdout or stderr: the next file opened would get that number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def _directory_is_gone() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed cannot be told, and the exit code still counts
        echo(f"autoprec: {line}", err=True)


def _report(error: AutoPrecError) -> int:
    if os.environ.get("AUTOPREC_DEBUG"):
        traceback.print_exc()
    _say(f"error: {error}")
    return error.exit_code


def _report_defect() -> int:
    traceback.print_exc()
    _say("error: this is a defect of AutoPrec, not of your script; `autoprec doctor` prints what a report needs")
    return 1


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": kebab,
        "max_content_width": 110,
    },
    epilog="Every command takes --help. Exit codes: 0 done, 1 failed or mismatch, 2 usage or bad file, 3 nothing "
    "acceptable, 4 the script failed, 5 study locked or damaged, 6 no space, 130/143 signals.",
)
@click.version_option(__version__, "--version", prog_name="autoprec", message="%(prog)s %(version)s")
def cli() -> None:
    """Find the per-layer precision policy that trains fastest without changing the loss curve you can measure."""
