from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoprec.cli.machine.targets import targets
from autoprec.errors import UnknownNameError


def test_the_table_lists_every_target_with_its_date() -> None:
    found = CliRunner().invoke(targets, [])
    assert found.exit_code == 0
    assert "NVIDIA H100 SXM5 80GB" in found.output
    assert "dense TFLOP/s" in found.output
    assert "2024-03" in found.output
    assert "74.5 GiB" in found.output
    assert " GB " not in found.output, "memory has one unit in every command"


def test_a_name_shows_source_and_reasons() -> None:
    found = CliRunner().invoke(targets, ["A100"])
    assert found.exit_code == 0
    assert "source: NVIDIA A100" in found.output
    assert "fp8_row      no   compute capability 8.0 multiplies no FP8" in found.output
    assert "H100" not in found.output


def test_a_name_shows_links_toolkit_and_alignment() -> None:
    found = CliRunner().invoke(targets, ["h200"]).output
    assert "hopper 9.0, 132 units" in found
    assert "links per GPU and direction: scale-up 450 GB/s, scale-out 50 GB/s" in found
    assert "fp8_block    yes  CUDA 12.9; M, K, N multiples of 128" in found
    assert "multiples" not in CliRunner().invoke(targets, ["cpu"]).output  # emulation takes any size


def test_json_has_units_in_the_names() -> None:
    found = CliRunner().invoke(targets, ["h200", "cpu", "--json"])
    h200, cpu = json.loads(found.output)["targets"]
    assert h200["peaks_tflops"]["bf16"] == 989
    assert h200["bandwidth_bytes_per_s"] == 4.8e12
    assert h200["recipes"]["mxfp8"]["ok"] is False
    assert (h200["units"], h200["recipes"]["fp8_row"]["multiple_of"]) == (132, 16)
    assert cpu["vendor"] == "cpu"


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'h100'"):
        CliRunner().invoke(targets, ["h10"], catch_exceptions=False)


def test_a_users_own_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        """schema: autoprec.targets/1
targets:
  card: {title: Card, vendor: other, architecture: hopper, capability: "1", units: 8, memory: 8, bandwidth: 800,
         peaks: {bf16: 50}, links: {}, source: me, date: "2026-02"}
"""
    )
    found = CliRunner().invoke(targets, ["--file", str(path), "CARD"])
    assert found.exit_code == 0
    assert "Card" in found.output
    with pytest.raises(UnknownNameError, match="unknown target 'cart'"):
        CliRunner().invoke(targets, ["--file", str(path), "cart"], catch_exceptions=False)
