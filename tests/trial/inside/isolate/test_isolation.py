"""Savers that do nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .test_overlay import in_fork


def test_savers_are_silenced_now_and_when_imported(tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.mkdir()
    package = tmp_path / "package"
    (package / "safetensors").mkdir(parents=True)
    (package / "safetensors" / "__init__.py").write_text("")
    (package / "safetensors" / "torch.py").write_text("def save_file(x, p):\n    open(p, 'w').write('x')\n")

    def work() -> None:
        import torch

        from autoprec.trial.inside.isolate import isolation

        for name in [n for n in sys.modules if n.startswith("safetensors")]:
            del sys.modules[name]
        os.chdir(user)
        sys.path.insert(0, str(package))
        config = {"cwd": str(user), "script": "train.py", "private": str(tmp_path / "ours"), "run_dir": str(tmp_path)}
        isolation.isolate(config)
        torch.save({}, "model.pt")
        import safetensors.torch

        safetensors.torch.save_file({}, "model.safetensors")
        assert isolation.suppressed == {"torch.save": 1, "safetensors.torch.save_file": 1}

    assert in_fork(work)
    assert list(user.iterdir()) == []
