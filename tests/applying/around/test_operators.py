"""What runs around layers: activations, float32 operators however they are written, attention, output."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autoprec import Policy
from autoprec.applying.swap import root_of


class Probe(nn.Module):
    """Records the dtype of whatever the function under test returns inside a forward."""

    def __init__(self, function) -> None:
        super().__init__()
        self.linear, self.function, self.seen = nn.Linear(8, 8), function, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        self.seen = {"layer": h.dtype, "result": self.function(h).dtype}
        return h


def hand_softmax(h: torch.Tensor) -> torch.Tensor:
    e = torch.exp(h - h.max(-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def hand_rms_norm(h: torch.Tensor) -> torch.Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)


PROTECTED = {
    "softmax module": ("softmax", nn.Softmax(-1)),
    "softmax function": ("softmax", lambda h: F.softmax(h, -1)),
    "softmax method": ("softmax", lambda h: h.softmax(-1)),
    "softmax by hand": ("softmax", hand_softmax),
    "norm module": ("norm", nn.LayerNorm(8)),
    "norm function": ("norm", lambda h: F.layer_norm(h, (8,))),
    "norm by hand": ("norm", hand_rms_norm),
    "loss": ("loss", lambda h: F.cross_entropy(h, torch.zeros(len(h), dtype=torch.long))),
    "loss module": ("loss", nn.SmoothL1Loss()),
    "a power of x": ("norm", lambda h: 2**h),
    "one over x": ("norm", lambda h: 1 / h),
    "distances": ("norm", F.pdist),
    "softplus": ("norm", F.softplus),
    "log2": ("norm", lambda h: h.abs().log2()),
    "renorm": ("norm", lambda h: torch.renorm(h, 2, 0, 1.0)),
}


def test_every_listed_function_of_one_argument_really_runs_in_float32() -> None:
    skipped = {"erfinv"}  # bfloat16 has it not, on some builds
    for name in [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "log10",
        "log2",
        "reciprocal",
        "sinh",
        "tan",
        "exp",
        "expm1",
        "rsqrt",
    ]:
        for owner in (torch, torch.Tensor):
            model = Probe(lambda h, owner=owner, name=name: getattr(owner, name)(h.sigmoid() * 0.5))
            Policy(activations="bf16").apply(model)
            model(torch.randn(4, 8))
            assert model.seen["result"] is torch.float32 or name in skipped, (owner, name)


@pytest.mark.parametrize("case", PROTECTED)
def test_protected_operators_run_in_float32(case: str) -> None:
    kind, function = PROTECTED[case]
    operation = (lambda h: function(h, torch.zeros_like(h))) if case == "loss module" else function
    model = Probe(operation)
    x = torch.randn(4, 8)
    policy = Policy(activations="bf16")
    policy.apply(model)
    out = model(x)
    assert model.seen == {"layer": torch.bfloat16, "result": torch.float32}
    assert out.dtype is torch.float32
    assert policy.audit(model).operators[kind]["executed"] == "fp32"


def test_keep_leaves_operators_to_autocast() -> None:
    model = Probe(lambda h: F.softmax(h, -1))
    keep = dict.fromkeys(("softmax", "norm", "embedding", "loss", "output"), "keep")
    Policy.model_validate({"activations": "bf16", "operators": keep}).apply(model)
    assert model(torch.randn(4, 8)).dtype is torch.bfloat16
    assert model.seen["result"] is torch.bfloat16


def test_models_written_in_bfloat16_get_their_own_dtype_back() -> None:
    model = Probe(lambda h: F.layer_norm(h, (8,))).to(torch.bfloat16)
    exact = model.linear(x := torch.randn(4, 8).to(torch.bfloat16)).float()
    policy = Policy.model_validate({"operators": {"attention": "fp32"}})
    policy.apply(model)
    model(x)
    assert model.seen["result"] is torch.bfloat16
    assert policy.audit(model).operators["norm"]["executed"] == "fp32"
    assert exact.dtype is torch.float32


@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_attention_runs_in_its_own_dtype(wanted: str, activations: str) -> None:
    def attend(h: torch.Tensor) -> torch.Tensor:
        q = h.reshape(1, 1, *h.shape)
        return F.scaled_dot_product_attention(q, q, q)

    model = Probe(attend)
    policy = Policy.model_validate({"activations": activations, "operators": {"attention": wanted}})
    policy.apply(model)
    model(torch.randn(4, 8))
    assert policy.audit(model).operators["attention"] == {
        "requested": wanted,
        "executed": wanted,
        "ok": True,
        "reason": "",
    }
    native = torch.float32 if activations == "keep" or wanted == "fp32" else torch.bfloat16
    assert model.seen["result"] is native


def by_matmul(q: torch.Tensor) -> torch.Tensor:
    return F.softmax(q @ q.transpose(-1, -2), -1).to(q.dtype) @ q


def by_bmm(q: torch.Tensor) -> torch.Tensor:
    return torch.bmm(torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), q, q.mT).softmax(-1).to(q.dtype), q)


def by_einsum(q: torch.Tensor) -> torch.Tensor:
    p = torch.einsum("bik,bjk->bij", q, q).softmax(-1)
    return torch.einsum("bij,bjk->bik", p.to(q.dtype), q)


@pytest.mark.parametrize("attend", [by_matmul, by_bmm, by_einsum])
@pytest.mark.parametrize("wanted", ["fp32", "bf16"])
def test_attention_written_by_hand_runs_in_its_own_dtype(attend, wanted: str) -> None:
    model = Probe(lambda h: attend(h.reshape(1, *h.shape)))
    policy = Policy.model_validate({"activations": "bf16", "operators": {"attention": wanted}})
    policy.apply(model)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "bmm" in str(func):
                products.append(args[-1].dtype)
            return func(*args, **(kwargs or {}))

    with Products():
        model(torch.randn(4, 8))
    assert products == [torch.float32 if wanted == "fp32" else torch.bfloat16] * 2
    assert policy.audit(model).operators["attention"]["executed"] == wanted


def test_products_with_weights_are_not_attention_and_what_torch_hides_fails_the_check() -> None:
    weight = nn.Parameter(torch.randn(2, 8, 8))
    model = Probe(lambda h: torch.bmm(h.expand(2, 4, 8), weight.to(h.dtype)) @ weight.mT)
    model.weight = weight
    policy = Policy.model_validate({"activations": "bf16", "operators": {"attention": "fp32"}})
    policy.apply(model)
    model(torch.randn(4, 8))
    assert model.seen["result"] is torch.bfloat16
    assert "attention" not in root_of(model).ran

    hidden = nn.MultiheadAttention(8, 2)
    model = Probe(lambda h: hidden(h, h, h)[0])
    policy.apply(model)
    model(torch.randn(4, 8))
    row = policy.audit(model).operators["attention"]
    assert (row["ok"], row["executed"]) == (False, "bf16")


def test_fp16_activations_are_emulated_on_a_cpu() -> None:
    model = Probe(lambda h: h @ h.t())
    x = torch.randn(4, 8)
    exact = model.linear(x)
    policy = Policy(activations="fp16")
    policy.apply(model)
    out = model(x)
    assert model.seen == {"layer": torch.float16, "result": torch.float16}
    assert out.dtype is torch.float32
    assert 0 < (out - exact).abs().max() < 5e-3
    assert policy.audit(model).ok


@pytest.mark.parametrize("backend", ["emulated", "auto"])
def test_without_bf16_units_a_rehearsal_multiplies_in_float32_and_a_measurement_does_not(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoprec.applying.around.operators.fast_bf16_gemm", lambda device: False)
    dtypes = set()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.__name__ or "attention" in func.__name__:
                dtypes.update(a.dtype for a in args if isinstance(a, torch.Tensor) and a.is_floating_point())
            return func(*args, **(kwargs or {}))

    model = Probe(lambda h: F.scaled_dot_product_attention(*[(h @ h.t()).view(1, 1, 4, 4)] * 3))
    policy = Policy(activations="bf16")
    policy.apply(model, backend=backend)
    with Products():
        out = model(torch.randn(4, 8))
        out.sum().backward()
    assert dtypes == {torch.float32 if backend == "emulated" else torch.bfloat16}
    assert model.seen == {"layer": torch.bfloat16, "result": torch.bfloat16}  # what the script sees is the same
    assert policy.audit(model).ok


@pytest.mark.parametrize("backend", ["emulated", "auto"])
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_under_bf16_activations_runs_without_bf16_units(
    make: type[nn.RNNBase], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN has no bfloat16 kernel for an LSTM there: torch's own autocast fails."""
    monkeypatch.setattr("autoprec.applying.around.operators.fast_bf16_gemm", lambda device: False)
    torch.manual_seed(0)
    layer = make(8, 8, num_layers=2, batch_first=True)
    x = torch.randn(4, 5, 8, requires_grad=True)
    exact = layer(x)[0]

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            out, states = self.layer(x)
            return out, *(states if isinstance(states, tuple) else (states,))

    model = Holder()
    policy = Policy(activations="bf16", operators={"output": "keep"})
    policy.apply(model, backend=backend)
    found = model(x)
    assert all(one.dtype is torch.bfloat16 for one in found) or make is not nn.LSTM
    assert 0 < (found[0].float() - exact).abs().max() < 2e-2
    found[0].float().sum().backward()
    assert x.grad is not None


