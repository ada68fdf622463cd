"""The day's script: what one machine measured, another goes on from; a kit is unpacked; no part is cached for ever."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.gpu import end_to_end as gpu_end_to_end
from benchmarks.gpu import run as gpu_run


def test_what_is_packed_is_gone_on_from(tmp_path: Path) -> None:
    first, second, archive = tmp_path / "a", tmp_path / "b", tmp_path / "parts.tar.gz"
    (first / "end_to_end").mkdir(parents=True)
    (first / "tests.json").write_text('{"code": 0}')
    (first / "end_to_end" / "x.json").write_text("1")
    gpu_run.pack(first, archive)
    second.mkdir()
    (second / "tests.json").write_text("its own")
    gpu_run.unpack(archive, second)
    assert (second / "tests.json").read_text() == "its own"
    assert (second / "end_to_end" / "x.json").read_text() == "1"


def test_where_the_driver_s_tool_is_missing_torch_names_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "ask_driver", lambda _fields: "NVIDIA H100")
    assert gpu_run.gpu_name() == "NVIDIA H100"
    monkeypatch.setattr(gpu_run, "ask_driver", lambda _fields: "")
    monkeypatch.setattr(
        gpu_run.subprocess, "run", lambda words, **_: SimpleNamespace(stdout="NVIDIA H200\n" if "-c" in words else "")
    )
    assert gpu_run.gpu_name() == "NVIDIA H200"


def test_a_kit_is_unpacked_once(tmp_path: Path) -> None:
    bundle, into = tmp_path / "bundle", tmp_path / "kit"
    assert gpu_run.unpack_kit(tmp_path, into) == ""
    (tmp_path / "site" / "transformer_engine").mkdir(parents=True)
    bundle.mkdir()
    with tarfile.open(bundle / "te_kit.tar.xz", "w:xz") as stream:
        stream.add(tmp_path / "site", arcname="site")
    path = gpu_run.unpack_kit(bundle, into)
    assert (Path(path) / "transformer_engine").is_dir()
    assert gpu_run.unpack_kit(bundle, into) == path


def test_a_search_gets_less_than_the_whole_call_and_every_part_starts_a_file_that_is_there(tmp_path: Path) -> None:
    for name, words in gpu_run.commands(tmp_path, 480.0).items():
        assert name in gpu_run.PARTS
        files = [word for word in words if word.startswith(("benchmarks/", "tests/"))]
        assert all((gpu_run.ROOT / file).exists() for file in files)
    budget = gpu_run.commands(tmp_path, 400.0)["gpt2"]
    assert float(budget[budget.index("--budget") + 1]) == 0.8 * 400


def test_a_rehearsal_runs_the_same_programs_without_a_gpu(tmp_path: Path) -> None:
    real, rehearsed = gpu_run.commands(tmp_path, 480.0), gpu_run.commands(tmp_path, 480.0, rehearse=True)
    assert list(real) == list(rehearsed) == list(gpu_run.PARTS)
    assert all(rehearsed[name][:3] == words[:3] for name, words in real.items())
    assert "gpu" in real["tests"]


def test_tests_that_need_a_gpu_are_all_in_the_files_that_the_day_runs() -> None:
    marked = {
        path.relative_to(gpu_run.ROOT).as_posix()
        for path in (gpu_run.ROOT / "tests").rglob("test_*.py")
        if re.search(r"^pytestmark = pytest\.mark\.gpu|^@pytest\.mark\.gpu", path.read_text(), re.MULTILINE)
    }
    run = tuple(gpu_run.GPU_TESTS)
    assert marked
    assert [name for name in marked if not name.startswith(run)] == []


def test_a_bundle_is_installed_once_and_where_there_is_none_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_run.install_bundle(tmp_path / "absent", tmp_path / "site") == ""
    (tmp_path / "x-1.0-py3-none-any.whl").touch()
    asked: list[list[str]] = []

    def pip(words: list[str], *, check: bool) -> None:
        asked.append(words)
        Path(words[words.index("--target") + 1]).mkdir()

    monkeypatch.setattr(gpu_run.subprocess, "run", pip)
    for _ in range(2):
        assert gpu_run.install_bundle(tmp_path, tmp_path / "site") == str(tmp_path / "site")
    assert len(asked) == 1
    assert "--no-index" in asked[0]


def test_a_part_is_not_begun_with_less_time_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_run, "gpu_name", lambda: "a GPU")
    monkeypatch.setattr(gpu_run, "run_part", lambda *_, **__: pytest.fail("begun"))
    monkeypatch.setattr(gpu_run, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    words = ["--limit", "100", "--out", str(tmp_path / "parts"), "--bundle", str(tmp_path / "no"), "--parts", "tests"]
    assert gpu_run.main(words) == 0
    assert "call it again" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        gpu_run.main([*words[:-1], "test"])


def test_a_missing_package_is_asked_for_again(tmp_path: Path) -> None:
    parts, calls = gpu_end_to_end.Parts(tmp_path), []

    def lacking() -> dict[str, object]:
        calls.append("lacking")
        return {"failed": "ModuleNotFoundError: No module named 'transformer_engine'"}

    assert parts.get("te", lacking) == parts.get("te", lacking)
    assert parts.get("oom", lambda: {"failed": "CUDA out of memory"}) == parts.get("oom", dict)
    assert len(calls) == 2


LACKING = "raise ModuleNotFoundError(\"No module named 'transformer_engine'\")"
STARTS_ANOTHER = (
    "import subprocess, sys, time; from pathlib import Path;"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']);"
    "Path(sys.argv[1]).write_text(str(p.pid)); time.sleep(60)"
)
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def test_a_part_that_hangs_dies_or_lacks_a_package_costs_itself_alone_and_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, pid = tmp_path / "parts", tmp_path / "pid"
    words = {"tests": "print('passed')", "doctor": LACKING, "fidelity": STARTS_ANOTHER, "gpt2": DIES}

    def commands(folder: Path, limit: float, *, rehearse: bool = False) -> dict[str, list[str]]:
        return {name: [sys.executable, "-S", "-c", text, str(pid)] for name, text in words.items()}

    monkeypatch.setattr(gpu_run, "commands", commands)
    monkeypatch.setattr(gpu_run, "PART_LIMIT", 1.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    some = ["--rehearse", "--parts", ",".join(words)]
    assert gpu_run.main([*some, "--out", str(out)]) == 1
    (report,) = out.glob("*rehearsal*.json")
    found = {part["name"]: part for part in json.loads(report.read_text())["parts"]}
    assert found["tests"]["code"] == 0
    assert "transformer_engine" in found["doctor"]["output"]
    assert found["fidelity"]["unfinished"]
    assert found["gpt2"]["code"] == -9
    for _ in range(50):  # what the part that hung had started is ended with it
        if not Path(f"/proc/{pid.read_text()}/cmdline").exists() or _is_zombie(pid.read_text()):
            break
        time.sleep(0.05)
    else:
        pytest.fail("a process of a part that was ended goes on")
    with tarfile.open(tmp_path / "parts.tar.gz") as stream:
        names = stream.getnames()
    assert "./tests.json" in names
    assert {"./doctor.log", "./fidelity.log", "./gpt2.log"} <= set(names)
    assert not {"./doctor.json", "./fidelity.json", "./gpt2.json"} & set(names)

    words |= dict.fromkeys(("doctor", "fidelity", "gpt2"), "print('now it is there')")
    words["tests"] = "raise SystemExit('was done, and is run again')"
    assert gpu_run.main([*some, "--out", str(tmp_path / "other"), "--pack", str(tmp_path / "parts.tar.gz")]) == 0
    assert all((tmp_path / "other" / f"{name}.json").exists() for name in words)


def _is_zombie(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        assert gpu_run.ended([str(tmp_path / "nothing")], dict(os.environ), log, 5.0) == 127
    assert "could not be started" in (tmp_path / "log").read_text()


def test_what_is_kept_of_the_device_is_packed_with_the_parts(tmp_path: Path) -> None:
    tell = "import os; print(os.environ['XDG_CACHE_HOME'])"
    done = gpu_run.run_part("doctor", [sys.executable, "-S", "-c", tell], tmp_path, 60.0, on_gpu=False)
    assert done["output"].strip() == str(tmp_path / "cache")


def test_parts_that_test_do_not_stop_at_the_first_warning_of_a_build_with_cuda(tmp_path: Path) -> None:
    found = gpu_run.commands(tmp_path, 60.0)
    for part in ("tests", "conformance"):
        assert found[part][found[part].index("-W") + 1] == "default"


def test_the_report_travels_with_the_parts_and_begins_with_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_run, "gpu_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(gpu_run, "ask_driver", lambda _fields: "")
    monkeypatch.setattr(gpu_run, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_run, "commands", lambda *_, **__: {"doctor": [sys.executable, "-S", "-c", "print(1)"]})
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    out = tmp_path / "parts"
    assert gpu_run.main(["--out", str(out), "--bundle", str(tmp_path / "no"), "--parts", "doctor"]) == 0
    with tarfile.open(tmp_path / "parts.tar.gz") as stream:
        (name,) = (name for name in stream.getnames() if name.endswith("h100-80gb-hbm3.md"))
        text = stream.extractfile(name).read().decode()  # type: ignore[union-attr]
    assert text == (tmp_path / "benchmarks" / "results" / Path(name).name).read_text()
    assert text.index("| search of gpt2-124m | <= 480 s | - | not measured: ") < text.index("## doctor")


def test_versions_are_those_that_the_parts_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "transformer_engine-2.20.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert gpu_run.version("transformer-engine") == gpu_run.version("transformer_engine") == "2.20.2"
    assert gpu_run.version("nothing-of-this-name") == "absent"


def test_a_kit_that_was_unpacked_in_part_is_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    with tarfile.open(tmp_path / "te_kit.tar.xz", "w:xz") as stream:
        stream.add(tmp_path / "site", arcname="site")
    with monkeypatch.context() as broken:
        broken.setattr(tarfile.TarFile, "extractall", lambda _self, path, **_: _interrupted(Path(path)))
        with pytest.raises(KeyboardInterrupt):
            gpu_run.unpack_kit(tmp_path, tmp_path / "kit")
    assert Path(gpu_run.unpack_kit(tmp_path, tmp_path / "kit")).is_dir()


def _interrupted(path: Path) -> None:
    (path / "site").mkdir(parents=True)
    raise KeyboardInterrupt


def test_the_part_before_is_not_taken_for_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "SETTLES_S", 0.0)
    fields = ", ".join(["0"] * len(gpu_run.QUERY))
    said = iter([f"{fields}, 98 %", "0 %", f"{fields}, 98 %", "97 %"])
    monkeypatch.setattr(gpu_run, "ask_driver", lambda _fields: next(said))
    monkeypatch.setattr(gpu_run.Conditions, "parse", lambda _state: SimpleNamespace(slowed=()))
    assert gpu_run.throttled() == ""
    assert gpu_run.throttled() == "somebody else uses 97 % of the GPU"


def test_what_a_search_is_compared_with_comes_after_it_and_each_row_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def training(_model: str, precision: str, *_: object) -> dict[str, object]:
        asked.append(precision + ("+policy" if _[-1] else ""))
        if precision == "te-current":
            raise KeyboardInterrupt
        return {"items_per_s": 2.0, "step_ms": 1.0, "memory_gb": 1.0, "losses": [1.0, 0.5]}

    def search(*_: object) -> dict[str, object]:
        asked.append("search")
        return {"policy_file": "/gone/tiny.yaml", "wall_s": 3.0, "trials": {"complete": 2}, "reason": "because"}

    monkeypatch.setattr(gpu_end_to_end, "has_gpu", lambda: False)
    monkeypatch.setattr(gpu_end_to_end, "training", training)
    monkeypatch.setattr(gpu_end_to_end, "search", search)
    words = ["--models", "tiny", "--presets", "bf16,torchao-rowwise,te-current", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *words])
    with pytest.raises(KeyboardInterrupt):
        gpu_end_to_end.main()
    assert asked == ["bf16", "search", "bf16+policy", "torchao-rowwise", "te-current"]
    told = (tmp_path / "tiny.md").read_text()
    assert "| AutoPrec | 2 | 1.000x | 1.00 | 0.000% |" in told
    assert "| torchao-rowwise | 2 |" in told
