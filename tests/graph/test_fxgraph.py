"""The recorded step is a real torch.fx.Graph that lints, says who made every node, and can be run again."""

import pytest
import torch
from torch import fx

from autoprec.graph.recorder import StepRecorder
from tests.graph.models import Decoder, RMSNorm, decoder_step


@pytest.fixture(scope="module")
def recorder():
    torch.manual_seed(0)
    model = Decoder(norm=RMSNorm, fused=False, reentrant=False)
    with StepRecorder(model) as found:
        decoder_step(model)
    return found


def test_lints_and_every_call_says_what_it_is(recorder):
    graph = recorder.graph()
    graph.lint()
    calls = [n for n in graph.nodes if n.op == "call_function" and "seq_nr" in n.meta]
    assert len(calls) == len(recorder.trace.calls)
    keys = {"module", "weight", "phase", "role", "class", "precision", "pattern", "seq_nr", "shapes", "dtypes", "flops"}
    assert all(keys | {"out_shapes", "out_dtypes", "bytes"} <= set(n.meta) for n in calls)
    assert {n.meta["phase"] for n in calls} == {"forward", "backward", "recompute"}
    wgrads = [n for n in calls if n.meta["role"] == "wgrad"]
    assert len(wgrads) == 15
    assert all(n.meta["weight"].endswith("weight") and n.meta["flops"] for n in wgrads)


def test_a_backward_node_carries_the_sequence_number_of_its_forward(recorder):
    calls = [n for n in recorder.graph().nodes if n.meta.get("weight") == "head.weight"]
    assert {n.meta["role"] for n in calls} == {"fprop", "dgrad", "wgrad"}
    assert len({n.meta["seq_nr"] for n in calls}) == 1


def test_running_the_graph_again_gives_the_gradients():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x = torch.randn(3, 4)
    with StepRecorder(model) as recorder:
        model(x).square().sum().backward()
    graph = recorder.graph()
    module = fx.GraphModule(torch.nn.Module(), graph)
    tensors = {**dict(model.named_parameters()), "": x}
    inputs = [tensors[n.meta["name"]] for n in graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        outputs = module(*inputs)
    for parameter in model.parameters():
        assert any(o.shape == parameter.shape and torch.allclose(o, parameter.grad) for o in outputs)
