"""The raw record: tensors by index, calls in order, and who made and who reads what."""

import pytest
import torch

from autoprec.graph.trace import SCRIPT, Call, Ref, Trace, Value, dtype_name


def call(index, op, args, ins, outs, phase="forward"):
    return Call(index, None, op, args, {}, ins, outs, SCRIPT, phase, seq=index, task=-1)


@pytest.fixture
def trace():
    """y = x + w in the forward pass, then y.mul_(y), whose result is a new value of the same memory."""
    values = [
        Value((4,), "fp32", 16, "input"),
        Value((4,), "fp32", 16, "parameter", name="w"),
        Value((4,), "fp32", 16, "op", producer=0),
        Value((4,), "fp32", 16, "op", producer=1),
    ]
    calls = [
        call(0, "aten::add", (Ref(0), Ref(1), 2.0), (0, 1), (2,)),
        call(1, "aten::mul_", (Ref(2), Ref(2)), (2, 2), (3,), phase="recompute"),
    ]
    return Trace(values=values, calls=calls)


def test_names_lose_namespace_and_in_place_mark(trace):
    assert [c.name for c in trace.calls] == ["add", "mul"]
    assert call(0, "aten::__and__", (), (), ()).name == "__and__"


def test_producers_and_consumers(trace):
    assert trace.producer(0) is None
    assert trace.producer(3) is trace.calls[1]
    assert trace.consumers() == {0: [trace.calls[0]], 1: [trace.calls[0]], 2: [trace.calls[1]]}
    assert [v.name for v in trace.inputs(trace.calls[0])] == ["", "w"]
    assert trace.outputs(trace.calls[1]) == [trace.values[3]]


def test_arguments_by_position(trace):
    assert [trace.argument(trace.calls[0], i) for i in range(4)] == [0, 1, None, None]


def test_phases_keep_their_order(trace):
    assert [c.index for c in trace.in_phase("forward", "recompute")] == [0, 1]
    assert [c.index for c in trace.in_phase("recompute")] == [1]


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "e4m3"), (torch.int64, "int64")],
)
def test_dtypes_have_short_names(dtype, name):
    assert dtype_name(dtype) == name
