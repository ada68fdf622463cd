"""Which backend runs a layer by ``auto`` on a GPU: the one that the policy's evidence names, where it can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying import binding
from autoprec.applying import stage as applying
from autoprec.applying.raw_weights import unit_execution
from autoprec.applying.swap import execution_of, root_of
from autoprec.applying.units import tunable_units
from autoprec.backends import Backend, Capability
from autoprec.errors import UnsupportedError
from autoprec.numerics.linear import LinearExecution
from autoprec.policy import LayerPlan
from autoprec.precision.hardware import recipe_family
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe

log: list[str] = []


class Fake(Backend):
    """Emulates, under a GPU backend's name; ``runs`` are families, ``mixed`` whether a layer may mix recipes."""

    def __init__(self, name: str, *runs: str, here: bool = True, mixed: bool = True) -> None:
        self.name, self.runs, self.here, self.mixed = name, runs, here, mixed

    def available(self, device: str) -> Capability:
        return Capability(self.here, f"{self.name} is not installed on {device}")

    def capability(self, recipe: Recipe, **_sizes: Any) -> Capability:
        return Capability(not recipe.scaled or recipe_family(recipe) in self.runs, f"no kernel in {self.name}")

    def bind(self, plan: LayerPlan, module: nn.Module, *, name: str, seed: int) -> LinearExecution:
        if not self.mixed and len(set(plan.recipes)) > 1:
            raise UnsupportedError("one recipe for a layer")
        return LinearExecution(plan, backend=self.name)

    def around_model(self) -> Callable[[], contextlib.AbstractContextManager[None]] | None:
        @contextlib.contextmanager
        def around() -> Iterator[None]:
            log.append(self.name)
            yield

        return around if self.name == "transformer_engine" else None

    def after_step(self) -> Callable[[], None] | None:
        return (lambda: log.append("stepped")) if self.name == "transformer_engine" else None


ALL = ("fp8_row", "fp8_tensor", "fp8_delayed", "fp8_block")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    """A model on the CPU that passes for one on a GPU, with fakes of its backends."""
    found = {
        "native": Fake("native", "fp8_row", "fp8_tensor", "fp8_delayed"),
        "torchao": Fake("torchao", "fp8_row", "fp8_tensor", mixed=False),
        "transformer_engine": Fake("transformer_engine", *ALL),
    }
    monkeypatch.setattr(applying, "_device_of", lambda _model: "cuda:0")
    for module in (applying, binding):
        monkeypatch.setattr(module, "choose", lambda name, _device: found["native" if name == "auto" else name])
    emulated = Fake("emulated", *ALL)
    monkeypatch.setattr(binding, "get", lambda name: found.get(name, emulated))
    log.clear()
    return found


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))


def policy(layers: dict[str, Any], backends: Any) -> Policy:
    """A policy of built-in recipes by layer (a name, or a name and those of single GEMMs), and who was timed."""
    rules = []
    for match, choice in layers.items():
        recipe, gemms = choice if isinstance(choice, tuple) else (choice, {})
        rules.append({"match": match, "recipe": recipe, "gemms": gemms})
    names = {name for rule in rules for name in (rule["recipe"], *rule["gemms"].values())}
    recipes = {name: BUILTIN_RECIPES[name] for name in names}
    return Policy.model_validate({"recipes": recipes, "layers": rules, "evidence": {"backends": backends}})


def by(name: str) -> dict[str, str]:
    return {"backend": name, "reason": f"{name}: 1.2x native, measured"}


def ran(made: nn.Sequential) -> list[str]:
    return [execution_of(made[index]).backend for index in (0, 2)]


def test_each_layer_runs_by_the_backend_that_its_recipe_was_found_with(gpu: dict[str, Fake]) -> None:
    made = model()
    evidence = {"fp8_rowwise": by("torchao"), "fp8_delayed": by("transformer_engine")}
    policy({"0": "fp8_rowwise", "2": "fp8_delayed"}, evidence).apply(made)
    assert ran(made) == ["torchao", "transformer_engine"]
    made(torch.randn(4, 16)).sum().backward()
    assert log == ["transformer_engine"]  # what it needs around the model, once
    root = root_of(made)
    assert root is not None
    assert root.after_step is not None


def test_what_the_evidence_does_not_name_is_natives(gpu: dict[str, Fake]) -> None:
    made = model()
    policy({"0": "fp8_rowwise", "2": "fp8_delayed"}, {"fp8_rowwise": by("torchao"), "other": by("x")}).apply(made)
    assert ran(made) == ["torchao", "native"]


@pytest.mark.parametrize("kind", ["cpu", "cuda", ""])
@pytest.mark.parametrize("here", ["cpu", "cuda:0"])
def test_what_was_timed_on_one_kind_of_device_decides_nothing_on_another(
    gpu: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, here: str, kind: str
) -> None:
    monkeypatch.setattr(applying, "_device_of", lambda _model: here)
    made = model()
    row = by("torchao") | ({"device": kind} if kind else {})
    policy({"*": "fp8_rowwise"}, {"fp8_rowwise": row}).apply(made)
    assert ran(made) == ["torchao" if (kind or "cuda") == here.partition(":")[0] else "native"] * 2


