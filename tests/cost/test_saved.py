"""The modelled bytes saved for backward against what autograd really saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.applying.policy import apply_policy, remove_policy
from autoprec.cost.saved import Setting, saved_bytes, walked
from autoprec.graph.recorder import StepRecorder
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, resolve
from autoprec.precision.recipes import BUILTIN_RECIPES as R
from benchmarks.cost.decoder import DecoderConfig, decoder_report


class Block(nn.Module):
    """Attention with separate projections, and a gated MLP."""

    def __init__(self, width: int, norm: Any) -> None:
        super().__init__()
        self.n1, self.n2 = norm(width), norm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(width, 80), nn.Linear(width, 80), nn.Linear(80, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.n1(x)
        q, k, v = (f(h).view(b, t, 2, d // 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Written(nn.Module):
    """Attention in batched products and a softmax, with dropout and GELU's tanh written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.o = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 96), nn.Linear(96, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-1, -2) / d**0.5, dim=-1)
        out = torch.matmul(F.dropout(scores, 0.1), v).transpose(1, 2).reshape(b, t, d)
        x = x + F.dropout(self.o(out), 0.1)
        h = self.up(x)
        h = 0.5 * h * (1.0 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3.0))))
        out: Tensor = x + self.down(h)
        return out


class MathAttention(Block):
    """Attention that torch writes out because of its dropout."""

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.n1(x)
        q, k, v = (f(h).view(b, t, 2, d // 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)
        return x + self.o(y.transpose(1, 2).reshape(b, t, d))


def transformer(norm: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(24, 32), Block(32, norm), Block(32, norm), nn.LayerNorm(32))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "gated transformer": (transformer(nn.LayerNorm), (3, 20, 24)),
    "rms transformer": (transformer(nn.RMSNorm), (3, 20, 24)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 8)),
        (12, 40),
    ),
    "attention written out": (lambda: nn.Sequential(nn.Linear(24, 32), Written(32), Written(32)), (3, 20, 24)),
    "attention by torch's products": (
        lambda: nn.Sequential(nn.Linear(24, 32), MathAttention(32, nn.LayerNorm), MathAttention(32, nn.RMSNorm)),
        (3, 20, 24),
    ),
    "square": (lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), (32, 32)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        (2, 3, 10, 10),
    ),
}
POLICIES = {
    "bf16": Policy(recipes={"r": R["bf16"]}, default="r", activations="bf16"),
    "bf16 alone": Policy(recipes={"r": R["bf16"]}, default="r"),
    "rowwise": Policy(recipes={"r": R["fp8_rowwise"]}, default="r", activations="bf16"),
    "tensorwise": Policy(recipes={"r": R["fp8_tensorwise_e4m3"]}, default="r", activations="bf16"),
}


def record(model: nn.Module, x: Tensor) -> GraphReport:
    torch.manual_seed(1)
    with StepRecorder(model) as recorder:
        model(x).float().square().mean().backward()
    model.zero_grad()
    return recorder.report()


#: Convolutions have no 8-bit recipe.
CASES = [(n, p) for n in MODELS for p in POLICIES if n != "convolutions" or p.startswith("bf16")]


@pytest.mark.usefixtures("fresh_plans")
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_modelled_bytes_are_what_autograd_saves(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # what is modelled is a device that saves 8-bit codes; a CPU without bf16 units saves float32 values in their place
    monkeypatch.setattr("autoprec.numerics.gemm.fast_bf16_gemm", lambda _device_type: True)
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(*shape)
    before = record(model, x)
    apply_policy(POLICIES[policy], model)
    measured = record(model, x).memory["saved_for_backward"]
    remove_policy(model)
    plans = resolve(POLICIES[policy], [layer.name for layer in before.tunable])
    modelled, copies = saved_bytes(before, Setting(plans, POLICIES[policy].activations))
    assert modelled == pytest.approx(measured, rel=0.03)
    assert 0 <= copies <= modelled


@pytest.mark.parametrize("attention", ["keep", "fp32"])
@pytest.mark.parametrize("norm", ["keep", "fp32"])
def test_what_a_policy_keeps_in_float32_is_saved_so(attention: str, norm: str) -> None:
    make, shape = MODELS["gated transformer"]
    torch.manual_seed(0)
    model, x = make(), torch.randn(*shape)
    before = record(model, x)
    policy = Policy(
        recipes={"r": R["bf16"]}, default="r", activations="bf16", operators={"attention": attention, "norm": norm}
    )
    apply_policy(policy, model)
    measured = record(model, x).memory["saved_for_backward"]
    remove_policy(model)
    wide = [name for name, dtype in (("attention", attention), ("norm", norm)) if dtype == "fp32"]
    plans = resolve(policy, [layer.name for layer in before.tunable])
    assert saved_bytes(before, Setting(plans, "bf16", fp32_operators=wide))[0] == pytest.approx(measured, rel=0.03)


def test_the_script_as_written_is_what_was_counted() -> None:
    make, shape = MODELS["mlp"]
    report = record(make(), torch.randn(*shape))
    assert saved_bytes(report, Setting())[0] == report.memory["saved_for_backward"]
    walk = walked(report, Setting())
    assert walk.total + walk.weights == pytest.approx(report.memory["saved_for_backward"], rel=0.03)


def test_without_a_count_of_each_tensor_the_rules_alone_still_shrink_with_the_policy() -> None:
    from dataclasses import replace

    make, shape = MODELS["gated transformer"]
    report = record(make(), torch.randn(*shape))
    blind = replace(report, operators=tuple(replace(row, out_saved=()) for row in report.operators))
    plans = resolve(POLICIES["rowwise"], [layer.name for layer in report.tunable])
    assert saved_bytes(blind, Setting())[0] == report.memory["saved_for_backward"]
    assert saved_bytes(blind, Setting(plans, "bf16"))[0] == pytest.approx(
        saved_bytes(report, Setting(plans, "bf16"))[0], rel=0.2
    )


def test_a_gpu_keeps_quantised_weights() -> None:
    make, shape = MODELS["mlp"]
    report = record(make(), torch.randn(*shape))
    plans = resolve(POLICIES["rowwise"], [layer.name for layer in report.tunable])
    on_cpu, on_gpu = (saved_bytes(report, Setting(plans, "bf16", gpu=gpu)) for gpu in (False, True))
    assert on_gpu[1] > on_cpu[1]
    assert on_gpu[0] - on_cpu[0] == on_gpu[1] - on_cpu[1]


def test_nothing_counted_means_nothing_modelled() -> None:
    from dataclasses import replace

    report = decoder_report(DecoderConfig(64, 1, 4, 256, 64), batch=1, seq=8)
    assert saved_bytes(replace(report, memory={}), Setting()) == (0, 0)


class Checkpointed(nn.Module):
    """Blocks that run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(32, nn.LayerNorm) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_checkpointed_blocks_save_their_inputs_only() -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(), torch.randn(3, 20, 32)
    before = record(model, x)
    apply_policy(POLICIES["bf16"], model)
    measured = record(model, x).memory["saved_for_backward"]
    remove_policy(model)
    plans = resolve(POLICIES["bf16"], [layer.name for layer in before.tunable])
    assert saved_bytes(before, Setting(plans, "bf16"))[0] == pytest.approx(measured, rel=0.05)
