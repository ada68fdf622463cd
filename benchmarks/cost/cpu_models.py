"""Ten small models and three policies on this CPU: what a step takes and saves, for benchmarks/cost/cost_model.py."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, causal: bool, gated: bool = False, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.ln1, self.ln2 = norm(width), norm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gate = nn.Linear(width, 4 * width) if gated else None
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        h = self.ln1(x)
        q, k, v = (f(h).view(batch, seq, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.o(y.transpose(1, 2).reshape(batch, seq, width))
        h = self.ln2(x)
        up = self.up(h)
        return x + self.down(F.silu(self.gate(h)) * up if self.gate is not None else F.gelu(up))


class Decoder(nn.Module):
    """GPT or Llama-like language model."""

    def __init__(self, width: int, depth: int, heads: int, vocab: int, seq: int, *, gated: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.embed, self.position = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.h = nn.ModuleList(Block(width, heads, causal=True, gated=gated, norm=norm) for _ in range(depth))
        self.norm, self.head = norm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), target.flatten())


class Encoder(nn.Module):
    """Vision transformer or text classifier over patches."""

    def __init__(self, width: int, depth: int, heads: int, patch: int, classes: int) -> None:
        super().__init__()
        self.patch = nn.Linear(patch, width)
        self.h = nn.ModuleList(Block(width, heads, causal=False) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.patch(x)
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)).float(), target)


class Mlp(nn.Module):
    """Plain multi-layer perceptron."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return F.cross_entropy(self.layers[-1](x).float(), target)


class Conv(nn.Module):
    """Small residual convolutional network."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), target)


def _text(batch: int, seq: int, vocab: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, vocab, (batch, seq)), torch.randint(0, vocab, (batch, seq))


#: name -> (model, batch); small enough for seconds, different enough in what dominates.
MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]] = {
    "gpt 128x3": lambda: (Decoder(128, 3, 4, 256, 64), _text(8, 64, 256)),
    "gpt 256x4": lambda: (Decoder(256, 4, 4, 256, 128), _text(6, 128, 256)),
    "gpt 384x2 vocab 4096": lambda: (Decoder(384, 2, 6, 4096, 128), _text(4, 128, 4096)),
    "gpt long 128x2": lambda: (Decoder(128, 2, 4, 256, 512), _text(2, 512, 256)),
    "llama 256x3": lambda: (Decoder(256, 3, 4, 1024, 128, gated=True), _text(6, 128, 1024)),
    "llama 512x2": lambda: (Decoder(512, 2, 8, 512, 64, gated=True), _text(8, 64, 512)),
    "vit 192x4": lambda: (Encoder(192, 4, 6, 192, 10), (torch.randn(16, 64, 192), torch.randint(0, 10, (16,)))),
    "mlp 1024": lambda: (Mlp((512, 1024, 1024, 1024, 10)), (torch.randn(256, 512), torch.randint(0, 10, (256,)))),
    "mlp 4096 wide": lambda: (Mlp((256, 4096, 256, 10)), (torch.randn(512, 256), torch.randint(0, 10, (512,)))),
    "conv 64x4": lambda: (Conv(64, 4), (torch.randn(8, 3, 24, 24), torch.randint(0, 10, (8,)))),
}

_ROW = {
    "format": "fp8",
    "scaling": {"granularity": "row", "scale": "current", "power_of_2": True},
    "operands": {"input": "e4m3", "weight": "e4m3", "grad_output": "e4m3"},
}
#: name -> policy document without layers of convolutional models in 8 bits
POLICIES: dict[str, dict[str, Any]] = {
    "script": {},
    "bf16": {"recipes": {"bf16": {"format": "bf16"}}, "default": "bf16", "activations": "bf16"},
    "fp8_rowwise": {
        "recipes": {"bf16": {"format": "bf16"}, "row": _ROW},
        "layers": [
            {"match": "*conv*", "recipe": "bf16", "optional": True},
            {"match": "stem", "recipe": "bf16", "optional": True},
        ],
        "default": "row",
        "activations": "bf16",
    },
}


def measure(model: nn.Module, batch: tuple[Tensor, Tensor], steps: int = 5) -> tuple[float, int]:
    """Return the shortest of several step times (process CPU seconds) and the bytes saved for backward."""
    from autoprec.graph.recorder import StepRecorder

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    times = []
    for _ in range(steps):
        start = time.process_time()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - start)
    with StepRecorder(model, optimizers=(optimizer,)) as recorder:
        model(*batch).backward()
    return statistics.median(sorted(times)[: max(2, steps // 2)]), recorder.report().memory["saved_for_backward"]


def cases() -> list[dict[str, Any]]:
    """Return one row per model and policy: measured and modelled milliseconds and bytes."""
    from autoprec.applying.policy import apply_policy, remove_policy
    from autoprec.cost import CostModel
    from autoprec.cost.saved import Setting, saved_bytes
    from autoprec.graph.recorder import StepRecorder
    from autoprec.policy import policy_from_dict, resolve
    from autoprec.precision.hardware import target

    torch.set_num_threads(1)
    rows = []
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, batch = make()
        optimizer = torch.optim.AdamW(model.parameters())
        with StepRecorder(model, optimizers=(optimizer,)) as recorder:
            model(*batch).backward()
        report = recorder.report()
        model.zero_grad()
        cost = CostModel(report, target("cpu"))
        for policy_name, document in POLICIES.items():
            policy = policy_from_dict({"schema": "autoprec.policy/1", **document})
            apply_policy(policy, model)
            seconds, saved = measure(model, batch)
            remove_policy(model)
            plans = resolve(policy, [layer.name for layer in report.tunable])
            found = cost.estimate(plans, activations=policy.activations)
            rows.append(
                {
                    "model": name,
                    "policy": policy_name,
                    "measured_ms": seconds * 1e3,
                    "modelled_ms": found.time_ms,
                    "measured_saved": saved,
                    "modelled_saved": saved_bytes(report, Setting(plans, policy.activations))[0],
                    "breakdown": found.breakdown,
                }
            )
    return rows
