from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from autoprec.support.plain import Document
from autoprec.trial.inside.sensitivity import staying
from autoprec.trial.messages import listen


def test_a_scan_is_told_of_and_begins_in_a_layer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def serve(control: socket.socket) -> Document:
        control.close()
        done.append("serves")
        return {"spec": {"kind": "sensitivity"}}

    monkeypatch.setattr(staying, "settle", lambda: done.append("settled"))
    monkeypatch.setattr(staying, "serve_forks", serve)
    monkeypatch.setattr(staying, "add_layer_of_probe", lambda: done.append("has a layer"))
    with listen(tmp_path / "here", 1) as listener:
        assert staying.serve_scans(str(tmp_path / "here")) == {"spec": {"kind": "sensitivity"}}
        listener.settimeout(1.0)
        listener.accept()[0].close()
    assert done == ["settled", "serves", "has a layer"]
    with pytest.raises(OSError, match=os.strerror(2)):
        staying.serve_scans(str(tmp_path / "nobody"))
