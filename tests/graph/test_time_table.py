"""Where a step's time goes: the rows add up to the step, and each says what a policy can choose."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoprec.graph.analysis.rules import builtin_rules
from autoprec.graph.recorder import record_step
from autoprec.graph.report import DATA, OPTIMIZER, NewtonSchulz, OperatorTime, OperatorTimes
from autoprec.graph.time_table import choice_of, time_shares
from tests.graph.models import Decoder, decoder_step

NAMES = ["aten::mm", "aten::bmm", "aten::add", "aten::_softmax", "AddmmBackward0", "mylib::op", "CompiledFunction"]
ROWS = st.builds(
    OperatorTime, st.sampled_from(NAMES), st.sampled_from(["", OPTIMIZER, DATA]), st.just(1.0), st.floats(0.001, 1e3)
)


@pytest.fixture(scope="module")
def report():
    model = Decoder()
    return record_step(model, lambda: decoder_step(model))


@given(st.lists(ROWS, max_size=8), st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_the_rows_add_up_to_the_step(report, operators, step_ms, profiled_ms):
    rows = time_shares(OperatorTimes(step_ms, profiled_ms, 1, tuple(operators)), report)
    assert sum(row.ms for row in rows) == pytest.approx(step_ms)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert rows == sorted(rows, key=lambda row: -row.ms)
    assert all(row.choice for row in rows)


def test_every_class_says_what_can_be_chosen(report):
    assert all(choice_of(name, report) for name in builtin_rules().classes)
    assert choice_of("gemm", report).startswith("a recipe for each layer")
    assert choice_of("view", report).startswith("none: ")
    assert "implementation" not in choice_of("loss", report) + choice_of("conv", report)
    assert choice_of("attention", report).endswith("; implementation.attention")
    by_hand = tuple(replace(row, op="aten::bmm") for row in report.operators)
    choice = choice_of("attention", replace(report, operators=by_hand))
    assert choice.endswith("implementation.attention: it is written out already")
    assert "fused" not in choice_of(OPTIMIZER, report)
    assert choice_of(OPTIMIZER, replace(report, can_fuse=True)).endswith("; update: fused")
    products = "optimizer: matrix products"
    assert choice_of(products, report).startswith("none: ")
    muon = replace(report, newton_schulz=(NewtonSchulz(512, 512, 5),))
    assert choice_of(products, muon) == "optimizer.products: fp32, on a CPU without bf16"


def named(report, *operators):
    times = OperatorTimes(10.0, 10.0, 1, tuple(OperatorTime(op, part, 1.0, ms) for op, part, ms in operators))
    return {row.name: row.ms for row in time_shares(times, report)}


def test_what_is_not_an_operator_lies_between_them(report):
    rows = named(report, ("aten::mm", "", 6.0), ("autograd::engine::evaluate_function: MmBackward0", "", 1.0))
    assert rows == {"gemm": pytest.approx(6.0), "between operators": pytest.approx(4.0)}


def test_parts_of_a_step_are_told_apart(report):
    rows = named(
        report,
        ("aten::mm", OPTIMIZER, 1.0),
        ("aten::mul_", OPTIMIZER, 2.0),
        ("Optimizer.step#Muon.step", OPTIMIZER, 1.0),
        ("aten::stack", DATA, 3.0),
        ("Torch-Compiled Region: 0/0", "", 3.0),
    )
    assert rows == {
        "optimizer: matrix products": pytest.approx(1.0),
        "optimizer": pytest.approx(3.0),
        "data loading": pytest.approx(3.0),
        "compiled code": pytest.approx(3.0),
        "between operators": 0.0,
    }


def test_an_operator_of_two_classes_is_split_by_flops(report):
    one = replace(report.operators[0], op="aten::bmm", cls="gemm", flops=300)
    both = replace(report, operators=(one, replace(one, cls="conv", flops=100)))
    assert named(both, ("aten::bmm", "", 10.0)) == {"gemm": 7.5, "conv": 2.5, "between operators": 0.0}


def test_times_of_real_steps(report):
    """What the recorder saw and what the profiler saw are the same operators."""
    from autoprec.trial.inside.observe.operator_times import operator_rows

    model = Decoder()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        decoder_step(model)
    rows = operator_rows(profiler.events(), 1)
    shares = {row.name: row.share for row in time_shares(OperatorTimes(1.0, sum(r.ms for r in rows), 1, rows), report)}
    assert {"gemm", "norm", "softmax"} <= set(shares)
    assert shares.get("opaque", 0.0) < 0.05
