"""A run whose parameters have 16 bits goes on after a checkpoint bit for bit, however the checkpoint is loaded."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from autoprec import Policy
from autoprec.errors import UnsupportedError
from autoprec.optim.checkpoint import EXACT, narrow_moments, parameters_of
from autoprec.optim.optimizer import rewrap_optimizer, runtime_of, wrap_optimizer
from autoprec.optim.tensor import StoredTensor
from autoprec.policy import OptimizerPolicy
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.support.optional import is_available

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3, eps=1e-4),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1, eps=1e-4),
    "muon": lambda groups: torch.optim.Muon(groups, lr=1e-3),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-4, momentum=0.9, eps=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-3, eps=1e-3),
}
MOMENTS = {"exp_avg": "e4m3", "exp_avg_sq": "int8_block"}
FORMATS: dict[str, dict[str, str]] = {
    "kahan": {"weights": "bf16_kahan"},
    "master": {"weights": "e4m3_master", "gradients": "e4m3"},
    "scaled": {"weights": "fp16_scaled"},
    "stochastic": {"weights": "bf16_stochastic"},
    "first": {"exp_avg": "e4m3"},
    "bf16": {"exp_avg": "bf16"},
    "tensor": {"exp_avg": "e4m3_tensor", "exp_avg_sq": "fp16_tensor"},
    "moments": MOMENTS,
    "all": {"weights": "e4m3_master", "exp_avg": "e4m3", "exp_avg_sq": "fp16_scaled"},
    "delayed": {},  # the scales of the layers alone, with an optimizer whose state stays its own
}
HAS: dict[str, list[str]] = {
    "sgd": ["kahan", "master", "scaled", "stochastic", "delayed"],
    "momentum": ["kahan", "first", "bf16", "delayed"],
    "adam": ["scaled", "tensor", "moments"],
    "adamw": [*FORMATS],
    "muon": ["kahan", "first"],
    "rmsprop": ["delayed"],
    "adagrad": ["delayed"],
}
COMBINATIONS = [(name, kind) for name, kinds in HAS.items() for kind in kinds]


class Run:
    """A small training of two matrices in two parameter groups."""

    def __init__(self, optimizer: str, kind: str, dtype: torch.dtype, *, wrap: bool = True) -> None:
        torch.manual_seed(0)
        layers = {"default": "r", "recipes": {"r": BUILTIN_RECIPES["fp8_delayed"]}} if kind == "delayed" else {}
        self.policy = Policy.model_validate({**layers, "optimizer": FORMATS[kind]})
        self.model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Tanh(), nn.Linear(16, 8, bias=False)).to(dtype)
        groups = [{"params": [self.model[0].weight]}, {"params": [self.model[2].weight], "weight_decay": 0.01}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.dtype = dtype
        if wrap:
            self.wrap()

    def wrap(self) -> None:
        self.policy.apply(self.model)
        self.policy.wrap_optimizer(self.optimizer, self.model)

    def steps(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(self.dtype)
            loss = (self.model(x) - x[:, :8]).float().square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def exact(self) -> list[torch.Tensor]:
        """Return weights and state, with all that is remembered of them."""
        state = self.optimizer.state_dict()["state"]
        held = [value for one in state.values() for value in one.values() if isinstance(value, torch.Tensor)]
        return [p.detach().float().clone() for p in self.model.parameters()] + [value.clone() for value in held]


def saved(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("optimizer", "kind"), COMBINATIONS)
def test_a_resumed_run_repeats_the_uninterrupted_one(optimizer: str, kind: str, dtype: torch.dtype) -> None:
    run = Run(optimizer, kind, dtype)
    run.steps(0, 4)
    model, state, exact = saved(run.model.state_dict()), saved(run.optimizer.state_dict()), run.exact()
    expected, end = run.steps(4, 8), run.exact()
    for order in ("model first", "optimizer first", "wrapped last"):
        resumed = Run(optimizer, kind, dtype, wrap=order != "wrapped last")
        loads = [(resumed.model, model), (resumed.optimizer, copy.deepcopy(state))]  # torch goes on in what it is given
        for one, held in reversed(loads) if order == "optimizer first" else loads:
            one.load_state_dict(held)
        if order == "wrapped last":
            resumed.wrap()
        assert equal(resumed.exact(), exact), order
        assert resumed.steps(4, 8) == expected, order
        assert equal(resumed.exact(), end), order


@pytest.mark.parametrize("kind", ["kahan", "moments", "all", "delayed"])
def test_distributed_checkpoints_keep_what_16_bits_do_not_hold(kind: str, tmp_path: Any) -> None:
    def document(run: Run) -> dict[str, Any]:
        return {"model": run.model.state_dict(), "optimizer": get_optimizer_state_dict(run.model, run.optimizer)}

    run = Run("adamw", kind, torch.bfloat16)
    run.steps(0, 4)
    resumed = Run("adamw", kind, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: one process, no group
        dcp.save(document(run), checkpoint_id=tmp_path, no_dist=True)
        into = document(resumed)
        dcp.load(into, checkpoint_id=tmp_path, no_dist=True)
    resumed.model.load_state_dict(into["model"])
    set_optimizer_state_dict(resumed.model, resumed.optimizer, into["optimizer"])
    assert equal(resumed.exact(), run.exact())
    assert resumed.steps(4, 8) == run.steps(4, 8)


@pytest.mark.skipif(not is_available("accelerate"), reason="accelerate is not installed")
@pytest.mark.parametrize("kind", ["kahan", "moments", "all", "delayed"])
def test_accelerates_checkpoints_keep_what_16_bits_do_not_hold(kind: str, tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")

    def prepared() -> tuple[Run, Any]:
        run = Run("adamw", kind, torch.bfloat16, wrap=False)
        accelerator = accelerate.Accelerator(mixed_precision="no", cpu=True)
        run.model, run.optimizer = accelerator.prepare(run.model, run.optimizer)
        run.wrap()
        return run, accelerator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and accelerate about each other
        run, saver = prepared()
        run.steps(0, 4)
        saver.save_state(str(tmp_path))
        resumed, loader = prepared()
        loader.load_state(str(tmp_path))
        assert resumed.steps(4, 8) == run.steps(4, 8)
        assert equal(resumed.exact(), run.exact())


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "kahan"), ("adamw", "all"), ("muon", "kahan")])
def test_a_checkpoint_of_before_the_first_step_has_the_exact_weights(optimizer: str, kind: str) -> None:
    run, resumed = Run(optimizer, kind, torch.float16), Run(optimizer, kind, torch.float16)
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.add_(1)
    resumed.model.load_state_dict(saved(run.model.state_dict()))
    resumed.optimizer.load_state_dict(saved(run.optimizer.state_dict()))
    plain = Run(optimizer, kind, torch.float16, wrap=False)
    plain.optimizer.load_state_dict(saved(run.optimizer.state_dict()))
    plain.steps(0, 2)  # such an entry is a state that a plain optimizer goes on from
    assert resumed.steps(0, 4) == run.steps(0, 4)
    assert equal(resumed.exact(), run.exact())


@pytest.mark.parametrize("kind", ["kahan", "master", "scaled", "stochastic", "all"])
@pytest.mark.parametrize("how", ["load_state_dict", "data", "clamp"])
def test_what_else_writes_to_a_weight_counts(kind: str, how: str) -> None:
    run = Run("adamw", kind, torch.bfloat16)
    run.steps(0, 3)
    weight = run.model[0].weight
    other = torch.full_like(weight.detach(), 0.25)
    other[:4] = weight.detach()[:4]
    before = run.optimizer.state_dict()["state"][0][EXACT]
    if how == "load_state_dict":
        run.model[0].load_state_dict({"weight": other})
    elif how == "data":
        weight.data.copy_(other)
    else:
        with torch.no_grad():
            weight[4:].fill_(9.0).clamp_(-0.25, 0.25)
    exact = run.optimizer.state_dict()["state"][0][EXACT]
    assert torch.equal(exact[:4], before[:4])
    assert torch.equal(exact[4:], other[4:].float())
    run.steps(3, 4)
    torch.testing.assert_close(weight.detach()[4:].float(), other[4:].float(), atol=5e-3, rtol=0.05)


def test_going_over_to_other_formats_keeps_the_exact_weights_and_moments() -> None:
    run = Run("adamw", "all", torch.bfloat16)
    run.steps(0, 4)
    before = run.optimizer.state_dict()["state"][0]
    changed = Policy.model_validate({"optimizer": {**FORMATS["all"], "exp_avg": "fp32", "gradients": "bf16"}})
    rewrap_optimizer(run.optimizer, changed, run.model)
    after = run.optimizer.state_dict()["state"][0]
    assert torch.equal(before[EXACT], after[EXACT])
    assert torch.equal(before["exp_avg_sq"], after["exp_avg_sq"])
    assert torch.equal(before["exp_avg"].bfloat16(), after["exp_avg"])  # as AdamW itself keeps it


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "kahan"), ("momentum", "first"), ("adamw", "all")])
def test_unwrapped_it_steps_on_as_the_plain_optimizer(optimizer: str, kind: str) -> None:
    run = Run(optimizer, kind, torch.bfloat16)
    run.steps(0, 3)
    wrap_optimizer(run.optimizer, OptimizerPolicy())
    run.steps(3, 5)
    assert runtime_of(run.optimizer) is None
    assert all(p.dtype is torch.bfloat16 for p in parameters_of(run.optimizer))


def test_codes_that_a_plain_run_passed_on_out_of_date_are_not_used() -> None:
    run = Run("adamw", "all", torch.bfloat16)
    run.steps(0, 3)
    plain = Run("adamw", "all", torch.bfloat16, wrap=False)
    plain.model.load_state_dict(run.model.state_dict())
    plain.optimizer.load_state_dict(saved(run.optimizer.state_dict()))
    plain.steps(3, 6)
    document = saved(plain.optimizer.state_dict())
    assert any("codes" in name for name in document["param_groups"][0]["autoprec"])
    again = Run("adamw", "all", torch.bfloat16)
    again.model.load_state_dict(plain.model.state_dict())
    again.optimizer.load_state_dict(document)
    held = again.optimizer.state[again.model[0].weight]["exp_avg"]
    assert isinstance(held, StoredTensor)
    torch.testing.assert_close(
        held.decode(), plain.optimizer.state[plain.model[0].weight]["exp_avg"].float(), rtol=0.07, atol=1e-4
    )


def test_checkpoints_of_fp32_parameters_hold_no_codes_beside_the_state() -> None:
    run = Run("adamw", "all", torch.float32)
    run.steps(0, 2)
    document = copy.deepcopy(run.optimizer.state_dict())
    assert not any("codes" in name for name in document["param_groups"][0]["autoprec"])
    assert set(document["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}


def test_moments_that_are_not_stored_here_have_the_dtype_of_their_parameter() -> None:
    state = {"exp_avg": torch.ones(2), "master": torch.ones(2), "step": torch.ones(())}
    narrow_moments(torch.zeros(2, dtype=torch.float16), state)
    assert [value.dtype for value in state.values()] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize("model_last", [False, True])
@pytest.mark.parametrize("kind", ["kahan", "master", "scaled", "stochastic", "all"])
def test_exact_weights_of_a_run_that_held_them_beside_reach_one_that_stores_them(kind: str, model_last: bool) -> None:
    def beside() -> Run:
        run = Run("adamw", kind, torch.float32, wrap=False)
        for parameter in run.model.parameters():
            parameter.register_hook(lambda gradient: gradient)  # as DistributedDataParallel holds it
        run.wrap()
        return run

    run = beside()
    run.steps(0, 4)
    model, state = saved(run.model.state_dict()), saved(run.optimizer.state_dict())
    assert EXACT in state["state"][0]
    resumed = Run("adamw", kind, torch.float32)
    assert isinstance(resumed.model[0].weight, StoredTensor)
    if not model_last:
        resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(state)
    if model_last:
        resumed.model.load_state_dict(model)
    assert resumed.steps(4, 8) == run.steps(4, 8)
    changed = Run("adamw", kind, torch.float32)  # what is written after a checkpoint was loaded counts
    changed.optimizer.load_state_dict(state)
    with torch.no_grad():
        changed.model[0].weight.fill_(0.5)
    changed.steps(4, 5)
    assert (changed.model[0].weight.detach() - 0.5).abs().max() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "stochastic"), ("momentum", "kahan"), ("muon", "first")])
def test_a_copied_run_goes_on_as_the_run(optimizer: str, kind: str, dtype: torch.dtype) -> None:
    _goes_on_when_copied(optimizer, kind, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize("kind", ["kahan", "stochastic", "scaled", "tensor", "moments", "all", "delayed"])
def test_a_copied_adamw_goes_on_as_the_run(kind: str, dtype: torch.dtype) -> None:
    _goes_on_when_copied("adamw", kind, dtype)


def _goes_on_when_copied(optimizer: str, kind: str, dtype: torch.dtype) -> None:
    run = Run(optimizer, kind, dtype)
    run.steps(0, 4)
    copied = Run(optimizer, kind, dtype, wrap=False)
    copied.model, copied.optimizer = copy.deepcopy((run.model, run.optimizer))
    assert (runtime_of(copied.optimizer) is None) is (kind == "delayed")
    if runtime_of(run.optimizer) is not None and isinstance(run.model[0].weight, StoredTensor):
        assert isinstance(copied.model[0].weight, StoredTensor)
    document = saved(copied.optimizer.state_dict())
    assert ("autoprec" in document["param_groups"][0]) is ("autoprec" in run.optimizer.state_dict()["param_groups"][0])
    assert copied.steps(4, 8) == run.steps(4, 8)
    assert equal(copied.exact(), run.exact())


def test_sgd_without_momentum_has_no_state_that_torch_would_not_have() -> None:
    run = Run("sgd", "kahan", torch.float32)
    run.steps(0, 1)
    assert run.optimizer.state_dict()["state"] == {}  # distributed checkpoints want an entry of each parameter or none


def test_saving_an_optimizer_without_state_changes_nothing_of_the_run() -> None:
    """``torch.distributed.checkpoint`` takes a step without rates and gradients, so that there is state to save."""
    runs = [Run("sgd", "stochastic", torch.float32) for _ in range(2)]
    for run in runs:
        run.steps(0, 2)
        run.optimizer.zero_grad()
    get_optimizer_state_dict(runs[0].model, runs[0].optimizer)
    assert runs[0].steps(2, 4) == runs[1].steps(2, 4)
    assert equal(runs[0].exact(), runs[1].exact())


def test_parameters_wider_than_fp32_are_updated_by_the_optimizer_itself() -> None:
    """A physics-informed network or a temperature in float64 would lose what makes it float64."""
    ends = []
    for choice in (OptimizerPolicy(), OptimizerPolicy(weights="bf16_kahan", exp_avg="e4m3", gradients="bf16")):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8).double(), nn.Linear(8, 2))
        optimizer = wrap_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), choice)
        for step in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            optimizer.zero_grad()
            model[0](x).square().sum().backward()
            model[1](torch.ones(1, 8)).sum().backward()
            optimizer.step()
        ends.append((model[0].weight.detach(), optimizer.state[model[0].weight]["exp_avg"], model[1].weight))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert isinstance(ends[1][2], StoredTensor)
    optimizer = torch.optim.AdamW(nn.Linear(4, 8).double().parameters())
    with pytest.raises(UnsupportedError, match="every matrix is float64"):
        wrap_optimizer(optimizer, OptimizerPolicy(exp_avg="bf16"))


def test_what_is_counted_has_no_size() -> None:
    """``full_state_dict`` of distributed checkpoints refuses tensors with a size on several devices."""
    run = Run("adamw", "all", torch.float32)
    run.steps(0, 1)
    entry = run.optimizer.state_dict()["param_groups"][0]["autoprec"]
    assert {name: value.dim() for name, value in entry.items()} == dict.fromkeys(
        ("optimizer.steps", "optimizer.skipped", "optimizer.nonfinite"), 0
    )
