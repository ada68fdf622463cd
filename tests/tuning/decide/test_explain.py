from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from autoprec.tuning.decide.explain import (
    as_evidence,
    explain_layers,
    merged,
)
from autoprec.tuning.decide.problem import layer_key
from autoprec.tuning.decide.table import SensitivityTable
from tests.tuning.synthetic import Synthetic, synthetic


def table_of(found: Synthetic, noise: float | None = 0.5) -> SensitivityTable:
    problem = found.problem
    return SensitivityTable(
        tuple(g.name for g in problem.groups), problem.choice_names, found.prior.error2, noise=noise
    )


def test_every_group_has_a_reason_with_its_numbers() -> None:
    found = synthetic()
    params = found.problem.params_of("bf16") | {layer_key("h.1.mlp.c_fc"): "fp8_rowwise"}
    reasons = explain_layers(found.problem, params, found.prior.time_ms, table_of(found))
    assert [r["layers"] for r in reasons] == [g.name for g in found.problem.groups]
    changed = next(r for r in reasons if r["layers"] == "h.1.mlp.c_fc")
    g = [g.name for g in found.problem.groups].index("h.1.mlp.c_fc")
    base, here = (found.problem.choice_names.index(c) for c in ("bf16", "fp8_rowwise"))
    assert changed["saved_ms"] == pytest.approx(found.prior.time_ms[g, base] - found.prior.time_ms[g, here])
    assert changed["gradient_error"] == pytest.approx(math.sqrt(found.prior.error2[g, here]))
    assert changed["error_share"] > 0.9
    assert "saves" in changed["text"]
    assert "of the noise)" in changed["text"]
    kept = next(r for r in reasons if r["layers"] == "lm_head")
    assert kept["saved_ms"] == 0
    assert "would be faster and add an error of" in kept["text"]
    assert sum(r["error_share"] for r in reasons) == pytest.approx(1.0)


def test_a_choice_is_not_called_faster_for_what_the_fit_leaves_open() -> None:
    found = synthetic()
    same = np.ones_like(found.prior.time_ms)
    same[:, 1:] -= 1e-3
    reasons = explain_layers(found.problem, found.problem.params_of("bf16"), same, table_of(found))
    assert not any("would be faster" in r["text"] for r in reasons)


def test_what_is_adopted_is_not_called_slower_and_worse_without_a_word() -> None:
    found = synthetic()
    slower = found.prior.time_ms.copy()
    index = found.problem.choice_names.index("fp8_rowwise")
    slower[:, index] = 2 * slower[:, found.problem.choice_names.index("bf16")]
    params = found.problem.params_of("bf16") | {layer_key("h.1.mlp.c_fc"): "fp8_rowwise"}
    reason = next(
        r for r in explain_layers(found.problem, params, slower, table_of(found)) if r["layers"] == "h.1.mlp.c_fc"
    )
    assert "expected to be" in reason["text"]
    assert reason["text"].endswith("no better policy that was measured has another choice here")


def test_what_groups_save_adds_up_to_no_more_than_was_measured() -> None:
    """The cost model may promise more than the policy was timed to save."""
    found = synthetic()
    args = found.problem, found.problem.params_of("fp8_rowwise"), found.prior.time_ms, table_of(found)
    whole = sum(r["saved_ms"] for r in explain_layers(*args))
    reasons = explain_layers(*args, whole_ms=whole / 2)
    assert sum(r["saved_ms"] for r in reasons) == pytest.approx(whole / 2)
    assert any("saves about" in r["text"] for r in reasons)
    assert sum(r["saved_ms"] for r in explain_layers(*args, whole_ms=2 * whole)) == pytest.approx(whole)
    assert not any("saves" in r["text"] for r in explain_layers(*args, whole_ms=-1.0))


def test_a_choice_whose_gradient_is_not_finite_is_named_so() -> None:
    found = synthetic()
    error2 = found.prior.error2.copy()
    error2[3, 1:] = np.inf
    table = SensitivityTable(table_of(found).groups, found.problem.choice_names, error2)
    reason = explain_layers(found.problem, found.problem.params_of("bf16"), found.prior.time_ms, table)[3]
    assert "not finite" in reason["text"]


def reason(group: str, choice: str, saved: float, error: float, share: float) -> dict[str, Any]:
    row = {"layers": group, "count": 1, "choice": choice, "saved_ms": saved, "gradient_error": error}
    return row | {"error_share": share, "text": f"{choice}: because of {group}"}


REASONS = [
    reason("h.0.mlp", "mxfp8", 1.0, 0.3, 0.2),
    reason("h.1.mlp", "mxfp8", 2.0, 0.4, 0.5),
    reason("h.2.mlp", "bf16", 0.0, 0.0, 0.0),
    reason("head", "bf16", 0.0, math.inf, 0.3),
]
TOGETHER = "mxfp8: because of h.1.mlp. That is h.1.mlp; all 2 together: 3 ms, 70% of the error"


def test_equal_layers_of_all_blocks_are_told_once() -> None:
    rows = merged(REASONS)
    assert [row["layers"] for row in rows] == ["h.*.mlp (2)", "h.2.mlp", "head"]
    first = rows[0]
    assert first["saved_ms"] == 3.0
    assert first["gradient_error"] == pytest.approx(0.5)
    assert first["error_share"] == pytest.approx(0.7)
    assert first["text"] == TOGETHER
    assert rows[2]["gradient_error"] is None


def test_what_is_told_is_one_sentence_each() -> None:
    evidence = as_evidence({"layers": merged(REASONS)})
    assert evidence["why"]["head"] == "bf16: because of head"
    assert evidence["why"]["h.*.mlp (2)"] == TOGETHER
    assert as_evidence({}) == {}
