"""FLOPs of operators against closed forms that are written out here."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoprec.graph.analysis.flops import call_flops, recurrent_gemms
from autoprec.graph.recorder import record_step
from autoprec.graph.trace import Call, Ref, Trace, Value


def flops(function, *inputs, phase="forward"):
    class Net(nn.Module):
        def forward(self, *args):
            return function(*args)

    model = Net()

    def step():
        out = model(*inputs)
        if out.requires_grad:
            out.sum().backward()

    report = record_step(model, step)
    return sum(o.flops for o in report.operators if o.phase == phase)


def tensor(*shape):
    return torch.randn(*shape, requires_grad=True)


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (torch.mm, [(3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (torch.bmm, [(2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (torch.mv, [(3, 4), (4,)], 2 * 3 * 4),
        (torch.dot, [(7,), (7,)], 2 * 7),
        (torch.addmm, [(5,), (3, 4), (4, 5)], 2 * 3 * 4 * 5),
        (torch.baddbmm, [(2, 3, 5), (2, 3, 4), (2, 4, 5)], 2 * 2 * 3 * 4 * 5),
        (F.linear, [(2, 3, 4), (5, 4)], 2 * 2 * 3 * 4 * 5),
        (torch.matmul, [(2, 6, 3, 4), (4, 5)], 2 * 2 * 6 * 3 * 4 * 5),
    ],
)
def test_products(function, shapes, expected):
    inputs = [tensor(*shape) for shape in shapes]
    assert flops(function, *inputs) == expected
    assert flops(function, *inputs, phase="backward") in (
        0,
        expected,
        2 * expected,
    )  # outer products of vectors are not a GEMM


def test_fused_attention_is_two_products_forward_and_five_backward():
    q, k, v = tensor(2, 3, 8, 16), tensor(2, 3, 10, 16), tensor(2, 3, 10, 16)
    product = 2 * 2 * 3 * 8 * 10 * 16
    assert flops(F.scaled_dot_product_attention, q, k, v) == 2 * product
    assert flops(F.scaled_dot_product_attention, q, k, v, phase="backward") == 5 * product


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """As flash-attn 2.8 registers it: [batch, sequence, heads, head]."""
    return torch.empty_like(q)


@torch.library.custom_op("flash_attn::_flash_attn_backward", mutates_args=())
def flash_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def flash_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int
) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("flash_attn_3::fwd", mutates_args=())
def flash_3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


def test_attention_of_flash_attn_is_counted():
    q, k, v = (tensor(2, length, 3, 16).detach() for length in (8, 10, 10))
    product = 2 * 2 * 3 * 8 * 10 * 16
    assert flops(lambda *x: flash_forward(*x, 0.0), q, k, v) == 2 * product
    assert flops(flash_3, q, k, v) == 2 * product
    assert flops(flash_backward, q.clone(), q, k, v) == 5 * product
    lengths = torch.tensor([0, 8, 16], dtype=torch.int32)
    tokens = [x.flatten(0, 1) for x in (q, k, v)]
    assert flops(lambda *x: flash_varlen(*x, lengths, lengths, 8, 10), *tokens) == 2 * product


@torch.library.custom_op("xformers::efficient_attention_forward_cutlass", mutates_args=())
def cutlass_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """As xformers registers it: [batch, sequence, heads, head], called by keywords."""
    return torch.empty_like(query)


@torch.library.custom_op("xformers::efficient_attention_backward_cutlass", mutates_args=())
def cutlass_backward(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("xformers_flash::flash_fwd", mutates_args=())
def xformers_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int,
    p: float, scale: float, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """As xformers registers it: all sequences end to end, [tokens, heads, head]."""
    return torch.empty_like(q)


@torch.library.custom_op("xformers_flash::flash_bwd", mutates_args=())
def xformers_flash_back(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int, p: float,
) -> torch.Tensor:  # fmt: skip
    return torch.empty_like(q)


def test_attention_of_xformers_is_counted():
    q, k, v = (tensor(2, length, 3, 16).detach() for length in (8, 10, 10))
    product = 2 * 2 * 3 * 8 * 10 * 16
    by_name = flops(lambda q, k, v: cutlass_forward(query=q, key=k, value=v, dropout_p=0.0), q, k, v)
    assert by_name == 2 * product
    assert flops(cutlass_backward, q.clone(), q, k, v) == 5 * product
    lengths, tokens = torch.tensor([0, 8, 16], dtype=torch.int32), [x.flatten(0, 1) for x in (q, k, v)]
    assert flops(lambda *x: xformers_flash(*x, lengths, lengths, 8, 10, 0.0, 0.25, True), *tokens) == 2 * product
    back = [tokens[0].clone(), *tokens, tokens[0].clone(), torch.zeros(3, 16)]
    assert flops(lambda *x: xformers_flash_back(*x, lengths, lengths, 8, 10, 0.0), *back) == 5 * product


def test_fourier_transforms_are_counted():
    x = tensor(3, 64)
    assert flops(torch.fft.fft, x.to(torch.complex64).detach()) == 5 * 3 * 64 * 6
    assert flops(torch.fft.rfft, x.detach()) == 5 * 3 * 64 * 6 // 2
    assert flops(lambda z: torch.fft.irfft(z, n=64), torch.randn(3, 33, dtype=torch.complex64)) == 5 * 3 * 64 * 6 // 2
    assert flops(torch.fft.fft2, torch.randn(2, 8, 16, dtype=torch.complex64)) == 5 * 2 * 128 * 7


def test_elementwise_operators_count_nothing():
    assert flops(lambda x: (x * 2).exp(), tensor(8, 8)) == 0


@pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC) tensor support is in beta")
@pytest.mark.parametrize("layout", ["coo", "csr", "addmm"])
def test_a_sparse_product_multiplies_what_is_stored(layout):
    dense = torch.zeros(64, 64)
    dense[torch.arange(64), torch.arange(64)] = 1.0
    adjacency = dense.to_sparse_csr() if layout == "csr" else dense.to_sparse()
    model = nn.Linear(16, 8, bias=False)
    x = torch.randn(64, 16)

    def step():
        h = model(x)
        (torch.sparse.mm(adjacency, h) if layout == "addmm" else adjacency @ h).sum().backward()

    report = record_step(model, step)
    rows = [o for o in report.operators if o.flops and not o.weight]
    assert [o.phase for o in rows] == ["forward", "backward"]
    assert {o.flops for o in rows} == {2 * 64 * 8}  # one stored entry per row, not 64
    assert report.layer("").total_flops == 2 * (2 * 64 * 16 * 8)


def _cudnn(name: str, *, batch_first: bool = False, packed: tuple[int, ...] = ()) -> tuple[Trace, Call]:
    """A layer of an LSTM of 32 units and 16 inputs, both directions: ten steps of three samples."""
    tokens = (3, 10, 16) if batch_first else (10, 3, 16)
    shapes = [(sum(packed), 16) if packed else tokens, *[(128, 16), (128, 32), (128,), (128,)] * 2]
    values = [Value(shape, "fp32", 0, "input") for shape in shapes]
    states = [None] * (6 if name.endswith("_backward") else 2)
    about = [2, 32, 0, 1, batch_first, 0.0, True, True, list(packed), None]
    args = (Ref(0), [Ref(index) for index in range(1, 9)], 4, None, *states, *about)
    call = Call(0, None, f"aten::{name}", args, {}, tuple(range(9)), (), "rnn", "forward", 0, -1)
    return Trace(values=values, calls=[call]), call


@pytest.mark.parametrize(("name", "times"), [("_cudnn_rnn", 1), ("_cudnn_rnn_backward", 2)])
def test_cudnns_recurrent_kernel_multiplies_every_token_by_all_weights(name, times):
    trace, call = _cudnn(name)
    assert call_flops(trace, call, "gemm") == times * 2 * (2 * 30 * (128 * 16 + 128 * 32))
    assert recurrent_gemms(trace, call) == [(30, 16, 128, 1), (3, 32, 128, 10)] * 2


def test_cudnns_steps_where_samples_come_first_or_are_packed():
    assert recurrent_gemms(*_cudnn("_cudnn_rnn", batch_first=True))[1] == (3, 32, 128, 10)
    assert recurrent_gemms(*_cudnn("_cudnn_rnn", packed=(3, 3, 2, 1)))[:2] == [(9, 16, 128, 1), (2, 32, 128, 4)]
