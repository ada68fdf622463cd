from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import FileError, UnknownNameError, UsageError
from autoprec.precision.hardware import (
    FAMILIES,
    TARGETS,
    alignment,
    by_device_name,
    cores,
    cpu_bf16_units,
    cpu_int8_units,
    free_bytes,
    grouped_refusal,
    load_targets,
    recipe_family,
    target,
)
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

REQUIRED = [
    "a100",
    "h100",
    "h100-pcie",
    "h100-nvl",
    "h200",
    "h200-nvl",
    "h20",
    "h800",
    "gh200",
    "b200",
    "b300",
    "gb200",
    "l40s",
    "rtx4090",
    "rtx5090",
    "rtx-pro-6000",
    "gb10",
    "mi300x",
    "mi325x",
    "cpu",
]


def test_the_table_has_every_promised_target() -> None:
    assert set(REQUIRED) <= set(TARGETS)


@pytest.mark.parametrize("name", [name for name in REQUIRED if name != "cpu"])
def test_every_gpu_has_a_source_a_date_and_plausible_figures(name: str) -> None:
    entry = TARGETS[name]
    assert len(entry.source) > 20
    assert re.fullmatch(r"20\d\d-\d\d", entry.date)
    assert (0.2e12 if name == "gb10" else 0.5e12) < entry.bandwidth < 12e12  # GB10 shares the memory of its CPU
    assert 16e9 < entry.memory_bytes < 400e9
    # dense peaks grow with fewer bits, and never by more than a sparse figure taken for a dense one would
    assert 1.0 <= entry.peaks["bf16"] / entry.peaks["tf32"] <= 4.0
    if "fp8" in entry.peaks:
        assert entry.peaks["fp8"] / entry.peaks["bf16"] == pytest.approx(2.0, rel=0.03)
    assert {"scale_up", "scale_out"} == set(entry.links)
    assert set(entry.recipes) == set(FAMILIES) - {"fp32", "tf32", "bf16", "fp16"}


def test_known_peaks_are_dense_not_sparse() -> None:
    assert TARGETS["h100"].peaks["bf16"] == pytest.approx(989, rel=0.01)
    assert TARGETS["h200-nvl"].peaks["fp8"] == pytest.approx(1671, rel=0.01)
    assert TARGETS["rtx5090"].bandwidth == pytest.approx(1.792e12)


@pytest.mark.parametrize(
    ("recipe", "family"),
    [
        ("bf16", "bf16"),
        ("fp8_tensorwise", "fp8_tensor"),
        ("fp8_delayed", "fp8_delayed"),
        ("fp8_rowwise", "fp8_row"),
        ("fp8_block", "fp8_block"),
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("int8", "int8"),
    ],
)
def test_recipes_have_families(recipe: str, family: str) -> None:
    assert recipe_family(BUILTIN_RECIPES[recipe]) == family
    assert family in FAMILIES


@pytest.mark.parametrize(
    ("name", "recipe", "ok"),
    [
        ("a100", "fp8_rowwise", False),
        ("a100", "bf16", True),
        ("h100", "fp8_block", True),
        ("h100", "mxfp8", False),
        ("l40s", "fp8_tensorwise", True),
        ("l40s", "fp8_block", False),
        ("b200", "nvfp4", True),
        ("rtx5090", "mxfp8", False),
        ("mi300x", "fp8_rowwise", True),
        ("mi300x", "nvfp4", False),
        ("cpu", "nvfp4", True),
    ],
)
def test_capability_comes_with_a_reason(name: str, recipe: str, ok: bool) -> None:
    found = TARGETS[name].can_run(BUILTIN_RECIPES[recipe])
    assert found.ok is ok
    assert ok or len(found.reason) > 20


