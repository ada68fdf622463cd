"""The model drawn with its precisions."""

from __future__ import annotations

from dataclasses import replace

from autoprec.graph.report import GraphReport
from autoprec.reports.layers import LayerCell, best_policy, layer_map, layer_rows
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.reports.conftest import rehearsal


def test_the_best_of_a_search_that_was_resumed_is_not_the_layers_of_the_best_before(graph: GraphReport) -> None:
    result, records = rehearsal()
    earlier = replace(records[1], tags=("best",))
    rows = layer_rows(result, [records[0], earlier, *records[2:]], graph)
    assert {label for row in rows for label, _ in row.gemms.values()} == {"fp8"}


def test_each_gemm_of_a_layer_has_its_precision_and_its_share_of_the_work(
    result: SearchResult, records: list[Run], graph: GraphReport
) -> None:
    attn, mlp = layer_rows(result, records, graph)
    assert (attn.name, mlp.name) == ("h.0.attn", "h.0.mlp")
    assert attn.share == mlp.share == 0.5
    assert {label for label, _ in attn.gemms.values()} == {"bf16"}
    assert set(mlp.gemms.values()) == {("keep", "as written")}


def test_a_layer_that_is_kept_runs_as_autocast_has_it(
    result: SearchResult, records: list[Run], graph: GraphReport
) -> None:
    under = [replace(r, policy=r.policy | {"activations": "bf16"}) if r.policy else r for r in records]
    _, mlp = layer_rows(result, under, graph)
    assert set(mlp.gemms.values()) == {("bf16", "bf16 autocast")}


def test_without_a_policy_or_with_a_damaged_one_nothing_is_drawn(
    result: SearchResult, records: list[Run], graph: GraphReport
) -> None:
    assert best_policy(result, []) == {}
    assert layer_rows(result, [], graph) == ()
    damaged = [replace(r, policy={"schema": "autoprec.policy/9"}) if r.policy else r for r in records]
    assert layer_rows(result, damaged, graph) == ()


def test_equal_gemms_share_one_cell_and_different_ones_have_three() -> None:
    same = dict.fromkeys(("fprop", "dgrad", "wgrad"), ("fp8", "fp8 e4m3"))
    mixed = {**same, "wgrad": ("bf16", "bf16")}
    rows = [LayerCell("a", 0.75, same), LayerCell("<b>", 0.25, mixed), LayerCell("c", 0.0, {})]
    page = layer_map(rows)
    assert page.count('colspan="3"') == 2  # of a, and of c, which ran no GEMM
    assert page.count('class="f f-fp8" colspan="1"') == 2
    assert page.count('class="f f-bf16" colspan="1"') == 1
    assert "does not run" in page
    assert "&lt;b&gt;" in page
    assert "width:33%" in page, "a bar is relative to the widest"
    assert "75.0 %" in page
