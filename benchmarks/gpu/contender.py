"""One contender of ``turns.py``: trains in a process of its own, and does a block of steps when it is asked to.

    python benchmarks/gpu/contender.py '{"precision": "native-fp8_tensorwise", "model": "llama-1.3b", "compiled": true}'

It builds the model, converts it, compiles its blocks and takes three steps; then it prints a line of JSON that says so,
and for every line ``N`` on its standard input one with the milliseconds of each of ``N`` steps.

Precisions: ``bf16`` (autocast alone); torchao's (``torchao-tensorwise``, with fast accumulation in fprop as it is by
default; ``torchao-tensorwise-full``; ``torchao-rowwise``; ``torchao-rowwise_with_gw_hp``); Transformer Engine's
(``te-delayed``, ``te-current``); ours by the native backend: ``native-RECIPE``, with ``-fast`` for fast accumulation in
fprop, ``-mlp`` for the MLPs alone, ``-blocks`` for blocks compiled under an eager script; ``policy:FILE``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from benchmarks.gpu.train_transformer import MODELS, Block, Shape, Transformer, convert  # noqa: E402

#: Four blocks without embedding or head, forward and backward alone: what a layer costs.
BLOCKS = {"blocks": Shape(4096, 4, 32, 2048, 4, 0), "tiny-blocks": Shape(64, 2, 2, 32, 2, 0)}
SETTLING = 3


def policy_of(precision: str) -> Any:
    """Return the policy that a name beginning with ``native-`` or ``policy:`` stands for."""
    import autoprec
    from autoprec.precision.recipes import BUILTIN_RECIPES

    if precision.startswith("policy:"):
        return autoprec.load(precision.removeprefix("policy:"))
    name, *marks = precision.removeprefix("native-").split("-")
    recipes = {name: BUILTIN_RECIPES[name].model_dump(exclude_none=True)}
    rule: dict[str, Any] = {"match": "*mlp*" if "mlp" in marks else "*", "recipe": name}
    if "fast" in marks:
        recipes["fast"] = recipes[name] | {"accumulation": "fast"}
        rule["gemms"] = {"fprop": "fast"}
    document = {"recipes": recipes, "layers": [{"match": "head", "recipe": "keep", "optional": True}, rule]}
    execution = "compile" if "blocks" in marks else "keep"
    return autoprec.Policy.model_validate(document | {"activations": "bf16", "execution": execution})


def built(shape: Shape, precision: str, *, blocks_alone: bool, device: str) -> tuple[nn.Module, Callable[[], Any]]:
    """Return the model in a precision, and what goes around its forward pass."""
    torch.manual_seed(0)
    with torch.device(device):
        stack = [Block(shape, causal=True) for _ in range(shape.depth)] if blocks_alone else []
        model: nn.Module = nn.Sequential(*stack) if blocks_alone else Transformer(shape)  # type: ignore[no-untyped-call]
    if precision.startswith(("native-", "policy:")):
        backend = "native" if precision.startswith("native-") else "auto"
        policy_of(precision).apply(model, backend=backend)
        return model, contextlib.nullcontext
    if precision == "torchao-tensorwise-full":
        _torchao_full(model)
        return model, contextlib.nullcontext
    return model, convert(model, precision)  # type: ignore[no-untyped-call]


def _torchao_full(model: nn.Module) -> None:
    """Convert by torchao with full accumulation in fprop as well, which none of its named recipes has."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8GemmConfig

    config = Float8LinearConfig(gemm_config_output=Float8GemmConfig(use_fast_accum=False))
    convert_to_float8_training(model, module_filter_fn=lambda _module, name: name != "head", config=config)


def stepper(asked: dict[str, Any], device: str) -> Callable[[], torch.Tensor]:
    """Return what takes one training step and returns its loss; blocks alone take no optimizer step."""
    name, micro = asked["model"], int(asked.get("micro_batches", 1))
    alone = name in BLOCKS
    shape = (BLOCKS if alone else MODELS)[name]
    model, around = built(shape, asked["precision"], blocks_alone=alone, device=device)
    for block in (model if alone else model.blocks) if asked["compiled"] else ():  # type: ignore[union-attr]
        block.compile()
    batches = data(shape, device, alone=alone)
    optimizer = None if alone else torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = torch.zeros(())
        for _ in range(micro):
            x, y = next(batches)
            with torch.autocast(device, torch.bfloat16), around():
                out = model(x)
            loss = out.float().square().mean() if alone else F.cross_entropy(out.float().flatten(0, -2), y.flatten())
            (loss / micro).backward()
        if optimizer is not None:
            optimizer.step()
        return loss.detach()

    return step


def data(shape: Shape, device: str, *, alone: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches that lie on the device: activations for blocks, tokens and their successors for a model."""
    generator = torch.Generator(device).manual_seed(0)
    while True:
        if alone:
            x = torch.randn(shape.batch, shape.context, shape.width, device=device, generator=generator)
            yield x.requires_grad_(), x
        else:
            size = (shape.batch, shape.context + 1)
            tokens = torch.randint(shape.vocabulary, size, device=device, generator=generator)
            yield tokens[:, :-1], tokens[:, 1:]


def timed(step: Callable[[], torch.Tensor], steps: int, device: str) -> list[float]:
    """Return milliseconds of each step: by the device's own clock, on a CPU by the processor's."""
    if device == "cpu":
        marks = [time.process_time()]
        for _ in range(steps):
            step()
            marks.append(time.process_time())
        return [1e3 * (after - before) for before, after in itertools.pairwise(marks)]
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]  # type: ignore[no-untyped-call]
    step()  # the clocks of a device that waited are low
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def main() -> None:
    """Answer on standard output until standard input ends."""
    asked = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    began = time.monotonic()
    step = stepper(asked, device)
    losses = [float(step()) for _ in range(SETTLING)]
    memory = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    ready = {"ready_s": round(time.monotonic() - began, 1), "loss": losses[-1], "memory_bytes": memory}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps({"ms": timed(step, int(line), device)}), flush=True)


if __name__ == "__main__":
    main()