def test_keep_always_runs_and_alignment_grows_with_block_size() -> None:
    assert TARGETS["a100"].can_run(None).ok
    assert alignment("bf16") == 1
    assert alignment("fp8_row") == 16
    assert alignment("mxfp8") == 32
    assert alignment("fp8_block") == 128


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB300", "b300"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GB10", "gb10"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_device_names_are_recognised(device: str, name: str) -> None:
    found = by_device_name(device)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "device",
    [
        "Some Accelerator 9000",
        "NVIDIA RTX A1000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_an_unknown_device_is_not_guessed(device: str) -> None:
    assert by_device_name(device) is None


def test_unknown_target_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'h100'"):
        target("h10")
    assert target("H200").name == "h200"


OWN = """
schema: autoprec.targets/1
targets:
  mycard:
    {title: My card, vendor: nvidia, architecture: hopper, capability: "9.0", units: 100, memory: 40, bandwidth: 1500,
     peaks: {fp32: 30, tf32: 200, bf16: 400, fp8: 800}, links: {scale_up: 100, scale_out: 10},
     source: me, date: "2026-01"}
"""


def test_users_add_their_own(tmp_path: Path) -> None:
    path = tmp_path / "cards.yaml"
    path.write_text(OWN)
    assert load_targets(path)["mycard"].peak("fp8_row") == pytest.approx(800e12)
    assert target(str(path)).name == "mycard"
    assert target(f"{path}:mycard").can_run(BUILTIN_RECIPES["fp8_rowwise"]).ok
    assert target(f"{path}:MyCard").name == "mycard"
    with pytest.raises(UnknownNameError, match="target 'other'"):
        target(f"{path}:other")


def test_of_several_own_targets_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cards.yaml"
    mine = OWN[OWN.index("  mycard") :]
    path.write_text(OWN + mine.replace("mycard", "Second"))
    assert target(f"{path}:second").name == "Second"
    with pytest.raises(UsageError, match=f"holds 2 targets, and none is named\n  fix: {path}:mycard, {path}:Second"):
        target(str(path))


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("units: 100", "units: 0", "units"),
        ("bandwidth: 1500", "bandwidht: 1500", "bandwi"),
        ("architecture: hopper", "architecture: hoper", "architecture 'hoper'"),
        ("autoprec.targets/1", "autoprec.targets/9", "schema"),
        ("bf16: 400", "bf16: -400", "peaks.bf16: Input should be greater than 0"),
        (", bf16: 400", "", "peaks: bf16 is missing"),
        ("scale_up: 100", "scale_up: 0", "links.scale_up: Input should be greater than 0"),
        (", scale_out: 10", "", "give scale_up and scale_out, or neither"),
        (
            "targets:\n",
            "architectures: {mine: {source: me, recipes: {fp8_tenso: {ok: true}}}}\ntargets:\n",
            "fp8_tenso",
        ),
    ],
)
def test_a_bad_file_says_where(tmp_path: Path, old: str, new: str, match: str) -> None:
    path = tmp_path / "cards.yaml"
    path.write_text(OWN.replace(old, new))
    with pytest.raises((FileError, UnknownNameError), match=match):
        load_targets(path)


