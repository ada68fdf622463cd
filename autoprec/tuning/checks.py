"""Options that are known to be wrong are refused before the script is started."""

from __future__ import annotations

import os

from autoprec.cost.scale import CostScale
from autoprec.errors import UnknownNameError, UsageError
from autoprec.policy import check_replaceable
from autoprec.policy.space import load_space
from autoprec.precision.hardware import target
from autoprec.trial.command import parse_variants
from autoprec.tuning.options import RUNS, SearchOptions


def check_early(options: SearchOptions) -> None:
    """Refuse options that name what does not exist, and an output that cannot be written or is something else.

    Raises:
        UnknownNameError: no such target, space or backend, with the nearest valid name.
        SpaceError, UsageError, FileError: a space that is not valid, a cost scale or storage that is none, an output
            path that cannot be written, or where something else than a policy is.
    """
    name = options.study
    if name and (name in (".", "..") or not name.isprintable() or any(char in name for char in "/\\")):
        raise UsageError(f"--study {name!r} cannot be a folder below {RUNS}", fix="e.g. --study first-try")
    parse_variants(options.variant)
    if options.variant and (options.target not in ("auto", "cpu") or options.cost_scale):
        fix = "search on the device itself, or leave --variant out and use `autoprec estimate` for sizes"
        raise UsageError("--variant is timed, and this is a rehearsal", fix=fix)
    check_names(options)
    if options.storage:
        _check_storage(options.storage)
    check_replaceable(options.output)


def check_names(options: SearchOptions) -> None:
    """Refuse a target, space or backend that does not exist, and an invalid cost scale, before a script is started.

    Raises:
        UnknownNameError: no such target, space or backend, with the nearest valid name.
        SpaceError, FileError: a space that is not valid, or cannot be read.
        UsageError: see :func:`check_scale`.
    """
    if options.target != "auto":
        target(options.target)
    if options.space:
        load_space(options.space)
    if options.cost_scale:
        check_scale(options.cost_scale, options.target)
    if options.backend != "auto":
        from autoprec.backends import BACKENDS  # needs torch, which the driver otherwise does without

        if options.backend not in BACKENDS:
            raise UnknownNameError("backend", options.backend, [*BACKENDS, "auto"])


def check_scale(text: str, target_name: str) -> CostScale:
    """Return the cost scale; refuse one without a target that it is for.

    Raises:
        UsageError: it is not a cost scale, or it would model this machine's CPU at a size that nobody trains there.
    """
    from autoprec.tuning.workers.slots import visible_gpus

    scale = CostScale.parse(text)
    if target_name == "auto" and not visible_gpus(dict(os.environ)):
        raise UsageError(
            "--cost-scale without --target would model this CPU at a larger scale",
            fix=f"name the GPU to rehearse for: --target h100 --cost-scale {text}",
        )
    return scale


def _check_storage(url: str) -> None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import SQLAlchemyError

    try:
        make_url(url).get_dialect().import_dbapi()
    except (SQLAlchemyError, ImportError, ValueError) as error:
        raise UsageError(
            f"--storage is not a database URL that can be used: {error}", fix="e.g. sqlite:///study.db"
        ) from error
