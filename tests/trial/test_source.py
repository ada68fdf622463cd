"""Which files a command is made of, and what makes it another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoprec.trial.command import ScriptCommand
from autoprec.trial.source import source_digests

FILES = {
    "train.py": "import torch, model\nfrom data.loader import batches\n\ndef main():\n    from data import shapes\n",
    "model.py": "import layers as l\nimport model\n",
    "layers.py": "x = 1\n",
    "data/__init__.py": "",
    "data/loader.py": "from . import shapes\nfrom .deep.tokens import *\n",
    "data/shapes.py": "y = 1\n",
    "data/deep/tokens.py": "from ..shapes import y\nfrom ....... import nothing\n",
    "unused.py": "z = 1\n",
    "broken.py": "def (:\n",
    "config.yaml": "lr: 1\n",
}
PARTS = {"train.py", "model.py", "layers.py", "data/__init__.py", "data/loader.py", "data/shapes.py"} | {
    "data/deep/tokens.py"
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train.py", "--lr", "1"], PARTS),
        (["train.py", "--config=config.yaml", "no.yaml"], PARTS | {"config.yaml"}),
        (["-m", "train"], PARTS),
        (["-m", "data.loader"], {"data/loader.py", "data/shapes.py", "data/deep/tokens.py"}),
        (["broken.py"], {"broken.py"}),
        (["--", "env", "python", "train.py"], PARTS),
    ],
)
def test_its_files(project: Path, words: list[str], parts: set[str]) -> None:
    assert set(source_digests(ScriptCommand.parse(words, cwd=project))) == parts


def test_another_text_is_another_script_and_another_comment_is_not(project: Path) -> None:
    command = ScriptCommand.parse(["train.py", "config.yaml"], cwd=project)
    before = source_digests(command)
    (project / "layers.py").write_text("# what it is\nx   = 1\n")
    (project / "unused.py").write_text("z = 2\n")
    assert source_digests(command) == before
    for name in ("layers.py", "config.yaml", "train.py"):
        (project / name).write_text("x = 2\n")
        after = source_digests(command)
        assert after.get(name) != before[name]


def test_a_file_of_any_kind_or_size_does_no_harm(project: Path) -> None:
    (project / "huge.json").write_bytes(b"0" * (5 << 20))
    (project / "train.py").write_text("\x00" + "(" * 10_000)
    (project / "layers.py").unlink()
    (project / "layers.py").symlink_to("layers.py")
    found = source_digests(ScriptCommand.parse(["train.py", "huge.json", "layers.py"], cwd=project))
    assert set(found) == {"train.py"}