def test_the_scripts_own_autocast_is_protected_too() -> None:
    model = Probe(lambda h: F.layer_norm(h, (8,)))
    Policy.model_validate({"operators": {"attention": "bf16"}}).apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 8))
    assert model.seen == {"layer": torch.bfloat16, "result": torch.float32}


class Dtypes(TorchDispatchMode):
    """Notes in what norms and softmax run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "norm" in str(func) or "softmax" in str(func):
            self.seen.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [lambda h: F.layer_norm(h, (8,)), lambda h: F.softmax(h, -1)])
def test_the_autocast_of_a_forward_that_a_library_stored_on_the_instance_is_protected_too(function) -> None:
    """accelerate's: it begins inside the policy's own forward, and norms ran in bf16 while the audit said fp32."""
    model = Probe(function)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    Policy.model_validate({"recipes": {"bf16": {"format": "bf16"}}, "default": "bf16"}).apply(model)
    with Dtypes() as mode:
        model(torch.randn(2, 8))
    assert mode.seen == {torch.float32}
    assert model.seen == {"layer": torch.bfloat16, "result": torch.float32}, "as under autocast around the model"


def test_nothing_of_low_precision_means_no_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    policy = Policy.model_validate({"recipes": {"f": {"format": "fp32"}}, "default": "f"})
    policy.apply(model)
    model(torch.randn(4, 8)).sum().backward()
    root = root_of(model)
    assert not root.needed("cpu")
    assert policy.audit(model).operators["norm"]["reason"] == "nothing of low precision reached it"


def test_a_compiled_model_is_compiled_once() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Softmax(-1), nn.Linear(16, 8))
    policy = Policy.model_validate({"recipes": {"bf16": {"format": "bf16"}}, "default": "bf16", "activations": "bf16"})
    policy.apply(model)
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> object:
        seen.append(len(graph.graph.nodes))
        return graph.forward

    model.compile(backend=backend)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    assert len(seen) == 1
    rows = policy.audit(model).operators
    assert rows["activations"]["executed"] == "bf16"
    assert rows["output"]["executed"] == "fp32"
    assert policy.audit(model).ok


@pytest.mark.parametrize("how", ["target", "input", "norm"])
def test_what_16_bits_and_32_make_has_the_dtype_that_torch_gives_it(how: str) -> None:
    wide = torch.ones(8)
    function = {
        "target": lambda h: F.mse_loss(h, wide.expand(4, 8)),
        "input": lambda h: F.mse_loss(wide.expand(4, 8), target=h),
        "norm": lambda h: F.layer_norm(h, (8,), wide, wide),
    }[how]
    model, x = Probe(function).to(torch.bfloat16), torch.randn(4, 8).to(torch.bfloat16)
    model(x)
    expected = model.seen["result"]
    Policy.model_validate({"operators": {"attention": "bf16"}}).apply(model)
    model(x)
    assert model.seen["result"] is expected


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)])
def test_running_statistics_of_a_model_in_16_bits_are_updated(norm: nn.Module) -> None:
    model = Probe(lambda h: h).to(torch.bfloat16)
    model.norm = copy.deepcopy(norm).to(torch.bfloat16)
    model.function = lambda h: model.norm(h.t().reshape(2, 8, -1))
    x = torch.randn(16, 8).to(torch.bfloat16)
    model(x)
    expected = model.norm.running_mean.clone()
    model.norm.reset_running_stats()
    Policy.model_validate({"activations": "keep", "operators": {"attention": "bf16"}}).apply(model)
    model(x)
    assert expected.abs().sum() > 0
    assert torch.allclose(model.norm.running_mean, expected, atol=1e-2)


@torch.no_grad()
def test_what_is_written_into_a_tensor_of_the_script_arrives_there() -> None:
    written = []

    def both(h: torch.Tensor) -> torch.Tensor:
        written[:] = torch.zeros_like(h), torch.zeros(4, 4, dtype=h.dtype)
        torch.matmul(h, h.t(), out=written[1])
        return torch.exp(h, out=written[0])

    model, x = Probe(both), torch.randn(4, 8)
    Policy(activations="bf16", operators={"attention": "fp32"}).apply(model)
    h = model(x)
    assert torch.allclose(written[0].float(), h.exp(), atol=0.05)
    assert torch.allclose(written[1].float(), h @ h.t(), atol=0.05)


def test_complex_products_are_left_alone() -> None:
    model = Probe(lambda h: torch.matmul(z := torch.fft.fft(h.float()), z.t()))
    for attention in ("keep", "fp16"):
        Policy(activations="fp16", operators={"attention": attention}).apply(model)
        model(torch.randn(4, 8))
        assert model.seen["result"] is torch.complex64


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8), nn.BatchNorm1d(8)])
def test_a_model_in_16_bits_may_norm_the_float32_output_of_an_embedding(norm: nn.Module) -> None:
    """Every pre-norm transformer in bf16 does: the embedding's result is widened, the weights of the norm are not."""
    model = nn.Sequential(nn.Embedding(4, 8), copy.deepcopy(norm), nn.Linear(8, 8)).bfloat16()
    Policy.model_validate({"activations": "bf16"}).apply(model)
    model(torch.arange(4)).sum().backward()
    assert model[1].weight.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("written", [lambda h: h**2, lambda h: 2.0**h, lambda h: 2.0 / (h.abs() + 1)])
