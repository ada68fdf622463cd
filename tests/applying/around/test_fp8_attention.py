"""``operators.attention: fp8``: emulated here, Transformer Engine's on a GPU (a stand-in), refused without a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoprec import Policy
from autoprec.applying.around.fp8_attention import Fp8Attention, bind_attention
from autoprec.backends import get
from autoprec.backends.emulated import fp8_attention
from autoprec.errors import UnsupportedError
from tests.backends import fake_te

FP8 = {"operators": {"attention": "fp8"}}
MASK = torch.zeros(16, 16)


class Attends(nn.Module):
    """One layer of causal attention over 4 heads of 32."""

    def __init__(self, **call: Any) -> None:
        super().__init__()
        self.qkv, self.call = nn.Linear(128, 384), {"is_causal": True} | call

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 4, 32).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, **self.call)
        return out.transpose(1, 2).flatten(2)


class Twice(nn.Module):
    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.a, self.b, self.around = Attends(), Attends(), around

    def forward(self, x: Tensor) -> Tensor:
        run: Any = self.around or (lambda part, given: part(given))
        return run(self.b, run(self.a, x))  # type: ignore[no-any-return]


def passed(model: nn.Module, x: Tensor, run: Any = None) -> list[Tensor]:
    """Return the result and the gradients of a forward and backward."""
    model.zero_grad()
    out = (run or model)(x)
    out.square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 16, 128)


def test_a_policy_asks_for_it_the_audit_tells_and_it_comes_off_again(x: Tensor) -> None:
    model, policy = Twice(), Policy.model_validate(FP8)
    before = passed(model, x)
    policy.apply(model)
    under = passed(model, x)
    assert all(0.002 < (a - b).norm() / b.norm() < 0.2 for a, b in zip(under, before, strict=True))
    row = policy.audit(model).operators["attention"]
    assert row["ok"]
    assert row["executed"] == "fp8"
    assert row["reason"].startswith("emulated")
    policy.remove(model)
    assert all(torch.equal(a, b) for a, b in zip(passed(model, x), before, strict=True))


def test_under_autocast_it_returns_what_attention_returns(x: Tensor) -> None:
    model = Attends()
    Policy.model_validate({**FP8, "activations": "bf16", "operators": {"attention": "fp8", "output": "keep"}}).apply(
        model
    )
    assert model(x).dtype is torch.bfloat16
    q = torch.randn(1, 2, 8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = Fp8Attention()("cpu", (q, q, q), {"scale": 0.5})
    expected = fp8_attention(q.bfloat16(), q.bfloat16(), q.bfloat16(), causal=False, scale=0.5)
    assert torch.equal(out, expected.bfloat16())


def test_in_evaluation_attention_runs_as_written(x: Tensor) -> None:
    model = Attends(is_causal=False, attn_mask=MASK).eval()  # which has no kernel
    policy = Policy.model_validate(FP8)
    policy.apply(model)
    under = model(x)
    policy.remove(model)
    assert torch.equal(model(x), under)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"is_causal": False, "attn_mask": MASK}, "attn_mask"),
        ({"dropout_p": 0.1}, "dropout 0.1"),
    ],
)
def test_what_has_no_kernel_is_refused_with_the_reason(x: Tensor, call: dict[str, Any], reason: str) -> None:
    model = Attends(**call)
    Policy.model_validate(FP8).apply(model)
    with pytest.raises(UnsupportedError, match=reason):
        model(x)


@pytest.mark.parametrize(
    ("shapes", "call", "reason"),
    [
        (((2, 8, 32),) * 3, {}, "batch, heads, length, head"),
        (((1, 2, 8, 40),) * 3, {}, "40, no multiple of 16"),
        (((1, 2, 8, 32), (1, 2, 4, 32), (1, 2, 4, 32)), {"is_causal": True}, "8 queries and 4 keys"),
        (((1, 4, 8, 32), (1, 2, 8, 32), (1, 2, 8, 32)), {}, "4 heads of queries, 2 of keys"),
        (((1, 4, 8, 32), (1, 3, 8, 32), (1, 3, 8, 32)), {"enable_gqa": True}, "3 of keys"),
    ],
)
def test_shapes_that_have_no_kernel_are_refused(shapes: Any, call: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        Fp8Attention()("cpu", tuple(torch.randn(shape) for shape in shapes), call)


def test_a_batch_of_several_lengths_is_refused() -> None:
    parts = [torch.randn(length, 2, 32) for length in (8, 16)]
    ragged = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(UnsupportedError, match="nested tensors"):
        Fp8Attention()("cpu", (ragged, ragged, ragged), {})


def test_transforms_are_refused() -> None:
    q = torch.randn(1, 2, 8, 32)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(lambda x: Fp8Attention()("cpu", (x, x, x), {}).sum())(q)


def test_it_cannot_be_differentiated_twice() -> None:
    q = torch.randn(1, 2, 8, 32, requires_grad=True)
    (grad,) = torch.autograd.grad(Fp8Attention()("cpu", (q, q, q), {}).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"operators\.attention.* cannot be differentiated twice"):
        grad.square().sum().backward()


def test_heads_that_ranks_share_as_dtensors_are_refused() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        heads = distribute_tensor(torch.randn(1, 2, 8, 32), init_device_mesh("cpu", (1,)), [Shard(1)])
        with pytest.raises(UnsupportedError, match="DTensors"):
            Fp8Attention()("cpu", (heads, heads, heads), {"is_causal": True})
    finally:
        dist.destroy_process_group()


def test_attention_written_by_hand_is_not_run_in_fp8_and_the_check_fails(x: Tensor) -> None:
    class ByHand(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(128, 128)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return (y @ y.mT).softmax(-1) @ y

    model, policy = ByHand(), Policy.model_validate(FP8)
    policy.apply(model)
    passed(model, x)
    row = policy.audit(model).operators["attention"]
    assert not row["ok"]
    assert row["reason"] == "the model calls no scaled_dot_product_attention"


@pytest.mark.parametrize("reentrant", [False, True])
def test_emulated_it_is_repeated_by_checkpointing(x: Tensor, reentrant: bool) -> None:
    plain, kept = Twice(), Twice(lambda part, given: checkpoint(part, given, use_reentrant=reentrant))
    kept.load_state_dict(plain.state_dict())
    for model in (plain, kept):
        Policy.model_validate(FP8).apply(model)
    x.requires_grad_()
    for one, other in zip(passed(kept, x), passed(plain, x), strict=True):
        assert torch.equal(one, other)


# --- Transformer Engine's, by a stand-in ----------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Fp8Attention:
    fake_te.install(monkeypatch)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (10, 0))
    made, (backend,) = bind_attention("cuda:0", "auto", ())
    assert backend.name == "transformer_engine"
    return made


def test_on_a_gpu_transformer_engine_runs_it_and_the_audit_says_so(engine: Fp8Attention) -> None:
    q = torch.randn(1, 4, 8, 32)
    k = torch.randn(1, 2, 8, 32)
    out = engine("cpu", (q, k, k), {"is_causal": True, "enable_gqa": True})
    expected = Fp8Attention()("cpu", (q, k, k), {"is_causal": True, "enable_gqa": True})
    assert torch.equal(out, expected.bfloat16().float())  # the kernel returns 16 bits
    assert "Transformer Engine" in engine.note


def test_the_device_decides_what_is_refused(engine: Fp8Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(1, 2, 8, 144)
    with pytest.raises(UnsupportedError, match=r"up to 128, multiples of 16, on compute capability 10\.0, not 144"):
        engine("cpu", (wide, wide, wide), {})
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: (8, 9))
    with pytest.raises(UnsupportedError, match=r"9.0 or 10.x, this is 8.9"):
        bind_attention("cuda:0", "auto", ())


def test_without_transformer_engine_a_gpu_has_none_unless_it_is_to_be_emulated() -> None:
    with pytest.raises(UnsupportedError, match="FP8 attention runs by Transformer Engine: transformer_engine"):
        bind_attention("cuda:0", "auto", ())
    assert bind_attention("cuda:0", "emulated", ()) == (Fp8Attention(), ())


def test_layers_and_attention_share_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_te.install(monkeypatch)
    backend = get("transformer_engine")
    first, second = (bind_attention("cuda:0", "auto", (get("native"), backend)) for _ in range(2))
    assert first == second
    assert first[1] == (backend,)
    assert backend.around_model() is not None
    assert backend.after_step() is not None
