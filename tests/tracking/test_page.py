"""The start page of MLflow's server, and what is run where MLflow has other names."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from autoprec.tracking import page


def test_the_page_opens_with_the_assistant_closed_and_keeps_what_a_reader_chose() -> None:
    html = page.opened("<!doctype html><head><title>MLflow</title></head><body></body>")
    script = html[html.index("<script>") : html.index("</script>")]
    assert html.index("<script>") < html.index("<title>"), "before MLflow's own scripts"
    assert "getItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1')??localStorage.setItem" in script
    assert page.opened("no head") == "no head"


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_another_mlflow_is_run_as_its_users_run_it(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def absent() -> Any:
        raise error

    class ExecutedError(Exception):
        pass

    def execv(path: str, command: list[str]) -> None:
        raise ExecutedError(command)

    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "sqlite:///x.db")
    monkeypatch.setenv("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "")
    monkeypatch.setattr(page, "_application", absent)
    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(ExecutedError) as caught:
        page.main(5000)
    # its job queue would leave a folder in shared memory each time
    assert os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert caught.value.args[0][:5] == [sys.executable, "-P", "-m", "mlflow", "server"]