@pytest.mark.parametrize(
    "backends", [None, [], "torchao", {"fp8_rowwise": "torchao"}, {"fp8_rowwise": {"reason": "?"}}]
)
def test_evidence_of_another_form_chooses_nothing(gpu: dict[str, Fake], backends: Any) -> None:
    made = model()
    policy({"*": "fp8_rowwise"}, backends).apply(made)
    assert ran(made) == ["native", "native"]


def test_a_backend_asked_for_by_name_runs_everything(gpu: dict[str, Fake]) -> None:
    made = model()
    policy({"*": "fp8_rowwise"}, {"fp8_rowwise": by("torchao")}).apply(made, backend="native")
    assert ran(made) == ["native", "native"]


def test_a_layer_that_the_backend_refuses_or_cannot_bind_is_natives(gpu: dict[str, Fake]) -> None:
    made = model()
    mixed = ("fp8_rowwise", {"wgrad": "bf16"})
    evidence = {"fp8_rowwise": by("torchao"), "fp8_delayed": by("torchao")}
    with pytest.warns(
        UserWarning, match=r"2 layers \(0, \.\.\.\) were found with backend 'torchao'.*one recipe for a layer"
    ):
        policy({"0": mixed, "2": "fp8_delayed"}, evidence).apply(made)  # torchao has no delayed scaling
    assert ran(made) == ["native", "native"]


def test_a_layer_of_two_recipes_is_the_backends_that_runs_both_of_them(gpu: dict[str, Fake]) -> None:
    made = model()
    mixed = ("fp8_rowwise", {"wgrad": "fp8_tensorwise"})
    evidence = {"fp8_rowwise": by("transformer_engine"), "fp8_tensorwise": by("torchao")}
    policy({"0": mixed, "2": "fp8_tensorwise"}, evidence).apply(made)
    assert ran(made) == ["native", "torchao"]
    policy({"*": mixed}, dict.fromkeys(evidence, by("transformer_engine"))).apply(made)
    assert ran(made) == ["transformer_engine", "transformer_engine"]


def test_a_recipe_that_native_lacks_is_not_emulated_where_another_backend_has_it(gpu: dict[str, Fake]) -> None:
    made = model()
    policy({"*": "fp8_block"}, {"fp8_block": by("transformer_engine")}).apply(made)
    assert ran(made) == ["transformer_engine", "transformer_engine"]
    policy({"*": "fp8_block"}, {}).apply(made)
    assert ran(made) == ["emulated", "emulated"]


def test_a_backend_that_is_not_installed_here_is_said_and_native_runs_it(gpu: dict[str, Fake]) -> None:
    gpu["torchao"].here = False
    made = model()
    with pytest.warns(
        UserWarning, match="fp8_rowwise was found with backend 'torchao', which cannot run here: .*not inst"
    ):
        policy({"*": "fp8_rowwise"}, {"fp8_rowwise": by("torchao")}).apply(made)
    assert ran(made) == ["native", "native"]


def test_a_backend_of_another_version_is_said_and_native_runs_it(gpu: dict[str, Fake]) -> None:
    made = model()
    with pytest.warns(UserWarning, match="'cutlass', which cannot run here: this version does not know it"):
        policy({"*": "fp8_rowwise"}, {"fp8_rowwise": by("cutlass")}).apply(made)
    assert ran(made) == ["native", "native"]


def test_on_a_cpu_evidence_of_a_gpu_chooses_nothing() -> None:
    made = model()
    policy({"*": "fp8_rowwise"}, {"fp8_rowwise": by("torchao")}).apply(made)
    assert ran(made) == ["emulated", "emulated"]


class Stack(nn.Module):
    """Weights of experts, which only torch's own path multiplies together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix = nn.Parameter(torch.randn(4, 16, 16)), nn.Parameter(torch.randn(16, 16))


def test_weights_of_experts_stay_with_native(gpu: dict[str, Fake]) -> None:
    made = Stack()
    policy({"up": "fp8_rowwise", "mix": "fp8_rowwise"}, {"fp8_rowwise": by("torchao")}).apply(made)
    units = tunable_units(made)
    assert unit_execution(units["up"]).backend == "native"
    assert unit_execution(units["mix"]).backend == "torchao"


def test_a_weight_that_fsdp_has_flattened_binds_by_the_sizes_of_its_layer(
    gpu: dict[str, Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP's first version with ``use_orig_params`` leaves a flat part of it, and gathers it for each forward."""
    model = nn.ModuleDict({"linear": nn.Linear(64, 32), "attention": nn.MultiheadAttention(64, 4)})
    for parameter in model.parameters():
        parameter.data = parameter.data.flatten()[:5]
    asked: list[tuple[int, int]] = []

    def capability(_recipe: Recipe, **sizes: Any) -> Capability:
        asked.append((sizes["k"], sizes["n"]))
        return Capability(True)

    monkeypatch.setattr(gpu["native"], "capability", capability)
    Policy.model_validate({"default": "r", "recipes": {"r": BUILTIN_RECIPES["fp8_rowwise"]}}).apply(model)
    assert asked[:3] == [(64, 32), (32, 64), (0, 64)]
