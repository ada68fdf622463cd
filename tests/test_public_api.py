"""The public surface: exactly these names, loaded lazily, documented, and importable without anything heavy."""

import dataclasses
import doctest
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autoprec
from autoprec.errors import ScriptError, UsageError
from autoprec.tuning.options import OPTIONS, SearchOptions
from tests.cli.helpers import short_duels

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN = ("torch", "optuna", "mlflow", "numpy", "pydantic", "yaml", "click", "rich")


def in_a_fresh_interpreter(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout


def test_the_surface_is_sorted_and_complete() -> None:
    assert autoprec.__all__ == sorted(autoprec.__all__)
    assert dir(autoprec) == autoprec.__all__
    for name in autoprec.__all__:
        assert getattr(autoprec, name) is not None


def test_the_surface_is_exactly_this() -> None:
    names = ["AutoPrecError", "Guard", "Policy", "Session", "__version__", "load", "register", "report", "search"]
    assert autoprec.__all__ == names


@pytest.mark.parametrize("name", [name for name in autoprec.__all__ if not name.startswith("__")])
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(autoprec, name)
    assert inspect.getdoc(value)
    pages = "".join(path.read_text(encoding="utf-8") for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    assert f"autoprec.{name}" in pages


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", [name for name in autoprec.__all__ if not name.startswith("__")])
def test_the_example_of_every_public_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    short_duels(monkeypatch)
    (found,) = doctest.DocTestFinder(recurse=False).find(getattr(autoprec, name), name, module=False, globs={})
    assert found.examples
    assert doctest.DocTestRunner().run(found).failed == 0


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import autoprec, sys; print([name for name in {FORBIDDEN!r} if name in sys.modules])"
    assert in_a_fresh_interpreter(code).strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'serch'"):
        autoprec.serch  # noqa: B018


def test_the_version_is_the_one_of_the_distribution() -> None:
    assert autoprec.__version__ == re.findall(r'"(\d+\.\d+\.\d+)"', (ROOT / "autoprec" / "_version.py").read_text())[0]


def test_every_option_of_a_search_is_a_typed_keyword_as_the_table_has_it() -> None:
    """The signature stays written out, for type checkers and editors: the second place of an option."""
    parameters = inspect.signature(autoprec.search).parameters
    table = {one.name: (one.default, str(one.type)) for one in dataclasses.fields(SearchOptions) if one.name in OPTIONS}
    table["max_divergence"] = (OPTIONS["max_divergence"].default, "float | str")  # "25%" is a share that is meant
    table["max_change"] = (None, "float | str | None")
    spelled = {n: (p.default, p.annotation) for n, p in parameters.items() if n not in ("script", "progress")}
    assert spelled == table
    described = inspect.getdoc(autoprec.search) or ""
    assert [name for name in parameters if f"    {name}: " not in described] == []


@pytest.mark.parametrize(
    ("script", "options", "error", "says"),
    [
        ("train.py", {"trails": 3}, TypeError, "trails"),
        ("train.py", {"trials": 0}, UsageError, "--trials 0 is too small"),
        ("nowhere.py", {}, UsageError, "nowhere.py"),
        ([], {}, UsageError, "no training script"),
    ],
)
def test_a_search_from_python_refuses_what_the_command_refuses(
    script: object, options: dict[str, object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        autoprec.search(script, track=False, **options)  # type: ignore[arg-type]


def test_every_error_can_be_caught_as_one() -> None:
    assert issubclass(ScriptError, autoprec.AutoPrecError)


def test_the_steps_of_a_trial_have_one_default() -> None:
    """Where it is 21, it is 21 for the command, the function and the options: runs are timed longer by it."""
    code = (
        "import autoprec.trial.protocol as protocol\n"
        "protocol.STEPS = 21\n"
        "import inspect, autoprec\n"
        "from autoprec.cli.scripts.search import search\n"
        "from autoprec.tuning.options import OPTIONS, SearchOptions\n"
        "shown = next(one.default for one in search.params if one.name == 'steps')\n"
        "print(shown, inspect.signature(autoprec.search).parameters['steps'].default, SearchOptions(('a',)).steps)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["21", "21", "21"]
