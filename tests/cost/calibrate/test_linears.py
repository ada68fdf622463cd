"""The choice of a backend from timed linears: by speed beyond the noise, never by what computes something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autoprec.cost.calibrate.linears import LINEAR_SHAPES, Linear, Linears
from autoprec.cost.rates import default_rates
from autoprec.errors import FileError
from autoprec.precision.hardware import TARGETS
from autoprec.precision.recipes import BUILTIN_RECIPES

LARGE, SMALL = LINEAR_SHAPES


def rows(recipe: str, how: str = "compiled", **times: tuple[float, ...]) -> list[Linear]:
    """One row per backend and shape, in milliseconds, large first."""
    return [
        Linear(recipe, backend, how, shape, 1e-3 * value, spread=0.004, error=0.03)
        for backend, values in times.items()
        for shape, value in zip(LINEAR_SHAPES, values, strict=False)
    ]


def choice(found: list[Linear], how: str = "compiled", family: str = "fp8_row") -> tuple[str, str]:
    chosen = Linears(tuple(found)).choices(how)[family]
    return chosen.backend, chosen.reason


def test_the_faster_backend_runs_a_recipe_and_the_reason_says_by_how_much() -> None:
    found = rows("fp8_rowwise", native=(5.0, 0.5), torchao=(4.5, 0.45), transformer_engine=(4.0, 0.4))
    assert choice(found) == ("transformer_engine", "transformer_engine: 1.25x native at fp8_rowwise, measured")


def test_what_native_does_not_run_is_compared_shape_by_shape() -> None:
    large, small = rows("fp8_block", transformer_engine=(4.0, 0.4))
    refused = Linear("fp8_block", "native", "compiled", LARGE, failed="no kernel")
    found = [refused, large, replace(small, error=0.06)]  # alone, and further from bf16 in one shape
    assert choice(found, family="fp8_block")[0] == "transformer_engine"
    other = [replace(row, backend="torchao", seconds=row.seconds / 2, error=0.2) for row in found[1:]]
    assert choice([*found, *other], family="fp8_block")[0] == "transformer_engine", "it computes something else"
    crossed = [replace(other[0], error=0.01), replace(other[1], error=0.2)]
    assert choice([*found, *crossed], family="fp8_block")[0] == "torchao"


def test_a_tie_within_the_noise_is_native_and_both_say_so() -> None:
    found = rows("fp8_rowwise", native=(5.0, 0.5), torchao=(4.85, 0.485), transformer_engine=(7.0, 0.7))
    backend, reason = choice(found)
    assert backend == "native"
    said = "native: torchao 1.03x its speed, a tie; transformer_engine 0.71x its speed at fp8_rowwise, measured"
    assert reason == said
    uncertain = [replace(row, spread=0.2) for row in found]
    faster = [r if r.backend == "native" else replace(r, seconds=r.seconds / 1.2) for r in uncertain]
    assert choice(faster)[0] == "native"  # 1.2x and more, of times that are off by 20 % each


def test_eager_and_compiled_linears_are_decided_apart() -> None:
    found = rows("fp8_delayed", "eager", native=(9.0,), transformer_engine=(6.0,))
    found += rows("fp8_delayed", "compiled", native=(4.0,), transformer_engine=(6.0,))
    assert choice(found, "eager", "fp8_delayed")[0] == "transformer_engine"
    assert choice(found, "compiled", "fp8_delayed")[0] == "native"


def test_only_shapes_that_both_ran_are_compared() -> None:
    found = rows("fp8_rowwise", native=(5.0,), torchao=(5.0, 0.01))
    assert choice(found)[0] == "native"
    found = [row for row in rows("fp8_rowwise", native=(5.0, 0.5), torchao=(5.0, 0.1)) if row.shape == SMALL]
    found += rows("fp8_rowwise", transformer_engine=(0.1,))  # the large one alone, which native did not get to
    assert choice(found)[0] == "torchao"


def test_a_backend_that_computes_something_else_is_out_however_fast_it_is() -> None:
    found = rows("fp8_rowwise", native=(5.0,))
    found += [Linear("fp8_rowwise", "torchao", "compiled", LARGE, 1e-3, 0.0, error=0.09)]
    assert choice(found) == ("native", "native: torchao computes something else at fp8_rowwise, measured")


def test_what_native_cannot_run_is_run_by_the_fastest_that_can() -> None:
    found = rows("fp8_block", torchao=(4.0, 0.5), transformer_engine=(3.0, 0.4))
    found += [Linear("fp8_block", "native", "compiled", LARGE, failed="it needs CUDA 12.9")]
    backend, reason = choice(found, family="fp8_block")
    assert (backend, reason) == (
        "transformer_engine",
        "transformer_engine: native does not run fp8_block here (it needs CUDA 12.9)",
    )


def test_where_nothing_ran_or_nothing_was_timed_nothing_is_chosen() -> None:
    failed = [Linear("fp8_block", "native", "compiled", LARGE, failed="no kernel")]
    assert Linears(tuple(failed)).choices("compiled") == {}
    recipes = {"fp8_rowwise": BUILTIN_RECIPES["fp8_rowwise"]}
    assert Linears.of(None).record(recipes, compiled=True) == {}
    assert Linears.of({"schema": "autoprec.calibration/3"}).record(recipes, compiled=True) == {}


def test_a_policy_records_who_runs_its_recipes_by_their_names_in_it() -> None:
    linears = Linears(tuple(rows("fp8_rowwise", native=(5.0,), torchao=(4.0,)) + rows("bf16", native=(6.0,))))
    mine = BUILTIN_RECIPES["fp8_rowwise"].model_copy(update={"accumulation": "fast"})  # of the same family
    found = linears.record({"mine": mine, "bf16": BUILTIN_RECIPES["bf16"]}, compiled=True)
    assert found == {"mine": {"backend": "torchao", "reason": "torchao: 1.25x native at fp8_rowwise, measured"}}
    assert linears.record({"mine": mine}, compiled=False) == {}  # no eager linear was timed


def test_rows_are_read_back_as_they_were_written() -> None:
    found = rows("fp8_rowwise", native=(5.0, 0.5))
    assert Linears.of({"linears": [row.to_json() for row in found]}).rows == tuple(found)


@pytest.mark.parametrize(
    "row",
    [
        None,
        {},
        {"recipe": "fp8_rowwise"},
        Linear("nonsense", "native", "eager", LARGE).to_json(),
        Linear("bf16", "native", "fast", LARGE).to_json(),
        Linear("bf16", "native", "eager", LARGE, seconds=float("nan")).to_json(),
        Linear("bf16", "native", "eager", LARGE, seconds=-1.0).to_json(),
        Linear("bf16", "native", "eager", LARGE).to_json() | {"shape": [1, 2]},
        Linear("bf16", "native", "eager", LARGE).to_json() | {"more": 1},
    ],
)
def test_a_row_that_is_none_is_refused(row: Any) -> None:
    with pytest.raises(FileError, match="is not a timed linear"):
        Linears.of({"linears": [row]})


def test_linears_that_are_no_list_are_refused() -> None:
    with pytest.raises(FileError, match="'linears' is not a list"):
        Linears.of({"linears": {}})


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_factors_are_of_the_backend_that_runs_a_recipe(how: str) -> None:
    target, rates = TARGETS["h100"], default_rates(TARGETS["h100"])
    found = rows("bf16", how, native=(6.0,)) + rows("fp8_rowwise", how, native=(8.0,), torchao=(4.0,))
    auto = Linears(tuple(found)).factors(target, rates, how)
    native = Linears(tuple(found)).factors(target, rates, how, "native")
    assert native["fp8_row"] == (pytest.approx(2 * auto["fp8_row"][0]), 1.0)
    assert native["bf16"] == auto["bf16"]
    assert Linears(tuple(found)).factors(target, rates, "eager" if how == "compiled" else "compiled") == {}


def test_a_linear_in_a_compiled_graph_is_judged_by_the_device_alone() -> None:
    """As on an H100: a compiled linear of 8192 x 1024 x 4096 takes the host 1.4 ms to launch, the device 0.3."""
    alone = rows("fp8_tensorwise", native=(3.3, 1.4), torchao=(3.0, 1.5))
    apart = [replace(row, device_s=1e-3 * value) for row, value in zip(alone, (3.3, 0.30, 2.9, 0.22), strict=True)]
    assert choice(apart, family="fp8_tensor")[0] == "torchao"
    eager = [replace(row, how="eager", host_s=row.seconds) for row in apart]
    assert choice(eager, "eager", "fp8_tensor")[0] == "native"  # there the launches are waited for
    found = [*rows("bf16", native=(4.7, 0.34)), *apart]
    target, rates = TARGETS["h100"], default_rates(TARGETS["h100"])
    device, host = Linears(tuple(found)).factors(target, rates, "compiled", "native")["fp8_tensor"]
    assert host == 1.0
    assert 0.5 < device < 1.5  # by its launches 2 and more: no layer would be worth its casts
    eager += rows("bf16", "eager", native=(4.7,))
    _, host = Linears(tuple(eager)).factors(target, rates, "eager")["fp8_tensor"]
    assert 1.3 < host < 4  # of what launching a layer is taken for without a measurement


def test_without_a_timed_bf16_linear_nothing_is_corrected_and_what_native_was_not_timed_in_is_not_another_s() -> None:
    target, rates = TARGETS["h100"], default_rates(TARGETS["h100"])
    found = Linears(tuple(rows("fp8_rowwise", torchao=(4.5, 1.4))))
    assert found.choices("compiled") == {}
    assert found.factors(target, rates, "compiled", "torchao") == {}


def test_a_factor_is_the_measured_time_over_the_modelled() -> None:
    target, rates = TARGETS["h100"], default_rates(TARGETS["h100"])
    m, k, n = LARGE
    gemms = 3 * 2.0 * m * k * n / (target.peak("bf16") * rates.gemm["bf16"])
    ((factor, host),) = Linears(tuple(rows("bf16", native=(10.0,)))).factors(target, rates, "compiled").values()
    assert host == 1.0
    assert factor == pytest.approx(10e-3 / gemms, rel=0.1)  # beside the GEMMs a cast and launches are modelled
