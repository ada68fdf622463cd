"""The page: every class has its colour, names are escaped, nothing is loaded from elsewhere."""

import re
from dataclasses import replace

import torch
from torch import nn

from autoprec.graph.analysis.rules import load_rules
from autoprec.graph.recorder import record_step
from autoprec.report.graph_page import COLOURS, render_page
from tests.graph.models import Decoder, decoder_step


def test_page_shows_every_operator_and_layer():
    model = Decoder(fused=False, reentrant=False)
    report = record_step(model, lambda: decoder_step(model))
    page = render_page(report)
    for layer in report.layers:
        assert f"<td>{layer.name}</td>" in page
    drawn = set(re.findall(r'<g data-i="(\d+)"', page))
    hidden = {"view", "allocation", "scalar"}
    assert drawn == {str(i) for i, o in enumerate(report.operators) if o.cls not in hidden and o.phase != "update"}
    for phase in ("forward", "backward", "recompute"):
        assert f'data-phase="{phase}"' in page
    for cls in ("gemm", "softmax", "norm", "loss"):
        assert COLOURS[cls] in page


def test_nothing_is_loaded_and_names_are_escaped():
    model = nn.Linear(4, 4)
    report = record_step(model, lambda: model(torch.randn(2, 4)).sum().backward())
    evil = "</script><script>alert(1)</script>"
    layer = replace(report.layers[0], name=evil)
    operators = tuple(replace(o, module=evil) for o in report.operators)
    page = render_page(replace(report, layers=(layer,), operators=operators, notes=(evil,), model={"class": evil}))
    assert evil not in page
    assert "http" not in page.replace("http-equiv", "")


def test_every_class_of_the_rules_is_drawn_or_hidden():
    assert set(load_rules().classes) <= set(COLOURS) | {"view", "allocation", "scalar"}


def test_an_empty_step_has_a_page():
    model = nn.Linear(4, 4)
    report = record_step(model, lambda: None)
    assert "no backward pass" in render_page(report)
