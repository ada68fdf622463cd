"""The Transformer Engine backend on Transformer Engine's own Python, against a stand-in for its compiled extension.

Needs TE's Python (1 MB: ``pip download --no-deps transformer-engine``, unpacked), installed or in the folder that
``AUTOPREC_TE_PYTHON`` names; several folders may be given, separated as in ``PATH``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends.te_extension import VARIABLE, find_te

ROOT = Path(__file__).parents[2]
FOLDERS = find_te()
E4, E5 = "Float8CurrentScaling:e4m3", "Float8CurrentScaling:e5m2"
#: The products of a linear layer in TE's order of arguments: fprop, dgrad, wgrad.
LAYOUTS = ("TN", "NN", "NT")

pytestmark = [
    pytest.mark.skipif(not FOLDERS, reason=f"Transformer Engine's Python is not at hand: set {VARIABLE}"),
    pytest.mark.slow,
]


def ran(folder: Path, capability: str) -> dict:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NVTE_PROJECT_BUILDING": "1"}
    command = [sys.executable, "-m", "tests.backends.te_scenarios", str(folder), capability]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=FOLDERS, ids=[folder.parent.name for folder in FOLDERS])
def hopper(request: pytest.FixtureRequest) -> dict:
    return ran(request.param, "9.0")


def correct(found: dict, accumulation: tuple[bool, bool, bool] = (True, True, True), limit: float = 1e-6) -> bool:
    products = [product for product in found["products"] if product[2] in LAYOUTS]
    assert [p[2] for p in products] == list(LAYOUTS)
    assert found["ok"]
    assert found["untouched"]
    assert tuple(p[3] for p in products) == accumulation
    assert all(error < limit for error in found["errors"].values()), found["errors"]
    return True


def test_every_recipe_runs_as_asked(hopper: dict) -> None:
    recipes = hopper["recipes"]
    assert set(recipes) >= {"fp8_tensorwise", "fp8_delayed", "fp8_block", "fp8_block_fp32_scales"}
    for found in recipes.values():
        assert correct(found), found
    assert [p[:2] for p in recipes["fp8_tensorwise"]["products"]] == [[E4, E4], [E4, E5], [E4, E5]]
    assert [p[:2] for p in recipes["fp8_delayed"]["products"]][1] == ["Float8:e4m3", "Float8:e5m2"]


def test_gemms_of_one_layer(hopper: dict) -> None:
    gemms = hopper["gemms"]
    eight, bf16, kept = "fp8 tensor e4m3/e4m3/e5m2", "bf16", "keep"
    expected = {
        "wgrad bf16": (eight, eight, bf16),
        "wgrad kept": (eight, eight, kept),
        "fprop only": (eight, bf16, bf16),
        "backward only": (bf16, eight, eight),
        "kept and bf16": (eight, bf16, kept),
    }
    for name, executed in expected.items():
        assert correct(gemms[name]), gemms[name]
        assert tuple(gemms[name]["executed"].values()) == executed
    assert gemms["kept and bf16"]["products"][2][:2] == ["float32", "float32"]


def test_parameters_reach_the_quantizers(hopper: dict) -> None:
    assert correct(hopper["parameters"]["power of 2"])
    assert correct(hopper["parameters"]["fast"], (False, False, False))


def test_a_second_policy_of_the_same_class_is_not_ignored(hopper: dict) -> None:
    formats = {name for product in hopper["same_class"] for name in product[:2]}
    assert formats == {E4}


def test_two_amax_algorithms_are_kept_apart_or_refused(hopper: dict) -> None:
    found = hopper["algorithms"]
    assert "amax_compute_algo" in found["refused"]


def test_delayed_scales_are_updated_once_per_step_and_direction(hopper: dict) -> None:
    found = hopper["updates"]
    for name in ("plain", "recomputed"):
        assert found[name]["updates"] == [[2], [2, 2], [2, 2]]
        assert found[name]["evaluation"] == 0
        assert found[name]["audit"]
    assert found["recomputation changes"] == 0.0
    assert found["error"] < 0.03  # the emulation rounds activations between layers to bfloat16


def test_dead_modules_leave_and_living_ones_stay(hopper: dict) -> None:
    assert max(hopper["leftovers"]["updates"]) == 4  # two layers of each of two living models


def test_batches_autocast_and_removal(hopper: dict) -> None:
    assert hopper["batches"]["empty"] == [0, 16]
    assert hopper["batches"]["ragged"] < 0.05
    assert hopper["removed"]["identical"]
    assert hopper["autocast"]["ok"]
    assert hopper["autocast"]["error"] < 0.05
    assert ["bfloat16", "bfloat16", "NT", True] in hopper["autocast"]["products"]


def test_the_weight_is_the_one_of_the_call(hopper: dict) -> None:
    found = hopper["copies"]
    assert found["copy"] == 0.0
    assert found["original"] > 0.1
    assert found["parametrised"] < 0.03


def test_the_conformance_suite_passes(hopper: dict) -> None:
    found = hopper["conformance"]
    assert found["failed"] == []
    assert found["passed"] > 20
    assert "inf in the input vanishes" in found["lacks"]["fp8_delayed: test_non_finite_values_show"]
    assert "no fp8 row" in found["lacks"]["fp8_rowwise"]


def test_blackwell_has_mxfp8_and_nvfp4() -> None:
    found = ran(FOLDERS[-1], "10.0")
    assert correct(found["recipes"]["mxfp8"])
    assert correct(found["recipes"]["nvfp4_plain"], limit=3e-3)  # bfloat16 output
    assert found["conformance"]["failed"] == []
    assert "powers of two" in found["recipes"]["fp8_block_fp32_scales"]["refused"]


def test_delayed_histories_travel_in_checkpoints(hopper: dict) -> None:
    found = hopper["resumed"]
    whole, continued = found["taken"]
    assert continued == whole, "losses of a resumed run are those of one that was not interrupted, bit for bit"
    assert found["left"][1][2:] != whole[2:], "without them they are not"
    assert found["shapes"]
