"""What a script logs with a library is reported; the libraries are stand-ins where they are not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from autoprec.trial.inside.reporting.pickups import CALLS, pick_up
from autoprec.trial.inside.reporting.reports import Reports
from autoprec.trial.losses import Series
from autoprec.trial.protocol import TrainSpec


class Seen(Reports):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, dict[str, Any]]] = []

    def add(self, source: str, values: Any) -> None:
        if values:
            self.rows.append((source, dict(values)))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Reports that are told of what stand-ins of the libraries are given; the real ones are not touched."""
    for name in {module for module, *_ in CALLS} | {"wandb"}:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return Seen()


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> Any:
    module: Any = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def test_mlflow(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    fluent = stand_in(
        monkeypatch,
        "mlflow.tracking.fluent",
        log_metric=lambda key, value, step=None: calls.append((key, value, step)),
        log_metrics=lambda metrics, step=None: calls.append((metrics, step)),
    )
    pick_up(seen)
    fluent.log_metric("f1", 0.5, step=3)
    fluent.log_metric(value=0.25, key="f1")
    fluent.log_metrics({"f1": 0.5, "loss": 1.0})
    fluent.log_metrics(metrics={"f1": 0.5})
    assert [values for _, values in seen.rows] == [{"f1": 0.5}, {"f1": 0.25}, {"f1": 0.5, "loss": 1.0}, {"f1": 0.5}]
    assert calls == [("f1", 0.5, 3), ("f1", 0.25, None), ({"f1": 0.5, "loss": 1.0}, None), ({"f1": 0.5}, None)]


def test_mlflow_that_was_imported_before(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are in two modules, and report once."""
    fluent = stand_in(monkeypatch, "mlflow.tracking.fluent", log_metric=lambda key, value: None)
    mlflow = stand_in(monkeypatch, "mlflow", log_metric=fluent.log_metric)
    pick_up(seen)
    mlflow.log_metric("f1", 0.5)
    fluent.log_metric("f1", 0.25)
    mlflow.log_metric = fluent.log_metric
    pick_up(seen)
    mlflow.log_metric("f1", 0.125)
    assert [values for _, values in seen.rows] == [{"f1": 0.5}, {"f1": 0.25}, {"f1": 0.125}]


def test_the_trainer_of_hugging_face(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["epoch"] = 1.0

    stand_in(monkeypatch, "transformers.trainer", Trainer=Trainer)
    pick_up(seen)
    Trainer().log({"eval_loss": 2.0})
    Trainer().log(logs={"loss": 2.0}, start_time=0.0)
    assert [set(values) for _, values in seen.rows] == [{"eval_loss", "epoch"}, {"loss", "epoch"}]


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(package: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    class LightningModule:
        def __init__(self, trainer: Any) -> None:
            self._trainer = trainer

        def log(
            self, name: str, value: Any, prog_bar: bool = False, logger: Any = None, on_step: bool | None = None
        ) -> None:
            pass

    class _LoggerConnector:
        def __init__(self, *, sanity: bool = False) -> None:
            self.trainer = SimpleNamespace(sanity_checking=sanity)
            self.metrics: Any = {"callback": {"val_loss": torch.tensor(1.5)}, "log": {}}

        def update_eval_epoch_metrics(self) -> dict[str, Any]:
            return {"returned": True}

        def update_train_epoch_metrics(self) -> None:
            self.metrics = {}  # forgotten

    stand_in(monkeypatch, f"{package}.core.module", LightningModule=LightningModule)
    name = f"{package}.trainer.connectors.logger_connector.logger_connector"
    stand_in(monkeypatch, name, _LoggerConnector=_LoggerConnector)
    pick_up(seen)
    training, validating = (LightningModule(SimpleNamespace(training=on)) for on in (True, False))
    training.log("loss", 2.0)
    training.log(name="loss", value=1.0, on_step=True)
    training.log("of the epoch", 1.0, False, None, False)
    validating.log("val_loss", 3.0)
    LightningModule(None).log("loss", 0.0)
    assert _LoggerConnector().update_eval_epoch_metrics() == {"returned": True}
    assert _LoggerConnector(sanity=True).update_eval_epoch_metrics() == {"returned": True}
    _LoggerConnector().update_train_epoch_metrics()
    mean = {"val_loss": torch.tensor(1.5)}
    assert [values for _, values in seen.rows] == [{"loss": 2.0}, {"loss": 1.0}, mean, mean]


def test_wandb_whose_runs_have_their_own_log(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda data, step=None: calls.append((data, step)))
    wandb: Any = stand_in(monkeypatch, "wandb")

    def init(**_: Any) -> Any:
        wandb.log = run.log
        return run

    wandb.init = init
    pick_up(seen)
    first = wandb.init(project="x")
    assert wandb.init(reinit=False) is first
    first.log({"val/loss": 1.0}, step=2)
    wandb.log(data={"val/loss": 2.0})
    wandb.log("not a mapping")
    assert [values for _, values in seen.rows] == [{"val/loss": 1.0}, {"val/loss": 2.0}]
    assert len(calls) == 3


def test_a_library_that_has_other_functions_is_left_as_it_is(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = [stand_in(monkeypatch, name) for name in ("wandb", "transformers.trainer", "mlflow.tracking.fluent")]
    before = [dict(vars(module)) for module in modules]
    pick_up(seen)
    assert [dict(vars(module)) for module in modules] == before


# --- in trials of scripts, with the libraries themselves -------------------------------------------------------------
SCRIPTS = {
    "transformers": ("hf_reporting.py", "eval_loss"),
    "lightning": ("lightning_reporting.py", "val_loss"),
    "wandb": ("reporting.py", "eval_loss"),
    "mlflow": ("reporting.py", "eval_loss"),
}


@pytest.mark.parametrize("library", SCRIPTS)
def test_metrics_are_picked_up_without_a_changed_line(library: str, host: Any, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    script, name = SCRIPTS[library]
    with host(script, *(["--by", library] if script == "reporting.py" else [])) as runner:
        found = runner.run(TrainSpec(steps=4, warmup=2, metric=name))
        unknown = runner.run(TrainSpec(steps=4, warmup=2, metric="f1"))
    assert found.ok, found.reason + found.tail
    assert isinstance(found.metric, Series)
    assert found.metric.steps == (4, 8)
    log = (tmp_path / "run" / "host-0.log").read_text() if (tmp_path / "run" / "host-0.log").exists() else ""
    assert all(value > 0 for value in found.metric.values), log
    assert unknown.status == "unreported"
    assert unknown.metric is not None
    assert name in unknown.metric.names
