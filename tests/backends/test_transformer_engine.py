"""The Transformer Engine backend against a stand-in that keeps TE's state machine; kernels need a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autoprec import Policy
from autoprec.applying.policy import remove_policy
from autoprec.applying.stage import put_stage
from autoprec.applying.swap import root_of
from autoprec.backends import get
from autoprec.backends.transformer_engine import TransformerEngineBackend
from autoprec.errors import UnsupportedError
from autoprec.policy import LayerPlan, LayerRule
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.backends import fake_te


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch):
    made = fake_te.install(monkeypatch)
    monkeypatch.setattr("autoprec.applying.stage._device_of", lambda model: "cuda:0")
    return made


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(torch.relu(self.first(x))))


def policy(first: str, second: str | None = None, gemms: dict | None = None) -> Policy:
    names = {first, second or first, "bf16", *(gemms or {}).values()} - {"keep"}
    return Policy.model_validate(
        {
            "recipes": {name: BUILTIN_RECIPES[name] for name in names},
            "layers": [
                {"match": "first", "recipe": first, "gemms": gemms or {}},
                {"match": "second", "recipe": second or first},
                {"match": "head", "recipe": "bf16"},
            ],
        }
    )


def step(model: nn.Module, rows: int = 16) -> torch.Tensor:
    model.zero_grad()
    out = model(torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)))
    out.square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_layers_and_gemms_run_what_the_policy_says_and_parameters_stay(te) -> None:
    model = Model()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    reference = step(model)
    chosen = policy("fp8_tensorwise", "fp8_tensorwise_e4m3", {"wgrad": "bf16"})
    chosen.apply(model, backend="transformer_engine")
    gradient = step(model)
    assert 1e-3 < (gradient - reference).norm() / reference.norm() < 0.15
    report = chosen.audit(model)
    assert report.ok, report.to_json()
    assert [row.backend for row in report.layers] == ["transformer_engine", "transformer_engine", "native"]
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    slots = fake_te.Linear.built[0].quantizers
    assert isinstance(slots["input"], fake_te.HybridQuantizer)
    assert isinstance(slots["input"].options["column"], fake_te.IdentityQuantizer)
    assert isinstance(slots["weight"], fake_te.Float8CurrentScalingQuantizer)
    assert slots["weight"].options["fp8_dtype"] is fake_te.DType.kFloat8E4M3
    assert slots["grad_output"].options["row"].options["fp8_dtype"] is fake_te.DType.kFloat8E5M2
    remove_policy(model)
    assert torch.equal(step(model), reference)


def test_every_policy_gets_fresh_modules_and_a_reset(te) -> None:
    model = Model()
    for count, name in enumerate(("fp8_tensorwise", "fp8_tensorwise_e4m3"), start=1):
        policy(name).apply(model, backend="transformer_engine")
        step(model)
        assert fake_te.FP8GlobalStateManager.resets == count
    wanted = fake_te.DType.kFloat8E4M3  # a live module would have kept the E5M2 of the first policy
    assert fake_te.Linear.built[-1].quantizers["grad_output"].options["fp8_dtype"] is wanted
    assert len(fake_te.Linear.built) == 4


def test_ragged_batches_are_padded(te) -> None:
    model = Model()
    policy("fp8_tensorwise").apply(model, backend="transformer_engine")
    assert step(model, rows=13).isfinite().all()
    assert model(torch.zeros(0, 32)).shape == (0, 16)


def test_delayed_scaling_is_updated_once_per_forward_of_the_model(te, monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    forward = fake_te.Linear.forward
    monkeypatch.setattr(
        fake_te.Linear, "forward", lambda self, x: depths.append(len(fake_te.STACK)) or forward(self, x)
    )
    model = Model()
    policy("fp8_delayed").apply(model, backend="transformer_engine")
    step(model)
    assert depths == [1, 1]  # inside the model's context, which the layers do not enter again
    assert fake_te.UPDATES == [True]
    step(model)
    assert fake_te.UPDATES == [True, False, True]  # the backward scales when the next forward begins
    request = fake_te.Linear.built[0].quantizers["input"]
    assert request == fake_te.DelayedScalingRequest(fake_te.Format.HYBRID, 0, 16, "max")


def test_every_no_has_a_reason(te, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TransformerEngineBackend()
    asks = {"gemm": "fprop", "m": 32, "k": 32, "n": 32, "device": "cuda:0"}
    expected = {
        "fp8_rowwise": "no fp8 row",
        "int8": "no int8",
        "mxfp8": "compute capability",
        "nvfp4": "compute capability",
        "fp8_block": "not a multiple of 128",
        "fp32": "another backend",
    }
    for name, reason in expected.items():
        found = backend.capability(BUILTIN_RECIPES[name], **asks)
        assert not found
        assert reason in found.reason
    assert backend.capability(BUILTIN_RECIPES["fp8_delayed"], **asks)
    assert "K = 40" in backend.capability(BUILTIN_RECIPES["fp8_tensorwise"], **{**asks, "k": 40}).reason
    with pytest.raises(UnsupportedError, match=r"nn\.Linear only"):
        backend.bind(LayerPlan.uniform(BUILTIN_RECIPES["fp8_tensorwise"]), nn.LayerNorm(4), name="x", seed=0)
    mixed = LayerPlan(fprop=BUILTIN_RECIPES["fp8_delayed"], dgrad=BUILTIN_RECIPES["fp8_delayed"])
    with pytest.raises(UnsupportedError, match="cannot mix delayed"):
        backend.bind(mixed, nn.Linear(32, 32), name="x", seed=0)


def test_without_cuda_or_the_package_it_says_so() -> None:
    assert "needs CUDA" in get("transformer_engine").available("cpu").reason
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="needs CUDA"):
            policy("fp8_tensorwise").apply(Model(), backend="transformer_engine")


def test_a_copy_of_a_model_with_delayed_layers_trains_on(te) -> None:
    model = Model()
    policy("fp8_delayed").apply(model, backend="transformer_engine")
    step(model)
    copied = copy.deepcopy(model)
    assert torch.equal(step(copied), step(model))


def test_a_phase_that_keeps_delayed_layers_keeps_what_updates_their_scales(te) -> None:
    model = Model()
    chosen = policy("fp8_delayed")
    chosen.apply(model, backend="transformer_engine")
    step(model)
    built = len(fake_te.Linear.built)
    fake_te.UPDATES.clear()
    step(model)
    before = list(fake_te.UPDATES)
    rules = [*chosen.layers[:2], LayerRule(match="head", recipe="keep")]
    later = chosen.model_copy(update={"layers": tuple(rules)})
    put_stage(later, model, backend="transformer_engine", keep=True)
    assert len(fake_te.Linear.built) == built
    fake_te.UPDATES.clear()
    step(model)
    assert before == fake_te.UPDATES
    after_step = root_of(model).after_step
    assert after_step is not None
    after_step()
    assert [*before, False] == fake_te.UPDATES
