"""Optimizers, stored state and loss scaling next to their originals."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.optim.codecs import CODECS
from autoprec.optim.loss_scaling import LossScaler
from autoprec.optim.optimizer import wrap_optimizer
from autoprec.policy import OptimizerPolicy
from benchmarks.numerics.originals_rows import E4M3, Row, comparison, normal, version


# --- optimizers and loss scaling --------------------------------------------------------------------------------------
@comparison
def optimizers() -> Iterator[Row]:
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False),
        "Adam, L2": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.1, foreach=False),
    }
    for name, make in makers.items():
        weights = []
        for wrapped in (True, False):
            weight = nn.Parameter(normal(32, 48))
            optimizer = make([weight])
            if wrapped:  # lossless storage would not be wrapped: gradients stored in bf16 that are bf16 already
                wrap_optimizer(optimizer, OptimizerPolicy(gradients="bf16"))
            for step in range(20):
                weight.grad = normal(32, 48, seed=step).bfloat16().float()
                optimizer.step()
            weights.append(weight.detach().clone())
        yield Row(f"{name}, 20 steps", version("torch"), weights[0], weights[1])


@comparison
def stored_state() -> Iterator[Row]:
    from torchao.optim import quant_utils
    from torchao.optim.subclass_fp8 import quantize_fp8

    table = torch.tensor(quant_utils.create_dynamic_map(False))
    x = normal(64, 256).square()
    x[:, 0] = x.abs().amax(1) * 1.5
    theirs_in, scale = quant_utils.scale_tensor(x.reshape(-1), 256)
    codes = quant_utils.quantize_8bit_with_qmap(theirs_in, table)
    theirs = quant_utils.dequant_with_qmap(codes, table, scale).view(x.shape)
    how = CODECS["exp_avg_sq", "int8_block"]
    yield Row(
        "8-bit dynamic map, blocks of 256",
        version("torchao"),
        how.decode(how.encode(x), x.shape),
        theirs,
        0.0085,
        "one code at the edge of a decade; a second moment is never 0",
    )
    values = how.decode(how.encode(table.repeat(1).view(1, 256)), torch.Size([1, 256]))
    keep = table != 0
    yield Row(
        "its 256 values",
        f"{version('torchao')} (bitsandbytes' map)",
        values[0][keep],
        table[keep],
        2.0**-22,
        "float32 means of float32 bounds",
    )
    x = normal(64, 256) * torch.exp(normal(64, 1, seed=4) * 4)
    codes, scale = quantize_fp8(x, 128)
    theirs = (codes.float().view(-1, 128) * scale.view(-1, 1)).view(x.shape)
    how = CODECS["exp_avg", "e4m3"]
    yield Row(
        "E4M3 first moment, exact scale",
        f"{version('torchao')} AdamWFp8, blocks of 128",
        how.decode(how.encode(x), x.shape),
        theirs,
        2.0**-4,
        "our scale has 20 bits, so that a resumed run repeats its codes",
    )


@comparison
def bitsandbytes_state() -> Iterator[Row]:
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    from bitsandbytes import functional

    for key, signed in ((("exp_avg_sq", "int8_block"), False), (("exp_avg", "int8_block"), True)):
        x = normal(64, 256) if signed else normal(64, 256).square()
        codes, state = functional.quantize_blockwise(
            x.reshape(-1), code=functional.create_dynamic_map(signed=signed), blocksize=256
        )
        how = CODECS[key]
        yield Row(
            f"8-bit {'signed' if signed else 'unsigned'} state of AdamW8bit",
            f"{version('bitsandbytes')} quantize_blockwise",
            how.decode(how.encode(x), x.shape),
            functional.dequantize_blockwise(codes, state).view(x.shape),
            0.0142 if signed else 0.0071,
            "a neighbouring code, where a value lies near the middle of two",
        )


@comparison
def gradient_penalty() -> Iterator[Row]:
    """``create_graph=True`` under loss scaling: the documentation of torch unscales by hand what it differentiates."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)), normal(8, 16)
    seen = []
    for ours in (False, True):
        if ours:
            LossScaler.install(model, []).scale = 2.0**10
        given = x.clone().requires_grad_()
        out = model(given)
        scale = 1.0 if ours else 2.0**10
        (slope,) = torch.autograd.grad(out.sum() * scale, given, create_graph=True)
        loss = out.mean() + ((slope / scale).norm(dim=1) - 1).square().mean()
        gradients = torch.autograd.grad(loss * scale, list(model.parameters()), allow_unused=True)
        seen.append(torch.cat([g.reshape(-1) / scale for g in gradients if g is not None]))
    yield Row("gradient penalty under loss scaling", f"{version('torch')} amp_examples.rst", seen[1], seen[0], 2.0**-20)


