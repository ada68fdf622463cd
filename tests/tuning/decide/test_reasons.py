from __future__ import annotations

import math

import pytest

from autoprec.tuning.decide.explain import LayerReason
from autoprec.tuning.decide.reasons import as_evidence, error_share, explanation, merged, stay_explanation
from autoprec.tuning.decide.table import SensitivityTable
from tests.tuning.synthetic import synthetic


def reason(group: str, choice: str, saved: float, error: float, share: float) -> LayerReason:
    return LayerReason(group, (group,), choice, saved, error, share, f"{choice}: because of {group}")


REASONS = [
    reason("h.0.mlp", "mxfp8", 1.0, 0.3, 0.2),
    reason("h.1.mlp", "mxfp8", 2.0, 0.4, 0.5),
    reason("h.2.mlp", "bf16", 0.0, 0.0, 0.0),
    reason("head", "bf16", 0.0, math.inf, 0.3),
]


def test_equal_layers_of_all_blocks_are_told_once() -> None:
    rows = merged(REASONS)
    assert [row["layers"] for row in rows] == ["h.*.mlp (2)", "h.2.mlp", "head"]
    first = rows[0]
    assert first["saved_ms"] == 3.0
    assert first["gradient_error"] == pytest.approx(0.5)
    assert first["error_share"] == pytest.approx(0.7)
    assert first["text"] == "mxfp8: because of h.1.mlp"  # the one that adds most
    assert rows[2]["gradient_error"] is None


def test_only_decisions_that_matter_are_told() -> None:
    found = synthetic(space="te-delayed")
    table = SensitivityTable(
        tuple(g.name for g in found.problem.groups), found.problem.choice_names, found.prior.error2, noise=0.5
    )
    params = found.problem.params_of(found.problem.baseline)
    rows = explanation(found.problem, lambda *_: 1.0, table, [], params)["importance"]
    assert rows
    assert all(row["name"].startswith("layer:") for row in rows)  # of parameters nothing is known without a trial


def test_what_is_told_is_one_sentence_each() -> None:
    evidence = as_evidence(
        {"layers": merged(REASONS), "importance": [{"name": "layer:head", "time_share": 0.5, "error_share": 0.25}]}
    )
    assert evidence["why"]["head"] == "bf16: because of head"
    assert evidence["why"]["h.*.mlp (2)"] == "mxfp8: because of h.1.mlp; together 3 ms and 70% of the error"
    assert evidence["mattered"] == {"head": "50% of what moves time, 25% of divergence"}
    assert as_evidence({}) == {}
    assert error_share({"error_share": 0.25, "error_sd": 0.08}) == "25% ± 8%"


def verdict_row(name: str, ms: float, reason: str, *, best: str = "keep", gain: float = 0.0) -> dict[str, object]:
    return {"name": name, "baseline_ms": ms, "reason": reason, "best": best, "blocked": "", "gain": gain,
            "gain_ms": gain * ms}  # fmt: skip


def test_a_stay_tells_each_kind_of_layer_once_and_the_slowest_first() -> None:
    rows = [
        verdict_row("h.0.mlp", 1.0, "below break-even"),
        verdict_row("h.1.mlp", 2.0, "its casts cost 3 us"),
        verdict_row("head", 4.0, "bf16 saves 25% of this layer", best="bf16", gain=0.25),
    ]
    found = stay_explanation(rows, "keep")
    assert [(row["layers"], row["count"], row["text"]) for row in found["layers"]] == [
        ("head", 1, "bf16 would save 25% of it, too little of the step to matter"),
        ("h.*.mlp (2)", 2, "its casts cost 3 us"),
    ]
    assert found["importance"] == []
    assert set(found["layers"][0]) == set(merged(REASONS)[0]), "the keys of a policy that is adopted"
