"""Rules: every class says why, and an operator without one is named."""

from pathlib import Path

import pytest
import torch

from autoprec.graph.analysis.rules import builtin_rules
from autoprec.graph.recorder import record_step


def test_every_class_has_a_reason_and_a_known_precision():
    rules = builtin_rules()
    assert all(c.reason and c.precision in ("tunable", "fp32", "follow", "keep") for c in rules.classes.values())
    assert {cls for _, cls in rules.patterns} <= set(rules.classes)


@pytest.mark.parametrize(
    ("operator", "cls"),
    [
        ("aten::addmm", "gemm"),
        ("aten::add_", "pointwise"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::native_layer_norm_backward", "norm"),
        ("aten::_log_softmax", "softmax"),
        ("aten::nll_loss_forward", "loss"),
        ("c10d::allreduce_", "collective"),
        ("aten::__and__", "scalar"),
        ("aten::unsafe_split", "view"),
        ("aten::no_such_operator", None),
        ("other::mm", "gemm"),
    ],
)
def test_builtin_rules(operator, cls):
    assert builtin_rules().class_of(operator) == cls


def test_every_class_is_documented_with_its_precision():
    page = (Path(__file__).parents[3] / "docs" / "graph.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name, cls in builtin_rules().classes.items():
        assert f"`{name}`" in rows[cls.precision], name


def test_no_operator_is_in_two_classes():
    seen = {}
    for pattern, cls in builtin_rules().patterns:
        assert seen.setdefault(pattern, cls) == cls, pattern


def test_an_operator_nobody_knows_is_opaque_and_named():
    @torch.library.custom_op("autoprec_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_autograd(lambda ctx, grad: grad * 2)
    model = torch.nn.Linear(4, 4)
    report = record_step(model, lambda: twice(model(torch.randn(2, 4))).sum().backward())
    (row,) = [o for o in report.operators if o.op == "autoprec_tests::twice"]
    assert (row.cls, row.precision) == ("opaque", "keep")
    assert any("autoprec_tests::twice" in note for note in report.notes)
