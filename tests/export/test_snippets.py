"""The pieces that exported modules share, run as they stand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.export import Request
from autoprec.export.snippets import fill, template, wide_output
from tests.conformance.exporters import POLICIES
from tests.export.readers import load_source


def _module(attention: torch.dtype | None = None, wide: bool = False, activations: torch.dtype | None = None) -> Any:
    pieces = "\n".join(map(template, ("plan_of", "mechanics", "context"))).replace("@CONTEXT@", "")
    module = load_source("import contextlib, re, torch, torch.overrides\nfrom torch import nn\n" + pieces, "snippets")
    module.__dict__.update(ATTENTION=attention, WIDE_OUTPUT=wide, ACTIVATIONS=activations)
    return module


def test_the_first_rule_that_matches_decides() -> None:
    module = _module()
    module.RULES = [("a\\..*", "first"), (".*", "rest")]
    assert [module.plan_of(name) for name in ("a.b", "b", "a.b\nc")] == ["first", "rest", "first"]
    module.RULES = []
    assert module.plan_of("a") == "keep"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_computes_in_its_dtype_and_returns_what_the_model_expects(dtype: torch.dtype) -> None:
    module, layer = _module(activations=torch.bfloat16), nn.Linear(8, 4)
    x = torch.randn(3, 8)
    expected = nn.functional.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))
    module.run_in(layer, dtype)
    assert layer.precision_dtype is dtype
    assert layer(x).dtype is torch.float32
    assert torch.equal(layer(x), expected.float())
    with module.autocast("cpu"):
        # autocast narrows what it runs itself; a layer asked for float32 stays wide
        assert layer(x).dtype is dtype


def test_only_floating_point_tensors_of_a_nest_are_widened() -> None:
    low, ids = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)
    out = _module().widened({"a": (low, [ids, "text"]), "b": None})
    assert out["a"][0].dtype is torch.float32
    assert out["a"][1][0] is ids
    assert (out["a"][1][1], out["b"]) == ("text", None)


def test_a_model_is_wrapped_once_and_not_at_all_without_a_reason() -> None:
    plain = nn.Linear(4, 4)
    assert "forward" not in _module().attend(plain).__dict__
    module = _module(wide=True, activations=torch.bfloat16)
    model = module.attend(nn.Linear(4, 4))
    forward = model.forward
    assert module.attend(model).forward is forward
    with module.autocast("cpu"):
        assert model(torch.ones(1, 4)).dtype is torch.float32


def test_a_template_is_filled_and_the_output_is_cast_where_autocast_narrows_it() -> None:
    filled = fill("msamp", Request(POLICIES["bf16"]), RULES="[]", FP8="[]", LEVEL="O1")
    assert "RULES = []\n" in filled
    assert "ACTIVATIONS = torch.bfloat16 " in filled
    assert template("plan_of") in filled
    assert "@" not in filled
    assert wide_output(Request(POLICIES["bf16"]))
    assert not wide_output(Request(POLICIES["unprotected"]))
    assert not wide_output(Request(POLICIES["empty"])), "nothing is narrowed"
