from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.errors import UsageError
from autoprec.graph.report import Operator
from autoprec.policy.space import load_space
from autoprec.precision.hardware import FITS
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.trial.protocol import HostInfo
from autoprec.tuning.options import SearchOptions
from autoprec.tuning.setup import Setup
from autoprec.tuning.sixteen_bit import sixteen_bit_space
from tests.simulated import simulated_graph


def setup(device: str = "cpu", root_called: bool = True, device_bytes: int = 0, **changes: object) -> Setup:
    graph = replace(simulated_graph(2, width=4096, tokens=16384), root_called=root_called)
    asked: dict[str, object] = {"command": ("train.py",), "target": "h100", "study": "s"}
    host = HostInfo("fork", {"class": "GPT"}, (), ("AdamW",), device, device_bytes=device_bytes)
    return Setup.of(SearchOptions(**(asked | changes)), host, graph)  # type: ignore[arg-type]


def test_another_device_is_a_rehearsal_and_the_same_one_is_timed() -> None:
    assert (setup().measured, setup().source) == (False, "modelled")
    here = setup("NVIDIA H100 80GB HBM3")
    assert (here.measured, here.source) == (True, "measured")
    scaled = setup("NVIDIA H100 80GB HBM3", cost_scale="width=2")
    assert not scaled.measured
    with pytest.raises(UsageError, match="--target cpu"):
        setup("NVIDIA H100 80GB HBM3", target="cpu")


@pytest.mark.parametrize(
    ("device", "changes", "has"),
    [
        ("cpu", {}, 80e9),  # a rehearsal: the table's
        ("NVIDIA H100 80GB HBM3", {}, 85e9),  # the card's own
        ("NVIDIA H100 80GB HBM3", {"target": "h200"}, 141e9),
        ("cpu", {"target": "cpu"}, 3e9),  # what the machine has left
    ],
)
def test_memory_that_is_the_devices_has_a_margin(
    monkeypatch: pytest.MonkeyPatch, device: str, changes: dict[str, str], has: float
) -> None:
    monkeypatch.setattr("autoprec.precision.hardware.free_bytes", lambda: int(3e9))
    made = setup(device, max_memory="auto", device_bytes=int(85e9) if "H100" in device else 0, **changes)
    assert made.options.memory_limit == int(FITS * has)


def test_a_step_is_modelled_once_and_fp8_is_faster_than_bf16() -> None:
    made = setup()
    bf16 = made.steps.of(made.problem.params_of("bf16"))
    assert made.steps.of(made.problem.params_of("bf16")) is bf16
    assert made.steps.of(made.problem.params_of("fp8_rowwise")).time_ms < bf16.time_ms < made.steps.script().time_ms
    assert made.steps.of_reference() is made.steps.script()
    assert setup(reference="bf16").steps.of_reference().time_ms == pytest.approx(bf16.time_ms)


def test_the_reference_is_the_script_or_one_uniform_policy() -> None:
    assert setup().reference_policy() is None
    document = setup(reference="bf16").reference_policy()
    assert document is not None
    assert (document["default"], document["activations"]) == ("bf16", "bf16")


def test_a_restricted_setup_asks_about_less_of_the_same_script() -> None:
    made = setup()
    small = made.restricted(sixteen_bit_space(load_space("hopper-fp8")))
    assert small.graph is made.graph
    assert "fp8_rowwise" in made.problem.choice_names
    assert not any("fp8" in name for name in small.problem.choice_names)
    assert small.steps.script().time_ms == made.steps.script().time_ms


def test_a_script_that_calls_the_models_parts_only_keeps_what_surrounds_its_forward() -> None:
    """``agent.get_value(x)``, never ``agent(x)``: autocast around the forward would never run, every trial mismatch."""
    whole, parts = setup(space="hopper-fp8"), setup(space="hopper-fp8", root_called=False)
    assert whole.problem.fixed["activations"] == "bf16"
    assert (parts.problem.fixed["activations"], parts.problem.fixed["attention"]) == ("keep", "keep")
    assert parts.problem.choice_names == whole.problem.choice_names


SDPA = Operator(
    *("x_0", "h", "aten::_scaled_dot_product_flash_attention", "forward", "attention", "follow", ""),
    *(((2, 8, 64, 128),) * 3, ("bf16",) * 3, 0, 0),
)


def test_a_cpu_without_bf16_instructions_is_not_asked_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    having, offered = setup(target="cpu", space=""), {"bf16", "int8", "int8_tensor/wgrad=keep"}
    if having.target.can_run(BUILTIN_RECIPES["bf16"]):
        assert offered <= set(having.problem.choice_names)
        assert having.space.optimizer.products == ("keep", "bf16")
    monkeypatch.setattr("autoprec.precision.hardware.cpu_bf16_units", tuple)
    without = setup(target="cpu", space="")
    assert without.space.activations == ("keep",)
    assert without.space.optimizer.products == ("keep", "fp32")
    assert offered & set(without.problem.choice_names) == {"int8", "int8_tensor/wgrad=keep"}
