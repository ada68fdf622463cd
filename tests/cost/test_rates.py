from __future__ import annotations

import pytest

from autoprec.cost.rates import default_rates
from autoprec.precision.hardware import TARGETS

GPUS = [name for name in TARGETS if name != "cpu"]


@pytest.mark.parametrize("name", GPUS)
def test_every_recipe_a_gpu_runs_has_rates(name: str) -> None:
    target = TARGETS[name]
    rates = default_rates(target)
    for family, capability in target.recipes.items():
        if capability.ok and target.peak(family):
            assert 0.1 < rates.gemm[family] <= 1.0, family
            assert 0.05 < rates.cast[family] <= 1.0, family
            assert rates.quantise_us[family] > 0
    for family in ("bf16", "fp32", "tf32"):
        assert 0.3 <= rates.gemm[family] <= 0.9
    assert rates.label == "modelled, uncalibrated"


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_casts_compiled_by_torch_are_slower_than_transformer_engines(name: str) -> None:
    compiled, library = default_rates(TARGETS[name]), default_rates(TARGETS[name], library=True)
    assert 0.4 < compiled.cast["fp8_tensor"] / library.cast["fp8_tensor"] < 0.7
    assert (compiled.library, library.library) == (False, True)
    assert compiled.compiled() is compiled
    assert compiled.gemm == library.gemm
