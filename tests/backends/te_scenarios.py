"""What AutoPrec's backend does to Transformer Engine's own state machine, in one process: prints JSON by scenario.

``python -m tests.backends.te_scenarios FOLDER MAJOR.MINOR``: the folder holds TE's Python, the second is the compute
capability to pretend. Hazards are those that running TE's Python has shown (see ``docs/numerics.md``).
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.backends import te_extension

torch.manual_seed(0)
X = torch.randn(128, 128, generator=torch.Generator().manual_seed(1))
BACKEND = "transformer_engine"


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first, self.second, self.head = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 16)
        self.recompute = recompute
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.05)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return self.head(x)


def policy(first: Any, second: Any = None, gemms: dict[str, str] | None = None, match: str = "first") -> Any:
    from autoprec import Policy
    from autoprec.precision.recipes import BUILTIN_RECIPES

    recipes = {"a": first, "b": second or first}
    recipes = {k: BUILTIN_RECIPES[v] if isinstance(v, str) else v for k, v in recipes.items()}
    recipes["bf16"] = BUILTIN_RECIPES["bf16"]
    layers: list[dict[str, Any]] = [
        {"match": match, "recipe": "a", "gemms": gemms or {}},
        {"match": "second", "recipe": "b", "optional": True},
        {"match": "head", "recipe": "bf16", "optional": True},
    ]
    return Policy.model_validate({"recipes": recipes, "layers": layers})


def scaled(name: str, **scaling: Any) -> Any:
    from autoprec.precision.recipes import BUILTIN_RECIPES

    recipe = BUILTIN_RECIPES[name]
    assert recipe.scaling is not None
    return recipe.model_copy(update={"scaling": recipe.scaling.model_copy(update=scaling)})


def step(model: nn.Module, x: torch.Tensor = X) -> torch.Tensor:
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def emulated(chosen: Any, steps: int = 1, **options: Any) -> torch.Tensor:
    model = Model(**options)
    chosen.apply(model, backend="emulated")
    for _ in range(steps):
        found = step(model)
    return found


def _numbers(first: Any, steps: int = 1, **rule: Any) -> dict[str, Any]:
    """Run one layer, all three GEMMs; errors are against float64 sums of the same quantised operands."""
    from autoprec.policy import resolve
    from tests.conformance.backends import reference_gemms

    model, chosen = nn.Sequential(nn.Linear(128, 256)), policy(first, match="0", **rule)
    keys, before = list(model.state_dict()), [id(p) for p in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(128, 256, generator=generator) * 1e-3
    chosen.apply(model, backend=BACKEND)
    for _ in range(steps):
        te_extension.GEMMS.clear()
        x = X.clone().requires_grad_()
        model.zero_grad()
        out = model(x)
        out.backward(grad)
    weight, bias = (p.detach() for p in model.parameters())
    plan = resolve(chosen, ["0"])["0"]
    low = plan.fprop is not None and plan.fprop.format == "nvfp4"  # TE's transform takes bfloat16
    operands = (X.bfloat16().float(), weight, grad.bfloat16().float()) if low else (X, weight, grad)
    wanted = reference_gemms(*operands, plan)
    found = {"fprop": out.detach() - bias, "dgrad": x.grad, "wgrad": model[0].weight.grad}
    row = chosen.audit(model).layers[0]
    return {
        "errors": {name: relative(found[name], value) for name, value in wanted.items()},
        "products": list(te_extension.GEMMS),
        "ok": row.ok,
        "executed": row.executed,
        "untouched": keys == list(model.state_dict()) and before == [id(p) for p in model.parameters()],
    }


def recipes() -> dict[str, Any]:
    """Every recipe that TE has, uniform: what is multiplied, and how far that is from the emulation."""
    names = ["fp8_tensorwise", "fp8_tensorwise_e4m3", "fp8_delayed", "fp8_block", "fp8_block_fp32_scales"]
    names += ["mxfp8", "nvfp4_plain"] if torch.cuda.get_device_capability() >= (10, 0) else []
    return {name: _attempt(lambda name=name: _numbers(name, 3 if "delayed" in name else 1)) for name in names}


def gemms() -> dict[str, Any]:
    """Different recipes for the GEMMs of one layer."""
    mixed = {
        "wgrad bf16": {"wgrad": "bf16"},
        "wgrad kept": {"wgrad": "keep"},
        "fprop only": {"wgrad": "bf16", "dgrad": "bf16"},
        "backward only": {"fprop": "bf16"},
        "kept and bf16": {"wgrad": "keep", "dgrad": "bf16"},
    }
    return {name: _attempt(lambda rule=rule: _numbers("fp8_tensorwise", gemms=rule)) for name, rule in mixed.items()}


def parameters() -> dict[str, Any]:
    """Power-of-two scales, and fast accumulation, which TE has by default in fprop."""
    from autoprec.precision.recipes import BUILTIN_RECIPES

    fast = BUILTIN_RECIPES["fp8_tensorwise"].model_copy(update={"accumulation": "fast"})
    return {
        "power of 2": _attempt(lambda: _numbers(scaled("fp8_tensorwise", power_of_2=True))),
        "fast": _attempt(lambda: _numbers(fast)),
    }


def same_class() -> list[Any]:
    """A second policy of the same recipe class on the same model."""
    model = Model()
    policy("fp8_tensorwise").apply(model, backend=BACKEND)
    step(model)
    policy("fp8_tensorwise_e4m3").apply(model, backend=BACKEND)
    te_extension.GEMMS.clear()
    step(model)
    return list(te_extension.GEMMS)


def algorithms() -> Any:
    """Two delayed layers that differ in the algorithm only: TE keys its buffers by a repr that leaves it out."""
    model = Model()
    policy("fp8_delayed", scaled("fp8_delayed", amax_compute_algo="most_recent")).apply(model, backend=BACKEND)
    te_extension.UPDATES.clear()
    step(model)
    return list(te_extension.UPDATES)


def updates() -> dict[str, Any]:
    """Updates of the delayed scales in a training step, a second one, an evaluation, and under recomputation."""
    out: dict[str, Any] = {}
    for name, recompute in (("plain", False), ("recomputed", True)):
        model, chosen = Model(recompute), policy("fp8_delayed")
        chosen.apply(model, backend=BACKEND)
        counts, errors = [], []
        for count in (1, 2, 3):
            te_extension.UPDATES.clear()
            errors.append(step(model))
            counts.append([u["histories"] for u in te_extension.UPDATES])
            del count
        te_extension.UPDATES.clear()
        with torch.no_grad():
            model(X)
        out[name] = {"updates": counts, "evaluation": len(te_extension.UPDATES), "audit": chosen.audit(model).ok}
        out[f"{name} gradient"] = errors[-1]
    out["recomputation changes"] = relative(out.pop("recomputed gradient"), out["plain gradient"])
    out["error"] = relative(out.pop("plain gradient"), emulated(policy("fp8_delayed"), steps=3))
    return out


def leftovers() -> dict[str, Any]:
    """Buffers of dead modules, and a second model that must go on learning."""
    models = [Model(), Model()]
    for model in models:
        policy("fp8_delayed").apply(model, backend=BACKEND)
        step(model)
    for _ in range(3):
        policy("fp8_delayed").apply(models[0], backend=BACKEND)
        step(models[0])
    gc.collect()
    te_extension.UPDATES.clear()
    step(models[1])
    step(models[0])
    return {"updates": [u["histories"] for u in te_extension.UPDATES]}


def batches() -> dict[str, Any]:
    """A ragged and an empty batch."""
    model, chosen = Model(), policy("fp8_tensorwise")
    chosen.apply(model, backend=BACKEND)
    ragged = step(model, X[:13])
    reference = Model()
    chosen.apply(reference, backend="emulated")
    return {"ragged": relative(ragged, step(reference, X[:13])), "empty": list(model(X[:0]).shape)}


def autocast() -> dict[str, Any]:
    """Float32 Parameters in a script that uses autocast."""
    found = []
    for backend in (BACKEND, "emulated"):
        model, chosen = Model(), policy("fp8_tensorwise", gemms={"wgrad": "bf16"})
        chosen.apply(model, backend=backend)
        te_extension.GEMMS.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).float().square().mean()
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        if backend == BACKEND:
            products, ok = list(te_extension.GEMMS), chosen.audit(model).ok
    return {"error": relative(*found), "products": products, "ok": ok}


def copies() -> dict[str, Any]:
    """A copy of the model with other weights, and a weight that a parametrisation computes."""
    import copy

    from torch.nn.utils.parametrizations import weight_norm

    model, chosen = Model(), policy("fp8_tensorwise")
    chosen.apply(model, backend=BACKEND)
    step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2.0)
    fresh = Model()
    with torch.no_grad():
        for p in fresh.parameters():
            p.mul_(2.0)
    chosen.apply(fresh, backend=BACKEND)
    normed, reference = Model(), Model()
    for one in (normed, reference):
        weight_norm(one.first)
    chosen.apply(normed, backend=BACKEND)
    chosen.apply(reference, backend="emulated")
    return {
        "copy": relative(step(other), step(fresh)),
        "original": relative(step(model), step(other)),
        "parametrised": relative(step(normed), step(reference)),
    }


def conformance() -> dict[str, Any]:
    """The shipped conformance suite: what did not pass, and what was lacking."""
    import pytest

    from autoprec.backends.transformer_engine import TransformerEngineBackend, delayed_scaling
    from tests.conformance.backends import PLANS, BackendSuite, BoundLayer

    class Suite(BackendSuite):
        backend = TransformerEngineBackend()
        device = "cuda:0"

        def layer(self, plan: Any) -> BoundLayer:
            return BoundLayer(self.backend, plan, "cpu")

    passed, failed, lacks, suite = 0, [], {}, Suite()
    for name, plan in PLANS.items():
        refused = suite.refusal(plan)
        if refused is not None:
            lacks[name] = refused
            continue
        for check in [check for check in dir(Suite) if check.startswith("test_")]:
            try:
                getattr(suite, check)(plan)
                passed += 1
            except pytest.skip.Exception:
                pass
            except AssertionError as error:
                # TE's cast saturates infinities under a scale from earlier steps
                known = (
                    check == "test_non_finite_values_show"
                    and delayed_scaling(plan.fprop) is not None
                    and "inf in" in str(error)
                )
                if known:
                    lacks[f"{name}: {check}"] = str(error)
                else:
                    failed.append(f"{name}: {check}: {error}")
    return {"passed": passed, "failed": failed, "lacks": lacks}


def removed() -> dict[str, Any]:
    """A policy taken off again."""
    model = Model()
    before = step(model)
    policy("fp8_tensorwise").apply(model, backend=BACKEND)
    step(model)
    from autoprec.applying.policy import remove_policy

    remove_policy(model)
    return {"identical": torch.equal(step(model), before)}


def resumed() -> dict[str, Any]:
    """Saved after two steps and continued in a fresh model, against a run that was not interrupted."""
    out: dict[str, Any] = {}
    for name, taken in (("taken", True), ("left", False)):
        runs = []
        for interrupted in (False, True):
            model, chosen = Model(), policy("fp8_delayed")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            chosen.apply(model, backend=BACKEND)
            chosen.wrap_optimizer(optimizer, model)
            losses = []
            for count in range(5):
                if interrupted and count == 2:
                    weights, held = model.state_dict(), optimizer.state_dict()
                    held = held if taken else torch.optim.SGD(Model().parameters(), lr=0.05).state_dict()
                    model = Model()
                    model.load_state_dict(weights)
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
                    chosen.apply(model, backend=BACKEND)
                    chosen.wrap_optimizer(optimizer, model)
                    optimizer.load_state_dict(held)
                loss = model(X * (1 + count)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss))
            runs.append(losses)
        out[name] = runs
    shapes = {key: list(value.shape) for key, value in chosen.state_dict(model).items()}
    chosen.apply(fresh := Model(), backend=BACKEND)
    out["shapes"] = shapes == {key: list(value.shape) for key, value in chosen.state_dict(fresh).items()}
    return out


def _attempt(run: Callable[[], Any]) -> Any:
    from autoprec.errors import UnsupportedError

    try:
        return run()
    except UnsupportedError as error:
        return {"refused": error.what}
    except Exception:  # reported to the test
        return {"failed": traceback.format_exc(limit=-6)}


SCENARIOS = (
    recipes,
    gemms,
    parameters,
    same_class,
    algorithms,
    updates,
    leftovers,
    batches,
    autocast,
    copies,
    conformance,
    removed,
    resumed,
)


def main() -> None:
    """Run every scenario."""
    folder, capability = Path(sys.argv[1]), tuple(int(n) for n in sys.argv[2].split("."))
    te_extension.install(folder, (capability[0], capability[1]))
    from autoprec.applying import stage

    stage._device_of = lambda model: "cuda:0"  # type: ignore[assignment]
    wanted = sys.argv[3:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {s.__name__: _attempt(s) for s in SCENARIOS if not wanted or s.__name__ in wanted}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
