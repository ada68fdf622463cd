"""Metrics that a script logs anyway: with Hugging Face's Trainer, Lightning, wandb and mlflow, without a changed line.

Each library's own function is wrapped right after its import and does what it does; then what it was given is reported
(:class:`~autoprec.trial.inside.reporting.reports.Reports`). In trials loggers write nothing outside and upload nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autoprec.trial.inside.patching import Wanted, after_import, wrapped
from autoprec.trial.inside.reporting.reports import Reports

#: What a call reports, from its arguments.
_Reader = Callable[[tuple[Any, ...], Mapping[str, object]], Mapping[str, object]]


def _argument(args: tuple[Any, ...], named: Mapping[str, object], at: int, keyword: str) -> Any:
    return args[at] if len(args) > at else named.get(keyword)


def _mapping(at: int, keyword: str) -> _Reader:
    """Return what reads the values of a call that is given a mapping of them."""

    def read(args: tuple[Any, ...], named: Mapping[str, object]) -> Mapping[str, object]:
        values = _argument(args, named, at, keyword)
        return values if isinstance(values, Mapping) else {}

    return read


def _one_metric(args: tuple[Any, ...], named: Mapping[str, object]) -> Mapping[str, object]:
    return {_argument(args, named, 0, "key"): _argument(args, named, 1, "value")}


def _lightning_value(args: tuple[Any, ...], named: Mapping[str, object]) -> Mapping[str, object]:
    """Return what a Lightning module logs while it trains; of an epoch, such as one of validation, the mean counts."""
    trainer = getattr(args[0], "_trainer", None)
    if trainer is None or not trainer.training or _argument(args, named, 5, "on_step") is False:
        return {}
    return {_argument(args, named, 1, "name"): _argument(args, named, 2, "value")}


def _lightning_means(args: tuple[Any, ...], _: Mapping[str, object]) -> Mapping[str, object]:
    """Return the means of a validation or an epoch that has ended, as Lightning's own callbacks see them."""
    connector = args[0]
    found = {} if connector.trainer.sanity_checking else connector.metrics["callback"]
    return found if isinstance(found, Mapping) else {}


#: What a function has that reports already.
_KNOWN = "_autoprec_reports"
_CONNECTOR = "trainer.connectors.logger_connector.logger_connector"
#: ``module, function, how its values are read``.
CALLS: tuple[tuple[str, str, _Reader], ...] = (
    ("transformers.trainer", "Trainer.log", _mapping(1, "logs")),
    *(
        row
        for module in ("mlflow.tracking.fluent", "mlflow")  # which has the functions as they were when it was imported
        for row in ((module, "log_metric", _one_metric), (module, "log_metrics", _mapping(0, "metrics")))
    ),
    *(
        row
        for package in ("lightning.pytorch", "pytorch_lightning")
        for row in (
            (f"{package}.core.module", "LightningModule.log", _lightning_value),
            (f"{package}.{_CONNECTOR}", "_LoggerConnector.update_eval_epoch_metrics", _lightning_means),
            (f"{package}.{_CONNECTOR}", "_LoggerConnector.update_train_epoch_metrics", _lightning_means),
        )
    ),
)


def pick_up(reports: Reports) -> None:
    """Wrap every function of :data:`CALLS`, and what wandb gives a script to log with, now or after its import."""
    wanted: Wanted = {"wandb": [functools.partial(_wrap_wandb, reports)]}
    for module, path, read in CALLS:
        wanted.setdefault(module, []).append(functools.partial(_wrap, reports, path, read))
    after_import(wanted)


def _reporting(original: Callable[..., Any], reports: Reports, source: str, read: _Reader) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        values = read(args, named)  # Lightning forgets those of an epoch
        returned = original(*args, **named)
        reports.add(source, values)
        return returned

    reporting = wrapped(original, call)
    setattr(reporting, _KNOWN, True)
    return reporting


def _wrap(reports: Reports, path: str, read: _Reader, module: Any) -> None:
    *owners, name = path.split(".")
    owner = functools.reduce(lambda found, part: getattr(found, part, None), owners, module)
    original = getattr(owner, name, None)
    if callable(original) and not hasattr(original, _KNOWN):
        source = f"{module.__name__.partition('.')[0]}.{path}"
        setattr(owner, name, _reporting(original, reports, source, read))


def _wrap_wandb(reports: Reports, module: Any) -> None:
    """Wrap what ``wandb.init`` returns: in a trial wandb is disabled, and its runs have functions of their own."""
    init = getattr(module, "init", None)
    if not callable(init):
        return
    read = _mapping(0, "data")

    def start(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        run = original(*args, **named)
        if run is not None and not hasattr(run.log, _KNOWN):
            run.log = module.log = _reporting(run.log, reports, "wandb.log", read)
        return run

    module.init = wrapped(init, start)
