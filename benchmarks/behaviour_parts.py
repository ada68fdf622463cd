"""The parts of behaviour.py that compute: recipes, optimizer formats, graph reports, recorded searches."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec import Policy
from autoprec.precision.recipes import BUILTIN_RECIPES

#: Trial seeds of each recorded search.
SEARCH_SEEDS = (0, 1)
#: Values of the optimizer's settings: the default of each first. Those that a version lacks are items that are gone.
OPTIMIZER = {
    "weights": ("fp32", "fp16_scaled", "bf16_stochastic", "bf16_kahan", "e4m3_master"),
    "exp_avg": ("fp32", "bf16", "e4m3", "e4m3_tensor", "int8_block"),
    "exp_avg_sq": ("fp32", "fp16_scaled", "fp16_tensor", "int8_block"),
    "gradients": ("fp32", "bf16", "e4m3", "e4m3_tensor"),
}


def document(recipe: str = "keep", **rest: Any) -> dict[str, Any]:
    """Return a policy document that runs every layer in a built-in recipe."""
    recipes = {recipe: BUILTIN_RECIPES[recipe].to_dict()} if recipe != "keep" else {}
    return {"schema": "autoprec.policy/1", "recipes": recipes, "default": recipe, **rest}


def raw(tensors: dict[str, Any] | list[Any]) -> bytes:
    """Return the bytes of tensors and plain values, with dtypes and shapes."""
    leaves, spec = torch.utils._pytree.tree_flatten(tensors)
    out = [str(spec).encode()]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            out.append(repr(leaf).encode())
            continue
        plain = leaf.detach().contiguous()
        out += [f"{plain.dtype}{tuple(plain.shape)}".encode(), plain.flatten().view(torch.uint8).numpy().tobytes()]
    return b"\0".join(out)


class Layers(nn.Module):
    """Linear, convolution and linear again, sizes that are not multiples of any block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(80, 96), nn.Conv2d(3, 8, 3, padding=1), nn.Linear(256, 48)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.first(x)).view(-1, 3, 4, 8)
        return self.last(self.conv(h).flatten(1))


#: How a step is run: by Inductor only under a few recipes, since a C++ compiler takes seconds for each.
WAYS = ("eager", "checkpointed", "aot_eager", "inductor")
INDUCTOR = ("fp8_rowwise", "nvfp4_plain")


def two_steps(model: nn.Module, way: str) -> list[Any]:
    """Return outputs and gradients (input, weights, biases) of two steps: delayed scales need a history."""
    dtype = next(model.parameters()).dtype
    call: Any = torch.compile(model, backend=way, dynamic=False) if way in WAYS[2:] else model
    out: list[Any] = []
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        x = (torch.randn(48, 80, generator=draw) * torch.exp(torch.randn(48, 80, generator=draw))).to(dtype)
        x.requires_grad_()
        y = checkpoint(call, x, use_reentrant=False) if way == "checkpointed" else call(x)
        model.zero_grad(set_to_none=True)
        y.backward(torch.randn(y.shape, generator=draw).to(dtype) * 1e-3)
        out += [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    return out


def recipes(_: Path) -> Iterator[tuple[str, bytes | str]]:
    """Outputs and gradients under every built-in recipe."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    whole = Layers()
    for name, dtype in itertools.product(BUILTIN_RECIPES, (torch.float32, torch.bfloat16)):
        policy = document(name)
        if name not in ("fp32", "bf16", "fp16"):
            policy["layers"] = [{"match": "conv", "recipe": "keep"}]
        for way in WAYS:
            if (way in WAYS[2:] and dtype == torch.bfloat16) or (way == "inductor" and name not in INDUCTOR):
                continue
            torch._dynamo.reset()
            model = copy.deepcopy(whole).to(dtype)
            try:
                Policy.model_validate(policy).apply(model, backend="emulated")
                yield f"{name}, {str(dtype)[6:]}, {way}", raw(two_steps(model, way))
            except Exception as error:
                yield f"{name}, {str(dtype)[6:]}, {way}", type(error).__name__


def optimizers(_: Path) -> Iterator[tuple[str, bytes | str]]:
    """Weights and state after five steps under every optimizer setting, alone and some together."""
    warnings.simplefilter("ignore")
    single = [{key: value} for key, values in OPTIMIZER.items() for value in values[1:]]
    together = [
        dict(zip(OPTIMIZER, values, strict=True)) for values in zip(*(v[:4] for v in OPTIMIZER.values()), strict=True)
    ]
    made = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    }
    for settings, (kind, make) in itertools.product([*single, *together], made.items()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 72), nn.Linear(72, 130), nn.ReLU(), nn.Linear(130, 40))
        said = ", ".join([kind, *(f"{key}={value}" for key, value in settings.items())])
        try:
            policy = Policy.model_validate(document("bf16", optimizer=settings))
            policy.apply(model, backend="emulated")
            optimizer = policy.wrap_optimizer(make(model.parameters()), model)
            for _step in range(5):
                optimizer.zero_grad()
                model(torch.randint(50, (16,))).logsumexp(-1).mean().backward()
                optimizer.step()
            yield said, raw([model.state_dict(), plain(optimizer.state_dict())])
        except Exception as error:
            yield said, type(error).__name__


def plain(value: Any) -> Any:
    """Return a state dict without objects of other classes, whose repr may carry an address."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter):
        return plain({k: v for k, v in vars(value).items() if isinstance(v, Tensor)} | {"value": value.float() + 0})
    return value if isinstance(value, (Tensor, int, float, str, type(None))) else type(value).__name__


def graphs(_: Path) -> Iterator[tuple[str, str]]:
    """Graph reports of one step of every plain model of the zoo."""
    from autoprec.graph import StepRecorder
    from benchmarks.graph.zoo import MODELS

    warnings.simplefilter("ignore")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, inputs = build()
        with StepRecorder(model) as recorder:
            model(**inputs).backward()
        yield name, json.dumps(recorder.report().to_json(), indent=1, sort_keys=True, default=str)


def searches(_: Path) -> Iterator[tuple[str, str]]:
    """The recorded cases: what was asked in which order under which seed, what was decided, and its plans."""
    import optuna

    from benchmarks.search.cases import REPORTED
    from benchmarks.search.finals import searched
    from benchmarks.search.ground_truth import Case

    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for name in REPORTED:
        case = Case.load(name)
        for seed in SEARCH_SEEDS:
            runs: list[str] = []
            ending = searched(case, seed, told=runs)
            said = {"verdict": "adopt" if ending.row else "stay", "runs": ending.runs, "converged": ending.converged}
            if ending.row:
                params = case.params(ending.row)
                said |= {"policy": params, "plans": {k: str(v) for k, v in case.problem.plans(params).items()}}
            said |= {"asked": [case.params(row) for row in ending.asked], "order": runs}
            yield f"{name}, seed {seed}", json.dumps(said, indent=1, sort_keys=True, default=str)
