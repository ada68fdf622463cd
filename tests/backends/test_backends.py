"""Choosing backends, and the shipped conformance suite on each of them."""

from __future__ import annotations

import warnings

import pytest
import torch

from autoprec.backends import BACKENDS, Backend, Capability, Execution, choose, get
from autoprec.errors import UnknownNameError
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.testing.backends import check_backend


def test_names() -> None:
    assert set(BACKENDS) == {"emulated", "native", "torchao", "transformer_engine", "msamp"}
    assert all(get(name).name == name for name in BACKENDS)
    with pytest.raises(UnknownNameError, match="did you mean 'torchao'"):
        get("torch_ao")


def test_auto_follows_the_device() -> None:
    assert choose("auto", "cpu").name == "emulated"
    assert choose("auto", "cuda:0").name == "native"
    assert choose("torchao", "cpu").name == "torchao"


@pytest.mark.parametrize("name", BACKENDS)
def test_conformance(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao warns on import
        checks = list(check_backend(get(name), "cuda" if torch.cuda.is_available() else "cpu"))
    assert [c for c in checks if c.status == "fail"] == []
    assert all(c.detail for c in checks if c.status == "lacks")
    if name == "emulated":
        assert all(c.status == "pass" for c in checks)
        assert len(checks) > 8 * len(BUILTIN_RECIPES)


class WrongExecution(Execution):
    """Answers one percent too much, loses NaN, and draws from the global random stream."""

    def __call__(self, input, weight, bias, *, training=True):
        torch.rand(1)
        return get("emulated").bind(self.plan, None, name="x", seed=0)(input.nan_to_num(), weight, bias) * 1.01


class Wrong(Backend):
    """Claims everything, and returns wrong numbers, so that the suite is seen to fail."""

    name = "wrong"

    def available(self, device: str) -> Capability:
        return Capability(True, "yes")

    def capability(self, recipe, **asks) -> Capability:
        return Capability(recipe.format != "int8", "" if recipe.format == "int8" else "yes")

    def bind(self, plan, module, *, name, seed):
        return WrongExecution(plan, backend=self.name)


def test_the_suite_finds_what_is_wrong() -> None:
    checks = list(check_backend(Wrong()))
    failed = {c.name.split(": ")[-1] for c in checks if c.status == "fail"}
    wanted = {"same arithmetic in float64", "says what ran", "private random streams", "non-finite values show"}
    assert wanted <= failed
    assert any(c.name == "int8" and c.detail == "no reason given" for c in checks if c.status == "fail")