def test_powers_and_quotients_written_with_signs_are_float32_inside_a_compiled_model(written) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return written(self.linear(x))

    model, x = Model(), torch.randn(2, 8)
    Policy(activations="bf16").apply(model)
    out = torch.compile(model, backend="eager")(x)
    assert out.dtype is torch.float32
    assert torch.equal(out, model(x))


#: Methods that torch writes in Python, and others whose way through a mode is their own.
WRITTEN_IN_PYTHON = {
    "unflatten": lambda h: h.unflatten(-1, (2, 4)).transpose(1, 2).flatten(1),
    "split": lambda h: torch.cat(h.split(2, -1), -1),
    "norm": lambda h: h / h.norm(dim=-1, keepdim=True),
    "stft": lambda h: torch.stft(h.float().flatten(), 4, window=torch.ones(4), return_complex=True).abs(),
    "signs": lambda h: 1 - 2 ** (1 / (h.abs() + 1)),
    "iteration": lambda h: sum(row for row in h),
}


@pytest.mark.parametrize("written", WRITTEN_IN_PYTHON)
def test_a_compiled_model_stays_one_graph_under_float32_operators(written) -> None:
    torch._dynamo.reset()
    function = WRITTEN_IN_PYTHON[written]
    model, x = Probe(lambda h: F.softmax(function(F.layer_norm(h, (8,))), 0)), torch.randn(4, 8)
    Policy(activations="bf16").apply(model)
    out = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert torch.equal(out, model(x))
