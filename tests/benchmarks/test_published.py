"""The model against what others have measured: the goals of the cost model, on the rows it was not fitted on."""

from __future__ import annotations

from collections import defaultdict

import pytest

from benchmarks.cost.published import Row, evaluate, family_plan, published, published_target

ROWS = evaluate()
SCORED = [row for row in ROWS if row.use == "score"]


def named(row: Row) -> str:
    return f"{row.target}-{row.what}-{row.family}".replace(" ", "_")


def test_no_row_is_fitted_and_scored() -> None:
    seen = defaultdict(set)
    for row in ROWS:
        seen[(row.target, row.what, row.family)].add(row.use)
    assert all(len(uses) == 1 for uses in seen.values())
    timed = [row for row in ROWS if row.kind not in ("size", "memory")]
    assert 0.4 <= sum(row.use == "score" for row in timed) / len(timed) <= 0.65
    assert all(row.use == "score" for row in ROWS if row not in timed)


def test_every_row_names_its_source() -> None:
    sources = published()["sources"]
    assert {row.source for row in ROWS} <= set(sources)


@pytest.mark.parametrize("row", [r for r in SCORED if r.target == "h200-nvl"], ids=named)
def test_transformer_engine_h200_within_10_percent(row: Row) -> None:
    assert abs(row.error) <= 0.10


@pytest.mark.parametrize("row", [r for r in SCORED if r.target == "b300"], ids=named)
def test_transformer_engine_b300_within_15_or_20_percent(row: Row) -> None:
    assert abs(row.error) <= (0.15 if row.family == "bf16" else 0.20)


@pytest.mark.parametrize("shapes", ["autocast fprop", "autocast dgrad", "autocast wgrad"])
def test_recipes_are_in_the_measured_order_on_h200(shapes: str) -> None:
    rows = [row for row in ROWS if row.target == "h200-nvl" and row.what == shapes]
    measured = [row.family for row in sorted(rows, key=lambda row: row.published)]
    assert [row.family for row in sorted(rows, key=lambda row: row.modelled)] == measured


@pytest.mark.parametrize("row", [r for r in SCORED if r.kind == "speedup" and r.source.startswith("ao")], ids=named)
def test_torchao_speedups_within_5_points_and_the_sign_right(row: Row) -> None:
    assert abs(row.error) <= 0.05
    assert (row.modelled > 1) == (row.published > 1)


@pytest.mark.parametrize("row", [r for r in SCORED if r.source == "nanochat"], ids=named)
def test_nanochat_within_8_points_and_the_sign_right(row: Row) -> None:
    if row.kind == "sign":
        assert row.error == 0
    else:
        assert (row.modelled > 1) == (row.published > 1)
        assert abs(row.error) <= 0.08


@pytest.mark.parametrize(
    "row", [r for r in SCORED if r.kind == "speedup" and r.source in ("bridge", "titan")], ids=named
)
def test_newer_steps_within_5_points_apart_from_two(row: Row) -> None:
    """NVFP4 by Transformer Engine is 17 points too slow, MXFP8 in a run that filled its device 12 too fast."""
    known = {("bridge", "nvfp4"): -0.17, ("titan", "mxfp8"): 0.12}
    assert (row.modelled > 1) == (row.published > 1)
    limit = abs(known.get((row.source, row.family), 0.05)) if row.what == "step llama3-8b" else 0.05
    assert abs(row.error) <= limit


@pytest.mark.parametrize("row", [r for r in ROWS if r.kind == "memory"], ids=named)
def test_memory_over_that_of_bf16(row: Row) -> None:
    """Within 5 points, apart from Llama3-8B in NVFP4 (5.2: what the bf16 run reserved filled the device)."""
    assert abs(row.error) <= (0.055 if (row.what, row.family) == ("memory llama3-8b", "nvfp4") else 0.05)


@pytest.mark.parametrize("row", [r for r in ROWS if r.source == "te-memory"], ids=named)
def test_memory_of_one_linear_of_transformer_engine_within_1_percent(row: Row) -> None:
    assert abs(row.error) <= 0.01


def test_wgrad_in_bf16_gains_over_row_wise_on_mi300x_as_published() -> None:
    row, mixed = (r for r in ROWS if r.target == "mi300x" and r.family.startswith("fp8_row"))
    assert mixed.published > row.published
    assert mixed.modelled > row.modelled


def test_small_shapes_lose() -> None:
    (row,) = [row for row in ROWS if row.what == "linear 1024x2048x1024"]
    assert row.modelled < 1


def test_a_broken_model_would_be_seen() -> None:
    from dataclasses import replace

    from autoprec.cost.rates import default_rates
    from autoprec.precision.hardware import target

    good = default_rates(target("h200-nvl"), library=True)
    free = replace(good, cast=dict.fromkeys(good.cast, 1e6))
    errors = [abs(row.error) for row in evaluate({"hopper": free}, use="score") if row.target == "h200-nvl"]
    assert max(errors) > 0.10


def test_helpers() -> None:
    assert published_target("h100-ao").bandwidth == pytest.approx(2.4e12)
    assert family_plan("fp8_row_gw_hp").wgrad == family_plan("bf16").wgrad
    assert evaluate(use="fit", architecture="cdna3")[0].target == "mi300x"
