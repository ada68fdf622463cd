"""One trial as a stateless command: a JSON document in, a JSON document out.

``python -m autoprec.trial.driver.execute request.json result.json`` is all that a batch system (Slurm, Kubernetes)
needs to run trials on other machines: the request names the command and the
:class:`~autoprec.trial.protocol.TrialSpec`, the result is a :class:`~autoprec.trial.protocol.TrialResult`. Nothing is
shared but the script and its data.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from autoprec.errors import AutoPrecError, UsageError
from autoprec.support.files import read_document, write_json
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.runner import TrialRunner
from autoprec.trial.protocol import TrialResult, TrialSpec


def command_to_json(command: ScriptCommand) -> Document:
    """Return the JSON form of a command."""
    return asdict(command) | {"cwd": str(command.cwd.absolute())}


def command_from_json(document: Document) -> ScriptCommand:
    """Rebuild a command from :func:`command_to_json`.

    Raises:
        UsageError: a part is missing.
    """
    try:
        return ScriptCommand(
            str(document["kind"]), str(document["target"]), tuple(map(str, document["args"])), Path(document["cwd"])
        )
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"not a command: {error}", fix="write requests with autoprec.trial.driver.execute.request"
        ) from error


def request(command: ScriptCommand, spec: TrialSpec, *, seed_offset: int = 0, launch: str = "auto") -> Document:
    """Return the request document of one trial.

    Args:
        command: the script.
        spec: what the trial is.
        seed_offset: added to every seed of the script: which paired seed it is.
        launch: ``auto``, ``fork``, ``zygote`` or ``process``.
    """
    return {"command": command_to_json(command), "spec": spec.to_json(), "seed_offset": seed_offset, "launch": launch}


def execute(document: Document) -> TrialResult:
    """Run one request on this machine; a failure of the script comes back as a crashed trial, never as an error."""
    command = command_from_json(document["command"])
    spec = TrialSpec.from_json(dict(document["spec"]))
    offset, launch = int(document.get("seed_offset", 0)), str(document.get("launch", "auto"))
    with TrialRunner(command, seed_offset=offset, launch=launch) as runner:
        try:
            runner.start()
        except AutoPrecError as error:
            return TrialResult("crashed", error.what)
        return runner.run(spec)


def main(arguments: list[str] | None = None) -> int:
    """Read a request file, run it, write the result file; 0 whenever a result was written."""
    words = sys.argv[1:] if arguments is None else arguments
    if len(words) != 2:
        print("usage: python -m autoprec.trial.driver.execute request.json result.json", file=sys.stderr)
        return 2
    try:
        result = execute(read_document(words[0]))
    except AutoPrecError as error:
        print(f"autoprec: error: {error}", file=sys.stderr)
        return error.exit_code
    write_json(words[1], result.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
