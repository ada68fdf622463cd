"""The public names of ``autoprec.graph``: each is there, and none costs an import of torch before it is used."""

import subprocess
import sys

import pytest

import autoprec.graph


@pytest.mark.parametrize("name", autoprec.graph.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(autoprec.graph, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'record'"):
        _ = autoprec.graph.record


def test_reports_are_read_without_torch() -> None:
    code = "import sys; from autoprec.graph import load_report; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
