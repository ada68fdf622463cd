"""The search as a Python call: what ``autoprec search`` does, without the terminal; also for a function that trains."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from autoprec.errors import UsageError
from autoprec.support.amounts import check_share, parse_share
from autoprec.trial.protocol import STEPS
from autoprec.tuning.options import OPTIONS, RUNS, SearchOptions
from autoprec.tuning.study.records import SearchResult

if TYPE_CHECKING:
    from autoprec.tuning.events import Listener

__all__ = ["SearchResult", "search"]


def search(
    script: str | os.PathLike[str] | Sequence[str] | Callable[[], Any],
    *,
    target: str = "auto",
    space: str = "",
    trials: int = 30,
    budget_s: float | None = None,
    steps: int = STEPS,
    warmup: int = 3,
    max_divergence: float | str = 0.0025,
    metric: str = "",
    max_change: float | str | None = None,
    better: str | None = None,
    max_gradient_error: float = 0.12,
    max_memory: int | Literal["auto"] | None = None,
    objective: str = "throughput",
    reference: str = "script",
    seed: int = 0,
    output: str = "policy.yaml",
    study: str = "",
    storage: str = "",
    resume: bool = False,
    workers: int = 0,
    engine: str = "local",
    sampler: str = "knapsack",
    cost_scale: str = "",
    force: bool = False,
    seeds: int = 2,
    backend: str = "auto",
    variant: tuple[str, ...] = (),
    track: bool = True,
    progress: bool = False,
) -> SearchResult:
    """Search the precision policy that trains a script fastest without changing its loss curve.

    Args:
        script: the command line of the script, as text (``"train.py --lr 3e-4"``) or as tokens; or a function that
            trains when it is called, which is run in processes of its own (``functools.partial`` gives it arguments).
        progress: print phases and trials on stderr.

    Every other keyword is an option of ``autoprec search`` of the same name (docs/cli.md); ``help(autoprec.search)``
    lists them with their units:

    Returns:
        What ``autoprec search --json`` prints, as an object that notebooks and terminals show as a table;
        ``autoprec.load(result.policy)`` is the policy, ``result.study`` the Optuna study, ``result.to_pandas()`` its
        trials.

    Raises:
        UsageError: an option, a script or a function that cannot be meant; the message says what can.
        AutoPrecError: see docs/cli.md.

    Examples:
        >>> import autoprec
        >>> from pathlib import Path
        >>> script = Path("train.py")
        >>> _ = script.write_text('''
        ... import torch
        ... model = torch.nn.Linear(16, 16)
        ... optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ... for _ in range(40):
        ...     model(torch.randn(8, 16)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ... ''')
        >>> result = autoprec.search(script, track=False)
        >>> result.verdict  # one layer of 16 x 16 gains nothing anywhere
        'stay'
        >>> autoprec.load(result.policy).layers
        ()
    """
    asked = dict(locals())  # every keyword by its name; tests hold them to the fields of SearchOptions
    for name in ("script", "progress"):
        del asked[name]
    return _run(script, asked, progress=progress)


def _run(
    script: str | os.PathLike[str] | Sequence[str] | Callable[[], Any],
    asked: dict[str, Any],
    *,
    progress: bool,
) -> SearchResult:
    from autoprec.tracking.listener import tracked

    began = time.monotonic()
    checked = _checked(asked)
    options = SearchOptions(command=_tokens(script), **checked)
    with contextlib.ExitStack() as stack:
        listeners: list[Listener] = []
        if progress:
            from autoprec.cli.progress import TerminalProgress

            listeners.append(stack.enter_context(contextlib.closing(TerminalProgress())))
        _, result = stack.enter_context(tracked(options, *listeners, started=began))
        return replace(result, _address=options.storage)


def _tokens(script: Any) -> tuple[str, ...]:
    """Return the command line of a script, or of the one that a function is written as.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(script, str):
        return tuple(shlex.split(script))
    if isinstance(script, os.PathLike):
        return (os.fspath(script),)
    if isinstance(script, Sequence) and all(isinstance(word, (str, os.PathLike)) for word in script):
        return tuple(map(os.fspath, script))
    from autoprec.trial.function_script import function_script

    return (str(function_script(script, Path(RUNS) / "functions")),)


def _checked(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, paths as text; refuse those of a wrong type, which the command line would have parsed.

    Raises:
        UsageError: naming the option, what it was given and what it takes.
    """
    from pydantic import TypeAdapter, ValidationError

    types, out = get_type_hints(SearchOptions), {}
    for name, about in OPTIONS.items():
        value = asked[name]
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        elif about.parse == "parse_share" and isinstance(value, str):
            value = parse_share(value)
        try:
            out[name] = TypeAdapter(types[name]).validate_python(
                tuple(value) if isinstance(value, list) else value, strict=True
            )
        except ValidationError as error:
            raise UsageError(
                f"{name}={value!r} is a {type(value).__name__}: {error.errors()[0]['msg'].lower()}",
                fix=f"it is in {about.python}" if about.python else f"e.g. {name}={about.default!r}",
                code="type",
            ) from error
        if about.parse == "parse_share" and isinstance(asked[name], (int, float)):
            check_share(out[name])  # a number has no unit here: as a number without one on a command line
    return out


def _described() -> str:
    """Return what ``help(autoprec.search)`` says of every option, from their table."""
    lines = []
    for name, about in OPTIONS.items():
        words = f" One of {', '.join(about.choices)}." if about.choices else ""
        unit = f" In {about.python}." if about.python else ""
        # a switch of the command line that turns something off says what happens then
        off = about.default is True and about.flag.startswith("--no-")
        text = f"False: {about.help[0].lower()}{about.help[1:]}" if off else about.help
        lines.append(f"        {name}: {text}{words}{unit} Default: {about.default!r}.\n")
    return "".join(lines)


if search.__doc__:  # absent under python -OO
    search.__doc__ = search.__doc__.replace("\n    Returns:", f"{_described()}\n    Returns:", 1)
