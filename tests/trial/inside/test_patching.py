"""Actions run right after a module was executed, each time, and not when its spec is only looked for."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from autoprec.trial.inside.patching import after_import


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "late_module", raising=False)
    return "late_module"


def test_an_action_runs_when_the_module_was_executed(module: str) -> None:
    seen: list[int] = []
    after_import({module: [lambda found: seen.append(found.value), lambda found: setattr(found, "value", 2)]})
    assert importlib.util.find_spec(module) is not None
    assert not seen
    assert importlib.import_module(module).value == 2
    assert seen == [1]


def test_a_module_that_is_reloaded_or_imported_anew_is_changed_again(module: str) -> None:
    for before in (True, False):  # loaded by the script before, and after
        if before:
            importlib.import_module(module)
        after_import({module: [lambda found: setattr(found, "value", found.value + 1)]})
        found = importlib.import_module(module)
        assert found.value == 2
        assert importlib.reload(found).value == 2
        assert importlib.reload(found).value == 2
        del sys.modules[module]
        assert importlib.import_module(module).value == 2
        del sys.modules[module], sys.meta_path[0]


def test_two_that_wait_for_one_module_both_hear_of_it(module: str) -> None:
    seen: list[str] = []
    after_import({module: [lambda _: seen.append("first")]})
    after_import({module: [lambda _: seen.append("second")]})
    importlib.import_module(module)
    assert seen == ["first", "second"]


def test_a_loaded_module_is_not_waited_for(module: str) -> None:
    importlib.import_module(module)
    seen: list[int] = []
    after_import({module: [lambda found: seen.append(found.value)]})
    assert seen == [1]


def test_the_collector_waits_while_a_module_is_executed(module: str, tmp_path: Path) -> None:
    (tmp_path / "late_module.py").write_text("import gc\nvalue = gc.get_threshold()[0]\n")
    before = gc.get_threshold()
    after_import({module: []})
    assert importlib.import_module(module).value == 0
    assert gc.get_threshold() == before
