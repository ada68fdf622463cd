"""Saved graphs come back equal, run no code, and foreign files are refused."""

import json

import pytest
import torch

from autoprec.errors import FileError
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.store import load_graph, save_graph
from tests.graph.models import Decoder, decoder_step

NODE = '{"schema": "autoprec.graph/1", "nodes": [{"name": "x", "meta": {}, %s}]}'


def graph_of(model, step):
    with StepRecorder(model) as recorder:
        step()
    return recorder.graph()


def facts(graph):
    return [
        (n.name, n.op, str(n.target) if n.op == "call_function" else "", str(n.args), n.kwargs, n.meta)
        for n in graph.nodes
    ]


def test_round_trip(tmp_path):
    model = Decoder(fused=False, reentrant=True)
    graph = graph_of(model, lambda: decoder_step(model))
    loaded = load_graph(save_graph(graph, tmp_path / "step.json"))
    loaded.lint()
    assert facts(loaded) == facts(graph)


def test_special_arguments_survive(tmp_path):
    model = torch.nn.Linear(4, 4)

    def step():
        y = model(torch.randn(2, 4)).to(torch.bfloat16).float()
        y.masked_fill(y > 0, float("-inf")).clamp(min=-1.0).contiguous(
            memory_format=torch.contiguous_format
        ).sum().backward()

    graph = graph_of(model, step)
    assert facts(load_graph(save_graph(graph, tmp_path / "g.json"))) == facts(graph)


def test_unknown_operators_stay_named(tmp_path):
    model = torch.nn.Linear(4, 4)
    path = save_graph(graph_of(model, lambda: model(torch.randn(2, 4)).sum().backward()), tmp_path / "g.json")
    path.write_text(path.read_text().replace("aten::addmm.default", "mylib::fast_addmm.default"))
    (node,) = [n for n in load_graph(path).nodes if n.meta.get("target")]
    assert node.meta["target"] == "mylib::fast_addmm.default"
    again = load_graph(save_graph(load_graph(path), tmp_path / "h.json"))
    assert [n.meta["target"] for n in again.nodes if n.meta.get("target")] == ["mylib::fast_addmm.default"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": "autoprec.graph/9", "nodes": []}',
        '{"schema": "autoprec.graph/1"}',
        NODE % '"op": "call_module", "args": {"tuple": []}',
        NODE % '"op": "call_function", "target": "aten::t.default", "args": {"tuple": [{"node": "gone"}]}',
        NODE % '"op": "placeholder", "args": {"dtype": "load"}',
        NODE % '"op": "placeholder", "args": {"eval": "1"}',
    ],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "g.json"
    path.write_text(text)
    with pytest.raises(FileError):
        load_graph(path)
    with pytest.raises(FileError, match="no such file"):
        load_graph(tmp_path / "none.json")


def test_targets_are_looked_up_among_operators_only(tmp_path):
    row = {
        "name": "x",
        "op": "call_function",
        "target": "load_library::__class__.mro",
        "args": {"tuple": []},
        "meta": {},
    }
    path = tmp_path / "g.json"
    path.write_text(json.dumps({"schema": "autoprec.graph/1", "nodes": [row]}))
    (node,) = load_graph(path).nodes
    assert node.meta["target"] == "load_library::__class__.mro"
