"""What a script says of precision is read from its source, without running it."""

from __future__ import annotations

import json
from pathlib import Path

from autoprec.tuning.lint.source import settings_of


def kinds(folder: Path, *words: str) -> set[tuple[str, str]]:
    return {(one.kind, one.value) for one in settings_of(words, folder)}


def test_modules_beside_the_script_are_read_once_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from pkg import model\nfrom pkg.model import Net\nimport os, model_b\n")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    (tmp_path / "pkg" / "model.py").write_text("import train\nfrom . import more\nnet.bfloat16()\n")
    (tmp_path / "pkg" / "more.py").write_text("net.half()\n")
    (tmp_path / "model_b.py").write_text("torch.backends.cuda.matmul.allow_tf32 = True\n")
    (tmp_path / "unused.py").write_text("net.half()\n")
    found = settings_of(["train.py", "--lr", "1"], tmp_path)
    assert sorted(one.place for one in found) == ["model_b.py:1", "pkg/model.py:3", "pkg/more.py:1"]


def test_autocast_that_is_off_or_whose_dtype_is_not_written_out(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("autocast('cuda', enabled=False)\nautocast('cuda', dtype=args.dtype)\n")
    assert kinds(tmp_path, "t.py") == {("autocast", "")}


def test_configurations_among_the_arguments(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("TrainingArguments(bf16=True, fp16=False)\n")
    (tmp_path / "ds.json").write_text(json.dumps({"fp16": {"enabled": True}, "bf16": {"enabled": False}}))
    (tmp_path / "acc.yaml").write_text("mixed_precision: bf16\n")
    (tmp_path / "bad.json").write_text("{")
    found = kinds(tmp_path, "t.py", "--deepspeed", "ds.json", "acc.yaml", "bad.json")
    assert found == {("trainer", "bf16"), ("trainer", "fp16"), ("scaler", "deepspeed")}


def test_a_source_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("def (\n")
    (tmp_path / "u.py").write_bytes(b"\xff\xfe\x00")
    assert settings_of(["t.py", "u.py", "-m", "pkg"], tmp_path) == []
