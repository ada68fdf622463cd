"""What is logged to a run that the script has opened."""

from __future__ import annotations

import math
import sys
import types

import pytest

from autoprec.support.active_run import log_to_active_run


def test_only_an_open_run_is_logged_to_and_its_errors_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def tags(_values: dict[str, str]) -> None:
        raise ConnectionError

    module = types.SimpleNamespace(
        active_run=lambda: None, log_metrics=lambda values, step: seen.append((values, step)), set_tags=tags
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    log_to_active_run({"a": 1.0}, 3)
    assert seen == []
    module.active_run = lambda: "run"
    log_to_active_run({"a": 1.0, "b": math.nan}, 3, {"t": "x"})
    assert seen == [({"a": 1.0}, 3)]