@comparison
def msamp() -> Iterator[Row]:
    """MS-AMP 0.4 ``common/tensor/meta.py``: ``2 ** floor(log2(max / amax))``, one scale per tensor."""
    for key, dtype in (
        (("exp_avg", "e4m3_tensor"), E4M3),
        (("exp_avg_sq", "fp16_tensor"), torch.float16),
        (("weights", "fp16_scaled"), torch.float16),
        (("gradients", "e4m3_tensor"), E4M3),
    ):
        x = normal(128, 128, seed=6) * 3e-5
        x = x.square() if key[0] == "exp_avg_sq" else x
        scale = 2.0 ** math.floor(math.log2(torch.finfo(dtype).max / x.abs().max().item()))
        how = CODECS[key]
        yield Row(
            f"{key[0]}: {key[1]}",
            "MS-AMP 0.4 common/tensor/meta.py, transcribed",
            how.decode(how.encode(x), x.shape),
            (x * scale).to(dtype).float() / scale,
        )


@comparison
def kahan() -> Iterator[Row]:
    """torchdistx ``optimizers/anyprecision_optimizer.py``: p + compensation, both bfloat16."""
    how = CODECS["weights", "bf16_kahan"]
    exact = normal(64, 64)
    p, lost = exact.bfloat16(), torch.zeros(64, 64, dtype=torch.bfloat16)
    lost = (exact - p.float()).bfloat16()
    parts = how.encode(exact)
    for step in range(50):
        delta = normal(64, 64, seed=step) * 1e-3
        lost = (lost.float() + delta).bfloat16()
        before = p.clone()
        p = (p.float() + lost.float()).bfloat16()
        lost = (lost.float() + (before.float() - p.float())).bfloat16()
        parts = how.encode(how.exact(parts, exact.shape) + delta)
    yield Row(
        "Kahan weights after 50 updates",
        "torchdistx 0.2 AnyPrecisionAdamW, transcribed",
        how.decode(parts, exact.shape),
        p.float(),
        2.0**-8,
        "the original rounds the update to bfloat16 before it is added, ours after",
    )


class Half(nn.Module):
    """A layer whose gradient passes through FP16, and a loss of its own beside the logits."""

    def __init__(self, returns: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.returns = nn.Linear(16, 16), returns

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x).half().float()
        return self.returns(logits.square().mean(), logits)


@dataclass
class Output:
    """A model output as Hugging Face's."""

    loss: Tensor
    logits: Tensor


@comparison
def loss_scaling() -> Iterator[Row]:
    shapes: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
        "a tensor": (lambda _loss, logits: logits, lambda o: (o.square().mean(), o)),
        "a tuple": (lambda loss, logits: (loss, logits), lambda o: o),
        "a dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda o: (o["loss"], o["logits"])),
        "a dataclass": (Output, lambda o: (o.loss, o.logits)),
        "nested": (lambda loss, logits: [{"a": Output(loss, logits)}, (logits,)], lambda o: (o[0]["a"].loss, o[1][0])),
    }
    for name, (returns, read) in shapes.items():
        torch.manual_seed(0)
        model = Half(returns)

        def gradient(scaler: Any = None, model: Half = model, read: Any = read) -> Tensor:
            model.zero_grad()
            loss, logits = read(model(normal(8, 16)))
            total = (loss + 0.1 * logits.abs().mean()) * 2.0**-18
            (total if scaler is None else scaler.scale(total)).backward()
            assert model.linear.weight.grad is not None
            return model.linear.weight.grad / (1.0 if scaler is None else scaler.get_scale())

        theirs = gradient(torch.amp.GradScaler("cpu"))
        assert LossScaler.install(model, []).active
        ours = gradient()
        yield Row(f"dynamic scaling, the model returns {name}", f"{version('torch')} GradScaler", ours, theirs)


@comparison
def loss_scale() -> Iterator[Row]:
    overflows = [step in (0, 1, 7, 30, 31) for step in range(60)]
    weight = nn.Parameter(torch.zeros(4))
    scaler, theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5), []
    plain = torch.optim.SGD([weight], 0.1)
    for bad in overflows:
        weight.grad = torch.full((4,), float("inf") if bad else 1.0) * scaler.scale(torch.ones(()))
        scaler.step(plain)
        scaler.update()
        theirs.append(scaler.get_scale())
    del scaler
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    installed, ours = LossScaler.install(model, [optimizer]), []
    installed.scale, installed.growth_interval = 2.0**16, 5
    for bad in overflows:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float("inf") if bad else 1.0)
        optimizer.step()
        ours.append(installed.scale)
    yield Row(
        "loss scale over 60 steps with overflows",
        f"{version('torch')} GradScaler",
        torch.tensor(ours),
        torch.tensor(theirs),
    )
