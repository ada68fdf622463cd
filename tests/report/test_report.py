"""The room's public names are there without its modules being imported before they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autoprec import report


def test_every_public_name_can_be_had() -> None:
    from autoprec.report.html import write_html
    from autoprec.report.markdown import write_markdown

    wanted = {"write_html": write_html, "write_markdown": write_markdown}
    assert {name: getattr(report, name) for name in report.__all__} == wanted


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"autoprec\.report.*write_pdf"):
        _ = report.write_pdf


def test_importing_the_room_imports_neither_torch_nor_its_modules() -> None:
    code = (
        "import sys, autoprec.report; print([m for m in sys.modules if m in ('torch', 'rich', 'autoprec.report.html')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
