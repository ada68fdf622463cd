"""The day's script: what one machine measured, another goes on from; a kit is unpacked; no part is cached for ever."""

from __future__ import annotations

import tarfile
from pathlib import Path

from benchmarks import gpu_end_to_end, gpu_run


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
        scripts = [word for word in words if word.startswith("benchmarks/")]
        assert all((gpu_run.ROOT / script).is_file() for script in scripts)
    budget = gpu_run.commands(tmp_path, 480.0)["end_to_end"]
    assert float(budget[budget.index("--budget") + 1]) <= 0.6 * 480


def test_a_rehearsal_runs_the_same_programs_without_a_gpu(tmp_path: Path) -> None:
    real, rehearsed = gpu_run.commands(tmp_path, 480.0), gpu_run.commands(tmp_path, 480.0, rehearse=True)
    assert list(real) == list(rehearsed) == list(gpu_run.PARTS)
    assert all(rehearsed[name][:3] == words[:3] for name, words in real.items())
    assert "gpu" in real["tests"]
    assert "gpu" not in rehearsed["tests"]


def test_a_missing_package_is_asked_for_again(tmp_path: Path) -> None:
    parts, calls = gpu_end_to_end.Parts(tmp_path), []

    def lacking() -> dict[str, object]:
        calls.append("lacking")
        return {"failed": "ModuleNotFoundError: No module named 'transformer_engine'"}

    assert parts.get("te", lacking) == parts.get("te", lacking)
    assert parts.get("oom", lambda: {"failed": "CUDA out of memory"}) == parts.get("oom", dict)
    assert len(calls) == 2
