"""Rules: every class says why, a user's file goes first, and a bad file is refused with the place."""

from pathlib import Path

import pytest
import torch

from autoprec.errors import FileError, UnknownNameError
from autoprec.graph.analysis.rules import PRECISIONS, load_rules, reclassify
from autoprec.graph.recorder import record_step
from tests.graph.models import Decoder, decoder_step

OWN = """
schema: autoprec.rules/1
classes:
  gate: {precision: keep, reason: the gate of my model, source: me}
  softmax: {precision: follow, reason: my kernel keeps its own statistics}
operators:
  - {class: gate, ops: ["aten::silu", "mylib::fused_*"]}
"""


def test_every_class_has_a_reason_and_a_known_precision():
    rules = load_rules()
    assert all(c.reason and c.precision in PRECISIONS for c in rules.classes.values())
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
    assert load_rules().class_of(operator) == cls


def test_every_class_is_documented_with_its_precision():
    page = (Path(__file__).parents[3] / "docs" / "graph.md").read_text(encoding="utf-8")
    for name, cls in load_rules().classes.items():
        assert f"| `{name}` | {cls.precision} |" in page


def test_no_operator_is_in_two_classes():
    seen = {}
    for pattern, cls in load_rules().patterns:
        assert seen.setdefault(pattern, cls) == cls, pattern


def test_a_users_file_goes_first(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(OWN)
    rules = load_rules(path)
    assert rules.class_of("aten::silu") == "gate"
    assert rules.class_of("mylib::fused_swiglu") == "gate"
    assert rules.class_of("aten::silu_backward") == "pointwise"
    model = Decoder(layers=1)
    recorded = record_step(model, lambda: decoder_step(model), rules=path)
    plain = reclassify(record_step(model, lambda: decoder_step(model)), rules)
    for report in (recorded, plain):
        (silu,) = [o for o in report.operators if o.op == "aten::silu"]
        assert (silu.cls, silu.precision, silu.reason) == ("gate", "keep", "the gate of my model")
        assert {o.precision for o in report.operators if o.cls == "softmax"} == {"follow"}


def test_reclassify_by_the_builtin_rules_changes_nothing():
    model = Decoder(layers=1, fused=False)
    report = record_step(model, lambda: decoder_step(model))
    assert reclassify(report, load_rules()) == report


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


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("schema: autoprec.rules/2", FileError, "schema"),
        ("schema: autoprec.rules/1\nclases: {}", UnknownNameError, "classes"),
        ("schema: autoprec.rules/1\noperators: [{class: nrom, ops: [x]}]", UnknownNameError, "norm"),
        ("schema: autoprec.rules/1\noperators: [{class: norm}]", FileError, "class and ops"),
        ("schema: autoprec.rules/1\nclasses: {a: {precision: fp64, reason: r}}", UnknownNameError, "fp32"),
        ("schema: autoprec.rules/1\nclasses: {a: {precision: fp32}}", FileError, "reason"),
        ("schema: autoprec.rules/1\noperators: []\nclasses: [1]", FileError, "mapping"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, error, says):
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(error, match=says):
        load_rules(path)
