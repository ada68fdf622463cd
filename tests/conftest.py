"""Shared by all tests: one thread, no network, no user's settings, and GPU tests skipped with the reason."""

import contextlib
import gc
import importlib
import os
import shutil
import signal
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Inductor compiles, and loads into a new process with PyTorch, a library for each instruction set before its first
# kernel: 13 s in every process that compiles.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest
from hypothesis import settings

from tests import heap
from tests.schedule import Recorder, longest_first
from tests.stores import ask_less

# A busy machine is not a reason to fail, and the same commit gives the same verdict.
settings.register_profile("autoprec", deadline=None, derandomize=True)
settings.load_profile("autoprec")

# A suite started by nohup, or in the background of a script, inherits ignored signals, and so would all it starts.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Of a power cut no test hears, and a search waits some seventy times for the disk: for seconds where that is busy.
os.fsync = lambda _file: None
_connect = sqlite3.connect


def _connect_without_waiting(*args: Any, **kwargs: Any) -> Any:
    connection = _connect(*args, **kwargs)
    with contextlib.suppress(sqlite3.Error):  # of a damaged file the test hears, not this
        connection.execute("pragma synchronous = off")
    return connection


sqlite3.connect = sqlite3.dbapi2.connect = _connect_without_waiting

#: Settings of the person who runs the tests must not reach them.
FOREIGN = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "OPTUNA_STORAGE", "AUTOPREC_DEBUG", "AUTOPREC_SPEC")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOREIGN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """The scripts that AutoPrec starts are forks of this process, which has PyTorch; see tests/warm.py."""
    from tests.warm import warm_scripts

    with warm_scripts():
        yield


@pytest.fixture
def whole_heap() -> Iterator[None]:
    """A test of what is asked of the collector after a freeze sees all that there is."""
    heap.known()
    yield
    heap.set_aside()


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """A test that changes what compiled plans depend on has its own; layers of a process share them."""
    from autoprec.numerics.plan import _compiled

    _compiled.cache_clear()
    yield
    _compiled.cache_clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json (tests/schedule.py)")


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0")[-1] in "13579":
        _collect_from_the_end(config)
    if "gpu" not in config.option.markexpr and shutil.which("nvidia-smi"):
        # Scripts are forks of the processes that test, and autograd starts a thread per GPU, which a fork has not.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def _collect_from_the_end(config: pytest.Config) -> None:
    """Let this process collect the whole suite in the other direction: what one has compiled the other finds."""
    tests = Path(__file__).parent
    if [Path(name).resolve() for name in config.args] == [tests]:
        found = [path for path in tests.iterdir() if path.match("test_*.py") or (path / "__init__.py").is_file()]
        config.args = sorted(map(str, found), reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """A million objects are made and all stay: the collector would only walk them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """A build with CUDA starts such threads without a GPU as well, if its first backward is one that Dynamo traced."""
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        torch.ones((), requires_grad=True).backward()
    if torch is not None:
        importlib.import_module("torch._dynamo")  # as the first optimizer does: 300,000 objects to be set aside
    if "optuna" in sys.modules:
        ask_less()
    gc.collect()
    heap.set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """What the tests of a file have imported is set aside before the next file."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        heap.set_aside_again()
    return done


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    longest_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU and -m gpu"))