def test_a_missing_peak_refuses_the_recipe() -> None:
    bare = replace(target("h100"), peaks={"bf16": 1.0})
    assert not bare.can_run(BUILTIN_RECIPES["fp8_rowwise"]).ok
    assert not bare.can_run(Recipe(format="fp32")).ok


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("model name : Zen 3\nflags\t\t: fpu avx2 fma\n", ()),
        ("flags\t\t: fpu avx512f avx512_vnni\n", ()),
        ("flags\t\t: fpu avx512f avx512_bf16\n", ("AVX512_BF16",)),
        ("flags\t\t: amx_bf16 amx_tile\n", ("AMX",)),
        ("Features\t: fp asimd bf16 i8mm\n", ("FEAT_BF16",)),
        ("Features\t: fp asimd\n", ()),
        ("processor : 0\n", None),
    ],
)
def test_bf16_instructions_are_read_off_the_flags(tmp_path: Path, text: str, units: tuple[str, ...] | None) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert cpu_bf16_units(path) == units
    assert cpu_bf16_units(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("limit", "int8", "bf16"),
    [
        ("", ("AMX", "AVX512_VNNI", "AVX_VNNI"), ("AMX", "AVX512_BF16")),
        ("DEFAULT", ("AMX", "AVX512_VNNI", "AVX_VNNI"), ("AMX", "AVX512_BF16")),
        ("AVX512_CORE_BF16", ("AVX512_VNNI", "AVX_VNNI"), ("AVX512_BF16",)),
        ("avx512_core_vnni", ("AVX512_VNNI", "AVX_VNNI"), ()),
        ("AVX512_CORE", (), ()),  # oneDNN takes its kernels for AVX-512 without VNNI, which overflow
        ("AVX2", (), ()),
    ],
)
def test_units_are_those_that_the_library_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, int8: tuple[str, ...], bf16: tuple[str, ...]
) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("flags\t\t: avx2 avx_vnni avx512f avx512_vnni avx512_bf16 amx_bf16 amx_int8\n")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert (cpu_int8_units(path), cpu_bf16_units(path)) == (int8, bf16)
    assert cpu_int8_units(tmp_path / "missing") is None


def test_a_cpu_without_bf16_instructions_offers_int8_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for units, offered in (((), False), (("AVX512_BF16",), True), (None, True)):
        monkeypatch.setattr("autoprec.precision.hardware.cpu_bf16_units", lambda units=units: units)
        assert bool(TARGETS["cpu"].can_run(BUILTIN_RECIPES["bf16"])) is offered
        assert TARGETS["cpu"].can_run(BUILTIN_RECIPES["int8_tensor"])


def test_memory_that_is_left_is_the_machines_or_the_control_groups(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert free_bytes(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    4000 kB\n")
    (tmp_path / "memory.current").write_text("1000000\n")
    for most, left in (("max", 4096000), ("3000000", 2000000), ("9000000", 4096000), ("500000", 0)):
        (tmp_path / "memory.max").write_text(f"{most}\n")
        assert free_bytes(meminfo, tmp_path) == left


def test_a_no_is_false() -> None:
    assert not TARGETS["a100"].can_run(BUILTIN_RECIPES["fp8_rowwise"])
    assert TARGETS["h100"].can_run(BUILTIN_RECIPES["fp8_rowwise"])


@pytest.mark.parametrize(
    ("recipe", "capability", "reason"),
    [
        ("bf16", (8, 0), ""),
        ("fp8_rowwise", (9, 0), ""),
        ("fp8_rowwise", (10, 0), "compute capability 9.0 only, this is 10.0"),
        ("fp8_rowwise", (0, 0), "this device has none"),
        ("fp8_tensorwise", (9, 0), "a scale for each row, or MXFP8"),
        ("mxfp8", (10, 0), ""),
        ("mxfp8", (9, 0), "compute capability 10.0 only, this is 9.0"),
        ("mxfp8", (10, 3), "this is 10.3"),
        ("mxfp8", None, ""),
        ("nvfp4", None, "a scale for each row, or MXFP8"),
        ("fp16", (9, 0), "torch groups bf16, FP8 and MXFP8"),
        ("bf16_fp32_output", (9, 0), "rounded to 16 bits"),
    ],
)
def test_grouped_gemms_say_what_they_run(recipe: str, capability: tuple[int, int] | None, reason: str) -> None:
    found = grouped_refusal(BUILTIN_RECIPES[recipe], capability)
    assert reason in found
    assert bool(found) == bool(reason)


def test_compute_capabilities_are_numbers() -> None:
    assert TARGETS["h100"].compute_capability == (9, 0)
    assert TARGETS["mi300x"].compute_capability == (0, 0)


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() >= 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {1, 5, 7}, raising=False)
    assert cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert cores() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1
