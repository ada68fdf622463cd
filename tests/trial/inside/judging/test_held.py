"""Updates that arrive or do not, states that never decay, and what a model says of its own dtypes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.graph.analysis.modules import ModelNames
from autoprec.trial.inside.judging.by_hand import UpdateRecorder
from autoprec.trial.inside.judging.held import (
    Update,
    Weights,
    collapsed_tables,
    compensation,
    kept_in_fp32,
    lost_epsilon,
    moments,
    saved_dtypes,
)
from benchmarks.precision.running import found_in_text

BF16 = torch.bfloat16


def update_of(dtype: torch.dtype, make: Any, steps: int = 1) -> Update:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(dtype)
    optimizer = make(model.parameters())
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        weights = Weights([optimizer], ModelNames(model))
        weights.hold()
        with UpdateRecorder(model) as recorder:
            optimizer.step()
            with torch.utils._python_dispatch._disable_current_modes():
                (update,) = weights.updates(recorder)
    return update


@pytest.mark.parametrize(
    ("make", "arrives"),
    [
        (lambda p: torch.optim.AdamW(p, lr=1e-5), False),
        (lambda p: torch.optim.AdamW(p, lr=1e-5, foreach=True), False),
        (lambda p: torch.optim.AdamW(p, lr=1e-5, fused=True), False),
        (lambda p: torch.optim.SGD(p, lr=1e-6), False),
        (lambda p: torch.optim.RMSprop(p, lr=1e-6), False),
        (lambda p: torch.optim.Adam(p, lr=1e-1), True),
        (lambda p: torch.optim.SGD(p, lr=1e-1), True),
        (lambda p: torch.optim.Adagrad(p, lr=1e-1), True),
    ],
)
def test_how_much_of_an_update_bfloat16_weights_take(make: Any, arrives: bool) -> None:
    update = update_of(BF16, make)
    assert update.dtype == "bf16"
    assert update.arrives is not None
    assert (update.arrives > 0.9) == arrives
    assert (update.unchanged < 0.2) == arrives
    assert (update.update > update.half_ulp) == arrives


def test_a_later_rate_decides_where_a_schedule_rises_and_fp32_loses_nothing() -> None:
    def rising(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-4)
        return optimizer

    update = update_of(BF16, rising)
    assert (update.rate, update.peak) == (pytest.approx(1e-6), 1e-2)
    assert update.unchanged > 0.9 > 0.1 > update.at_peak
    assert update_of(torch.float32, lambda p: torch.optim.AdamW(p, lr=1e-5)).unchanged < 0.01


@pytest.mark.parametrize(
    ("dtype", "beta", "kept"),
    [
        (BF16, 0.999, 1.0),
        (BF16, 0.95, 0.0),
        (BF16, 0.9975, 0.5),
        (torch.float16, 0.999, 0.0),
        (torch.float32, 0.999, None),
    ],
)
def test_a_second_moment_that_never_decays(dtype: torch.dtype, beta: float, kept: float | None) -> None:
    parameter = nn.Parameter(torch.ones(500, dtype=dtype))
    optimizer = torch.optim.Adam([parameter], betas=(0.9, beta))
    optimizer.state[parameter] = {"step": torch.ones(1), "exp_avg_sq": (torch.rand(500) + 0.5).to(dtype)}
    found = [row["kept"] for row in moments(optimizer)]
    assert found == ([] if kept is None else [pytest.approx(kept, abs=0.3)])


def test_an_unknown_state_of_the_weight_s_shape_may_hold_what_is_lost() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = torch.optim.Adam([parameter])
    after, lost = parameter.detach(), torch.tensor([1e-3, -1e-3, 1e-3, 2e-3])
    for state, found in (
        ({"exp_avg": lost, "step": torch.ones(())}, ""),
        ({"kahan_comp": lost.to(BF16)}, "kahan_comp"),
        ({"shift": -lost}, "shift"),
        ({"master": after.float() + lost}, "master"),
        ({"low_bits": torch.zeros(4, dtype=torch.int16)}, "low_bits"),
        ({"m": torch.tensor([0.3, -0.1, 0.02, 0.9]) * 1e-3}, ""),
        ({"slow": after.float()}, ""),
        ({"comp": torch.zeros(4)}, ""),
    ):
        optimizer.state[parameter] = state
        assert compensation(optimizer, parameter, after, after.float() + lost) == found
    assert compensation(optimizer, parameter, after, after.float()) == ""  # nothing is lost


@pytest.mark.parametrize(
    ("dtype", "eps", "found"),
    [(torch.float16, 1e-8, "fp16"), (torch.float16, 1e-4, ""), (BF16, 1e-8, ""), (torch.float32, 1e-8, "")],
)
def test_an_epsilon_that_is_zero(dtype: torch.dtype, eps: float, found: str) -> None:
    assert lost_epsilon(torch.optim.Adam([nn.Parameter(torch.ones(2, dtype=dtype))], eps=eps))[1] == found


def test_modules_that_a_model_keeps_in_fp32_and_the_dtypes_of_its_checkpoint(tmp_path: Path) -> None:
    class Block(nn.Module):
        _keep_in_fp32_modules = ("wo",)

        def __init__(self) -> None:
            super().__init__()
            self.wi, self.wo, self.wow = nn.Linear(2, 2, False), nn.Linear(2, 2, False), nn.Linear(2, 2, False)

    model = nn.Sequential(Block(), Block())
    assert kept_in_fp32(model) == dict.fromkeys(("0.wo.weight", "1.wo.weight"), "_keep_in_fp32_modules")
    assert saved_dtypes(model) == {}
    header = json.dumps({"__metadata__": {}, "a.weight": {"dtype": "BF16"}, "b": {"dtype": "F8_E4M3"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "broken.safetensors").write_bytes(b"12345678nonsense")
    model.config = type("Config", (), {"_name_or_path": str(tmp_path)})()  # type: ignore[assignment]
    assert saved_dtypes(model) == {"a.weight": "bf16", "b": "f8_e4m3"}


def test_positional_tables_whose_neighbours_are_the_same() -> None:
    def table(dtype: torch.dtype) -> torch.Tensor:
        angle = torch.arange(1024).to(dtype)[:, None] * torch.exp(-torch.arange(8.0)).to(dtype)
        return torch.cat([angle.sin(), angle.cos()], -1)

    model = nn.Module()
    model.register_buffer("pe", table(torch.float32))
    model.register_buffer("rope", table(torch.float32).to(BF16))  # rounded, and all different
    model.register_buffer("emb_mask", torch.ones(1024, 8).tril())
    assert list(collapsed_tables(ModelNames(model))) == []
    model.register_buffer("pe", table(BF16).float())
    ((name, _, distinct, rows),) = collapsed_tables(ModelNames(model))
    assert (name, rows) == ("pe", 1024)
    assert distinct < 600


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("kept", ["cos", "complex", "buffer"])
def test_tables_that_are_no_buffers_and_complex_rotations(dtype: torch.dtype, kept: str) -> None:
    angle = (torch.arange(4096).to(dtype)[:, None] * torch.exp(-torch.arange(8.0)).to(dtype)).float()
    turns = torch.polar(torch.ones_like(angle), angle)
    model = nn.Sequential(nn.Module())
    if kept == "buffer":
        model[0].register_buffer("turns", turns)
    else:
        setattr(model[0], kept, turns if kept == "complex" else angle.cos())
    found = list(collapsed_tables(ModelNames(model)))
    assert [name for name, *_ in found] == ([] if dtype is torch.float32 else [f"0.{kept.replace('buffer', 'turns')}"])
    assert all(distinct < rows == 4096 for *_, distinct, rows in found)


def test_complex_numbers_that_are_no_rotations_are_no_table() -> None:
    model = nn.Module()
    model.weight_of_waves = torch.view_as_complex(torch.randint(0, 5, (1024, 8, 2)).float())
    model.one = torch.ones(1024, 8, dtype=torch.complex64)
    assert list(collapsed_tables(ModelNames(model))) == []


_OWN_STEP = """
import torch
from torch import nn
torch.manual_seed(0)
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-5):
        super().__init__(params, {"lr": lr})
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                BODY
net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 8)).to(WEIGHTS)
optimizer = Own(net.parameters())
for step in range(3):
    loss = nn.functional.cross_entropy(net(torch.randn(16, 32).to(WEIGHTS)).float(), torch.randint(8, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_LION = "m = state.setdefault('m', torch.zeros_like(p)); p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-group['lr']); "
_SIGN = "state.setdefault('slow', p.detach().clone()); p.add_(p.grad.sign(), alpha=-group['lr'])"
_KAHAN = (
    "c = state.setdefault('c', torch.zeros_like(p)); u = c - group['lr'] * p.grad.sign(); w = p + u; "
    "c.copy_(u - (w - p)); p.copy_(w)"
)
_MASTER = (
    "m = state.setdefault('m', p.detach().float()) if state else state.setdefault('m', p.detach().float()); "
    "m.add_(p.grad.float().sign(), alpha=-group['lr']); p.copy_(m)"
)
_FACTORED = (
    "sq = p.grad.float().square().reshape(len(p), -1).mean(1); v = state.setdefault('row', sq.to(torch.bfloat16)); "
    "v.mul_(0.999).add_(sq.to(v.dtype), alpha=0.001); p.sub_(group['lr'] * p.grad)"
)


@pytest.mark.parametrize(
    ("body", "weights", "codes"),
    [
        (_LION + "m.mul_(0.99).add_(p.grad, alpha=0.01)", "torch.bfloat16", {"updates-lost"}),
        (_LION + "m.lerp_(p.grad, 0.01)", "torch.bfloat16", {"updates-lost"}),
        (_SIGN, "torch.bfloat16", {"updates-lost"}),
        (_KAHAN, "torch.bfloat16", set()),
        (_MASTER, "torch.bfloat16", set()),
        (_LION + "m.mul_(0.99).add_(p.grad, alpha=0.01)", "torch.float32", set()),
        (_FACTORED, "torch.float32", {"moment-16bit"}),
        (_FACTORED.replace("sq.to(torch.bfloat16)", "sq.clone()"), "torch.float32", set()),
        (_FACTORED.replace("0.999", "0.9").replace("0.001", "0.1"), "torch.float32", set()),
    ],
)
def test_a_hand_written_optimizer_s_state_is_told_from_a_compensation(body: str, weights: str, codes: set[str]) -> None:
    found = found_in_text(_OWN_STEP.replace("BODY", body).replace("WEIGHTS", weights))
    assert {one.code for one in found if one.severity == "error"} == codes
