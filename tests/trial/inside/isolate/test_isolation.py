"""The three nets together, in a process of its own: no file of the user's is changed, whoever writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoprec.trial.environment import trial_environment
from autoprec.trial.inside.isolate.isolation import _split
from autoprec.trial.inside.isolate.landlock import available
from autoprec.trial.processes import MADE

from .test_namespace import allowed
from .test_overlay import snapshot

SCRIPT = """
import os, pathlib, subprocess, sys
pathlib.Path("early.txt").write_text("before torch")
assert pathlib.Path("early.txt").exists()
child = "import pathlib; assert pathlib.Path('early.txt').read_text(); pathlib.Path('child.txt').write_text('x')"
subprocess.run([sys.executable, "-c", child], check=True)
assert pathlib.Path("child.txt").read_text() == "x"
os.system("echo changed > precious.txt; rm -rf data; mkdir -p made")
from autoprec.trial.inside.isolate.isolation import programs
print("started", programs())
import tempfile
with tempfile.NamedTemporaryFile() as stream:
    stream.write(b"x")
if os.path.isdir("made") and pathlib.Path("precious.txt").read_text() == "changed\\n" and not os.path.exists("data"):
    print("made, precious changed, data gone")
print("reached the end")
"""


FORKS = """
import os, tempfile
from pathlib import Path
from autoprec.trial.inside.isolate import isolation
overlay = isolation._state["overlay"]
tempfile.mkdtemp()
isolation.before_forks()
for number in range(3):
    if os.fork() == 0:
        isolation.add_layer(overlay, Path(f"{overlay.layers[0]}-{number}"))
        tempfile.mkdtemp()
        print(len(overlay.mounted), len(overlay._rules), flush=True)
        os._exit(0)
    os.wait()
"""


def isolated(text: str, folder: Path, *, mounts: bool) -> str:
    """Run a script under the nets and return what it prints."""
    for name in ("user", "private", "tmp"):
        (folder / name).mkdir()
    (folder / "user" / "train.py").write_text(text)
    config = folder / "private" / "trial.json"
    settings = {"mode": "trial", "cwd": str(folder / "user"), "script": "train.py", "private": str(folder / "private")}
    config.write_text(json.dumps(settings | {"run_dir": str(folder / "run")}))
    env = trial_environment(config, "m", folder / "private") | {"TMPDIR": str(folder / "tmp")}
    if not mounts:
        env["AUTOPREC_TRIAL_MOUNTED"] = ""
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder / "user", env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("mounts", [True, False], ids=["mounts", "no mounts"])
def test_what_earlier_forks_left_among_temporary_files_is_not_mounted_again(mounts: bool, tmp_path: Path) -> None:
    counts = isolated(FORKS, tmp_path, mounts=mounts).splitlines()
    assert len(counts) == 3
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize("mounts", [True, False], ids=["mounts", "no mounts"])
def test_temporary_directories_of_the_script_are_listed_for_the_driver(mounts: bool, tmp_path: Path) -> None:
    """wandb makes two when it is imported; a trial is killed before it removes them."""
    made = isolated("import tempfile; print(tempfile.mkdtemp()); tempfile.mkdtemp(dir='.')", tmp_path, mounts=mounts)
    assert (tmp_path / "private" / MADE).read_text() == made


@pytest.mark.parametrize("mounts", [True, False], ids=["mounts", "no mounts"])
@pytest.mark.parametrize("where", ["inside", "beside", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME"])
def test_a_script_and_its_children_change_nothing(where: str, mounts: bool, tmp_path: Path) -> None:
    user, private = tmp_path / "user", tmp_path / "private"
    (user / "data").mkdir(parents=True)
    (user / "data" / "a.txt").write_text("a")
    (user / "precious.txt").write_text("precious")
    (user / "train.py").write_text(SCRIPT)
    private.mkdir()
    (tmp_path / "tmp").mkdir()
    before = snapshot(user)
    config = private / "trial.json"
    settings = {"mode": "trial", "cwd": str(user), "script": "train.py", "private": str(private)}
    config.write_text(json.dumps(settings | {"run_dir": str(tmp_path / "run")}))
    env = trial_environment(config, "m", private)
    env["TMPDIR"] = str(tmp_path if where == "inside" else tmp_path / "tmp")
    if where.isupper():  # on a cluster it is the job's working directory
        env[where] = str(user)
    if not mounts:
        env["AUTOPREC_TRIAL_MOUNTED"] = ""
    done = subprocess.run([sys.executable, "train.py"], cwd=user, env=env, capture_output=True, text=True, check=False)
    assert "reached the end" in done.stdout, done.stderr
    held = mounts and allowed()
    assert ("started []" if held else "started ['echo']") in done.stdout, "what is refused is named beforehand"
    if held:
        assert "made, precious changed, data gone" in done.stdout
    elif not available():
        pytest.skip("this kernel has no Landlock: a shell is not held back")
    assert snapshot(user) == before


CACHES = """
import ctypes, os
libc = ctypes.CDLL(None)
for name in (".triton/cache", ".deep_gemm/cache", ".nv/ComputeCache", ".cache/x"):  # as C++ libraries make them
    assert libc.mkdir(os.path.join(os.path.expanduser("~"), name).encode(), 0o700) == 0, name
assert libc.mkdir(os.path.join(os.path.expanduser("~"), "other").encode(), 0o700) != 0
print("reached the end")
"""


@pytest.mark.parametrize("mounts", [True, False], ids=["mounts", "no mounts"])
def test_on_a_new_machine_compilers_have_their_caches(mounts: bool, tmp_path: Path) -> None:
    if not (available() or (mounts and allowed())):
        pytest.skip("this kernel has neither")
    for folder in ("user", "private", "home", "tmp", "modules/triton", "modules/deep_gemm"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "user" / "train.py").write_text(CACHES)
    config = tmp_path / "private" / "trial.json"
    settings = {"mode": "trial", "cwd": str(tmp_path / "user"), "script": "train.py"}
    settings |= {"private": str(tmp_path / "private"), "run_dir": str(tmp_path / "run")}
    config.write_text(json.dumps(settings))
    env = trial_environment(config, "m", tmp_path / "private")
    env |= {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    env["PYTHONPATH"] += f"{os.pathsep}{tmp_path / 'modules'}"
    env.pop("XDG_CACHE_HOME", None)
    if not mounts:
        env["AUTOPREC_TRIAL_MOUNTED"] = ""
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path / "user", env=env, capture_output=True, text=True, check=False
    )
    assert "reached the end" in done.stdout, done.stderr


def test_what_lies_beside_a_guarded_directory_is_free(tmp_path: Path) -> None:
    for name in ("other", "work/user", "work/data"):
        (tmp_path / name).mkdir(parents=True)
    crowded, beside = _split([str(tmp_path), "/dev"], [str(tmp_path / "work" / "user")])
    assert set(crowded) == {str(tmp_path), str(tmp_path / "work")}
    assert set(beside) == {str(tmp_path / "other"), str(tmp_path / "work" / "data")}
    assert _split(["/dev"], [os.sep + "home"]) == ([], [])
