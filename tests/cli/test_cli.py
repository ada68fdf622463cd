"""The door itself: help, version, suggestions, exit codes, signals, a closed pipe."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from autoprec import __version__
from autoprec import cli as door
from autoprec.cli import COMMANDS, cli
from autoprec.errors import NoSpaceError, ScriptError, StudyError
from autoprec.tracking.study import About, TrackedStudy
from tests.cli.helpers import autoprec

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = [path for path in sys.path if path.endswith("site-packages")]


def in_a_process(*args: str, **settings: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "autoprec", *args]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, check=False, **settings)  # type: ignore[call-overload,no-any-return]


def test_help_lists_every_command() -> None:
    found = autoprec("--help")
    assert found.code == 0
    for name, (_, line) in COMMANDS.items():
        assert f"  {name} " in found.out
        assert line in " ".join(found.out.split())


def test_help_imports_click_and_nothing_else_that_is_installed() -> None:
    """Start-up time is the number of modules read: counted, since seconds differ by machine and by what else runs."""
    code = (
        "import sys\nfrom autoprec.cli import cli\n"
        "try: cli.main(['--help'])\nexcept SystemExit: pass\n"
        "packages = {name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)\n"
        "files = {name for name in packages if getattr(sys.modules.get(name), '__file__', None)}\n"
        "print(*sorted(files), file=sys.stderr)\n"
        "print(len(sys.modules), file=sys.stderr)"
    )
    isolated = [sys.executable, "-S", "-c", f"import sys\nsys.path[:0] = {[str(ROOT), *SITE]!r}\n{code}"]
    found = subprocess.run(isolated, capture_output=True, text=True, cwd=ROOT, check=True)
    packages, modules = found.stderr.splitlines()
    assert packages == "autoprec click"
    assert int(modules) <= 160  # 117 with Python 3.11; torch alone is more than a thousand


def test_the_help_of_a_command_loads_nothing_that_only_its_work_needs() -> None:
    """NumPy, what is built on it, and the database: a third of what a command took to start."""
    code = (
        "import importlib, sys\nfrom autoprec.cli import COMMANDS\n"
        "for module, _ in COMMANDS.values():\n"
        "    importlib.import_module('autoprec.cli.' + module.partition(':')[0])\n"
        "    heavy = {'numpy', 'optuna', 'sqlalchemy', 'torch', 'mlflow'} & sys.modules.keys()\n"
        "    if heavy: sys.exit(f'{module} imports {heavy}')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr


def test_version() -> None:
    assert autoprec("--version").out == f"autoprec {__version__}\n"


@pytest.mark.parametrize(("typed", "meant"), [("serch", "search"), ("exprot", "export"), ("Show", "show")])
def test_a_mistyped_command_is_answered_with_the_nearest(typed: str, meant: str) -> None:
    found = autoprec(typed)
    assert found.code == 2
    assert f"did you mean '{meant}'?" in found.err
    assert found.out == ""


def test_a_mistyped_option_is_answered_with_the_nearest() -> None:
    found = autoprec("show", "--jsn", "x.yaml")
    assert found.code == 2
    assert "--json" in found.err


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (ScriptError("it raised", where="train.py", fix="mend it"), 4, "error: train.py: it raised\n  fix: mend it"),
        (StudyError("locked"), 5, "error: locked"),
        (NoSpaceError("full"), 6, "error: full"),
        (OSError(28, "No space left on device", "/x/study.db"), 6, "/x/study.db: no space left"),
        (OSError(24, "Too many open files"), 1, "error: too many open files\n  fix: raise the limit"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (SystemExit(7), 7, ""),
        (click.UsageError("no"), 2, "no"),
        (ZeroDivisionError("a bug"), 1, "defect of AutoPrec"),
    ],
)
def test_errors_become_exit_codes(monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, says: str) -> None:
    @click.command("boom")
    def boom() -> None:
        raise raised

    monkeypatch.setattr(door.LazyGroup, "get_command", lambda *_: boom)
    found = autoprec("show")
    assert found.code == code
    assert says in found.err
    assert ("Traceback" in found.err) == isinstance(raised, ZeroDivisionError)


def test_debug_adds_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPREC_DEBUG", "1")
    found = autoprec("show", tmp_path / "none.yaml")
    assert found.code == 2
    assert "Traceback" in found.err


def test_a_number_that_a_command_returns_is_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door.LazyGroup, "get_command", lambda *_: click.Command("three", callback=lambda: 3))
    assert autoprec("show").code == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_unwind_and_give_their_exit_code(tmp_path: Path, number: int, code: int) -> None:
    left = tmp_path / "left"
    program = (
        "import click, time, autoprec.cli as door\n"
        "def wait():\n"
        "    try:\n"
        "        print('ready', flush=True); time.sleep(60)\n"
        f"    finally: open({str(left)!r}, 'w').close()\n"
        "door.LazyGroup.get_command = lambda *_: click.Command('wait', callback=wait)\n"
        "door.cli.main(['show'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=600)
    assert process.returncode == code
    assert left.exists(), "cleaning up was skipped"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = f"{sys.executable} -m autoprec show --schema policy | head -1"
    found = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert found.stdout == "{\n"
    assert found.stderr == ""
    assert found.returncode == 0


def test_running_as_a_module_is_running_the_command() -> None:
    found = in_a_process("show", "nowhere.yaml")
    assert found.returncode == 2
    assert "nowhere.yaml: no such file" in found.stderr


def test_snake_case_is_accepted() -> None:
    seen: list[int] = []
    group = click.Group("g", context_settings=cli.context_settings)
    group.add_command(
        click.Command("c", params=[click.Option(["--max-n"], type=int)], callback=lambda max_n: seen.append(max_n))
    )
    group.main(["c", "--max_n", "3"], standalone_mode=False)
    assert seen == [3]


def test_a_command_works_with_its_streams_closed() -> None:
    line = f"exec {sys.executable} -m autoprec lint /nowhere.yaml >&- 2>&- <&-"
    assert subprocess.run(line, shell=True, cwd=ROOT, check=False).returncode == 2


def test_streams_that_are_open_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    monkeypatch.setattr(door.os, "open", lambda *args: opened.append(args))
    door._open_standard_streams()
    assert opened == []


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    found = autoprec("run", "train.py")
    monkeypatch.undo()
    assert found.code == 2
    assert "working directory has been removed" in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize("address", ["http://h:99999", "http://user:pass/word@host", "http://[::1"])
@pytest.mark.parametrize("command", ["ui", "search"])
def test_an_address_that_is_none_is_told_without_its_password(
    address: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.chdir(tmp_path)
    TrackedStudy(tmp_path / "autoprec-runs" / "train").save_about(About("train"))
    (tmp_path / "train.py").touch()
    found = autoprec(command, *(["train.py"] if command == "search" else []))
    assert found.code == 2
    assert "MLFLOW_TRACKING_URI has no valid host and port" in found.err
    assert "pass" not in found.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["search", "-m", ""], "-m needs a module name"),
        (["run", "-m", "."], "-m needs a module name"),
        (["ui", "--port", "99999"], "not in the range"),
        (["ui", "--port", "abc"], "not a valid integer"),
        (["search", "--storage", "postgresql://h:abc/db", "train.py"], "not a database URL"),
    ],
)
def test_nonsense_is_refused_with_a_message(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    found = autoprec(*words)
    assert (found.code, "Traceback" in found.err) == (2, False)
    assert says in found.err
