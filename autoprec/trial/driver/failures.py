"""Why a script could not be tried, as an error for a person: what was seen, and what to change.

Nothing is blamed on the script that was not verified. That it ends with an error under hooks does not prove that it
ends with one alone, so the message shows the script's own output, says what AutoPrec kept it from doing, and gives the
command that tells the two apart.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from autoprec.errors import BEFORE_TORCHSCRIPT, IN_TORCHSCRIPT, NoSpaceError, NothingAcceptableError, ScriptError
from autoprec.support.plain import Document
from autoprec.trial.command import ScriptCommand
from autoprec.trial.driver.classify import describe_exit, is_own_fault, last_lines
from autoprec.trial.protocol import TrialResult

_SESSION = (
    "name the model and its steps: session = autoprec.Session(model, optimizer), and session.step(loss) in place of "
    "backward, step and zero_grad (or session.observe(loss) after your own update)"
)
_BARE = "does `{command}` run to its first step? If it does, please report this with the output above"
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
#: What torch says of two dtypes that an operator does not take together.
_MEETING_DTYPES = re.compile(
    r"dtypes? (?:to )?match|(?:the same|different|to have) (?:scalar type|d?type)s?|expected (?:scalar type|m1 and m2)"
    r"|but got: c10::|dtype to be equal to|mat1 and mat2 must have the same dtype|should be the same|same dtype"
)
#: What the hooks can tell about a loop, and what to do about it.
_ADVICE = {
    "functional": (
        "its gradients come from torch.func.grad, whose transforms no layer hook can follow",
        "take them with torch.autograd.grad(loss, params.values()) on the same functional_call: that is followed",
    ),
    "no_module": (
        "what it trains are tensors that belong to no torch.nn.Module",
        "put the weights into a Module whose layers the script calls: a policy decides about these; "
        "`autoprec check` judges such a script as it is, if it takes three steps or more",
    ),
    "no_backward": (
        "the script never called backward() or torch.autograd.grad",
        _SESSION,
    ),
    "no_training_mode": (
        "the script called backward(), but no model in training mode",
        "call model.train() before the loop, or name the model: autoprec.register(model, optimizer)",
    ),
}


def script_failed(command: ScriptCommand, code: int, tail: str) -> ScriptError:
    """Return the error of a script that ended before its first training step.

    Args:
        command: the script.
        code: its exit code; negative for a signal.
        tail: the end of what it printed.
    """
    shown = last_lines(tail)
    if code == 0:
        what = "the script ended without a training step that AutoPrec could see" + (f"\n{shown}" if shown else "")
        fix = f"does it train a torch model in this Python environment? If so, {_SESSION}"
        return ScriptError(what, where=command.label, fix=fix)
    if is_own_fault(tail) and not _missing(tail):
        what = f"AutoPrec's own code failed inside the script's process; this is not the script's fault\n{shown}"
        fix = "please report it with the output above and `autoprec doctor`"
        return ScriptError(what, where=command.label, fix=fix)
    what = f"the script {describe_exit(code)} before its first training step\n{shown}{_held_back(tail)}"
    return ScriptError(
        what, where=command.label, fix=_missing(tail) or _BARE.format(command=shlex.join(command.argv()))
    )


def _missing(tail: str) -> str:
    """Return what a script lacked that ended for the want of it: a module, an answer, a descriptor; else empty."""
    if "Too many open files" in tail:
        return "it has as many files open as it may, and a trial takes some more: raise the limit (`ulimit -n 4096`)"
    if "EOFError: EOF when reading a line" in tail:
        return "a trial has no terminal to read from (AutoPrec's doing): give the answer as an argument of the script"
    lines = tail.strip().splitlines()
    found = _NO_MODULE.search(lines[-1]) if lines else None
    if found is None:
        return ""
    name = found[1].partition(".")[0]
    return f"install it where the script runs: {shlex.quote(sys.executable)} -m pip install {name}"


def _held_back(tail: str) -> str:
    """Say where AutoPrec itself may be the cause of what the output shows."""
    if "Permission denied" in tail or "Read-only file system" in tail:
        return "\nA trial may not change your files: another program, or a library in C, tried to (AutoPrec's doing)."
    return ""


def no_host(command: ScriptCommand, message: Document | None, code: int | None, tail: str, log: Path) -> ScriptError:
    """Return the error of a host that ended instead of serving.

    Args:
        command: the script.
        message: the host's last message; None where there was none.
        code: exit code of the process; None where that is not known.
        tail: the end of what it printed.
        log: file with all of it.
    """
    if message is None and not _missing(tail):
        return ScriptError("the host process ended while saying hello", where=command.label, fix=f"see {log}")
    if message is None:
        return script_failed(command, code or 1, tail)
    return script_failed(command, code, tail) if code else nothing_trained(command, message["seen"], tail)


def nothing_trained(command: ScriptCommand, seen: Document, tail: str) -> ScriptError:
    """Return the error of a script that used torch but took no step that hooks could follow.

    Args:
        command: the script.
        seen: what hooks counted, and ``why`` nothing could be followed.
        tail: the end of what it printed.
    """
    kind = str(seen.get("why") or ("no_backward" if not seen.get("backwards") else "no_training_mode"))
    what, fix = _ADVICE.get(kind, _ADVICE["no_backward"])
    counted = f"{seen.get('training_forwards', 0)} calls in training mode, {seen.get('backwards', 0)} backward passes"
    shown = f"\n{last_lines(tail)}" if tail.strip() else ""
    return ScriptError(f"no training step was seen: {what} ({counted}){shown}", where=command.label, fix=fix)


def first_step_failed(command: ScriptCommand, result: TrialResult) -> ScriptError:
    """Return the error of a script whose first steps, tried in a fork, did not come to their end."""
    fix = _BARE.format(command=shlex.join(command.argv()))
    if result.status == "too_short":
        fix = f"AutoPrec needs a script that trains: loss.backward() and a step. For another loop, {_SESSION}"
    elif result.status == "hung":
        fix = f"does `{shlex.join(command.argv())}` go on where it is run by itself?"
    fix = _missing(result.tail) or fix
    tail = f"\n{result.tail}{_held_back(result.tail)}" if result.tail else ""
    return ScriptError(f"its first training steps failed: {result.reason}{tail}", where=command.label, fix=fix)


def nothing_tunable(command: ScriptCommand, model: str, *, scripted: bool = False) -> NothingAcceptableError:
    """Return the error of a model without anything to decide; ``scripted``: it is TorchScript, or a part is.

    Args:
        command: the script.
        model: its class.
        scripted: whether it is TorchScript, or a part of it is.
    """
    if scripted:
        what = f"the model {model} is, or holds, TorchScript, and no other trainable GEMM: {IN_TORCHSCRIPT}"
        return NothingAcceptableError(what, where=command.label, fix=f"train {BEFORE_TORCHSCRIPT}")
    return NothingAcceptableError(
        f"the model {model} has no trainable GEMM a policy could decide about",
        where=command.label,
        fix="AutoPrec decides about Linear, Conv and Conv1D layers whose weights are trained",
    )


def how_to_mend(output: str, otherwise: str) -> str:
    """Return what to change where a script runs as written, and fails under a policy with this output."""
    if _MEETING_DTYPES.search(output):
        return (
            "tensors of two dtypes meet where the output ends, one of them in 16 bits under the policy: cast one to "
            "the other's there (x.to(y.dtype)), or leave activations, or the layer that makes it, as the script has it"
        )
    return otherwise


def no_space(folder: Path, reason: str) -> NoSpaceError:
    """Return the error of a trial whose files do not fit on the disk."""
    return NoSpaceError(
        f"a trial found no space left: {reason}",
        where=str(folder),
        fix="free some space there, or name another place with TMPDIR; then --resume",
    )
