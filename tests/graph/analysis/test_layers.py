"""Layers: every weighted GEMM is one, named as a policy names it, and says why it is or is not tunable."""

import warnings

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence

from autoprec.graph.recorder import record_step
from tests.graph.models import WIDTH, Decoder, Mixture, decoder_step


def record(model, *args):
    return record_step(model, lambda: model(*args).square().mean().backward())


def test_tied_head_is_tied_and_named_after_its_module():
    model = Decoder(tied=True)
    head = record_step(model, lambda: decoder_step(model)).layer("head")
    assert head.flags == ("head", "tied")
    assert head.weight == "embed.weight"
    assert head.tunable


def test_mixture_of_experts():
    torch.manual_seed(0)
    report = record(Mixture(), torch.randn(64, WIDTH))
    gate = report.layer("gate")
    assert "router" in gate.flags
    assert not gate.tunable
    idle = report.layer("experts.3.w1")
    assert idle.flags == ("never_called",)
    assert idle.tunable
    assert "moves with its group" in idle.reason
    assert report.groups["experts.*.w1"] == tuple(f"experts.{i}.w1" for i in range(4))
    assert report.groups["experts.*.w2"] == tuple(f"experts.{i}.w2" for i in range(4))
    rows = sum(g.m for i in range(3) for g in report.layer(f"experts.{i}.w1").gemms if g.role == "fprop")
    assert rows == 64  # every token met one expert


def test_a_layer_nobody_calls_is_listed_and_left_alone():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(x)

    layer = record(Net(), torch.randn(2, 8)).layer("spare")
    assert (layer.flags, layer.tunable, layer.gemms) == (("never_called",), False, ())
    assert "never called" in layer.reason


def test_multihead_attention_has_its_projections():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

        def forward(self, x):
            return self.a(x, x, x, need_weights=False)[0]

    report = record(Net(), torch.randn(2, 8, WIDTH))
    assert [layer.name for layer in report.layers] == ["a.in_proj_weight", "a.out_proj"]
    assert {layer.kind for layer in report.layers} == {"attention_projection"}
    assert report.layer("a.in_proj_weight").flops["fprop"] == 2 * 16 * WIDTH * 3 * WIDTH


def test_lstm_is_one_layer_with_its_flops_and_one_dtype():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(16, 24, batch_first=True)

        def forward(self, x):
            return self.rnn(x)[0]

    layer = record(Net(), torch.randn(2, 5, 16)).layer("rnn")
    assert (layer.kind, layer.tunable) == ("rnn", True)
    assert "one dtype for all its gates" in layer.reason
    assert layer.flops["fprop"] == 2 * 2 * 5 * (16 + 24) * 4 * 24
    assert sum(layer.flops.values()) == 3 * layer.flops["fprop"]
    at_once, by_step = [gemm for gemm in layer.gemms if gemm.role == "fprop"]
    assert (at_once.m, at_once.k, at_once.n, at_once.calls) == (2 * 5, 16, 4 * 24, 1)
    assert (by_step.m, by_step.k, by_step.n, by_step.calls) == (2, 24, 4 * 24, 5)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("more", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}, {"proj_size": 8}])
def test_every_recurrent_layer_has_its_products(cls, packed, more):
    if "proj_size" in more and cls is not nn.LSTM:
        pytest.skip("only an LSTM projects its state")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = cls(16, 24, **more)

        def forward(self, x):
            return self.rnn(pack_padded_sequence(x, [5, 3]) if packed else x)[0]

    def step():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # oneDNN has no projections, and says so once
            out = model(torch.randn(5, 2, 16))
        (out.data if packed else out).square().mean().backward()

    model = Net()
    layer = record_step(model, step).layer("rnn")
    rows, gates = 8 if packed else 10, {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[cls]
    assert {gemm.role for gemm in layer.gemms} == {"fprop", "dgrad", "wgrad"}
    state = more.get("proj_size", 24)
    first = 2 * rows * gates * 24 * (16 + state) + (2 * rows * 24 * state if "proj_size" in more else 0)
    later = 2 * 2 * rows * gates * 24 * (2 * 24 + 24)
    expected = first if "num_layers" not in more else 2 * first + later
    assert layer.flops["fprop"] == expected


def test_a_recurrent_cell_is_one_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(16, 24)

        def forward(self, x):
            state = None
            for step in x:
                state = self.cell(step, state)
            return state

    report = record(Net(), torch.randn(5, 2, 16))
    layer = report.layer("cell")
    assert [one.name for one in report.layers] == ["cell"]
    assert (layer.kind, layer.tunable) == ("rnn", True)
    assert layer.flops["fprop"] == 5 * 2 * 2 * (16 + 24) * 3 * 24


@pytest.mark.parametrize(
    ("conv", "image", "flops"),
    [
        (nn.Conv2d(3, 8, 3, stride=2, padding=1), (2, 3, 8, 8), 2 * 2 * 16 * 27 * 8),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 4, 4), 2 * 2 * 16 * 9 * 8),
        (nn.Conv1d(4, 6, 5), (2, 4, 9), 2 * 2 * 5 * 20 * 6),
        (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 3, 3), 2 * 2 * 9 * 4 * 24),
    ],
)
def test_convolutions_count_their_implicit_gemm(conv, image, flops):
    report = record(nn.Sequential(conv), torch.randn(*image, requires_grad=True))
    layer = report.layer("0")
    assert layer.kind == "conv"
    assert layer.flops == {"fprop": flops, "dgrad": flops, "wgrad": flops}
    assert all(g.flops == flops for g in layer.gemms)


def test_a_module_called_three_times_counts_three_times():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            for _ in range(3):
                x = torch.tanh(self.a(x))
            return x

    gemms = {g.role: g.calls for g in record(Net(), torch.randn(2, 8)).layer("a").gemms}
    assert gemms == {"fprop": 3, "dgrad": 2, "wgrad": 3}


@pytest.mark.parametrize(("equation", "tunable"), [("ecd,edf->ecf", True), ("ecd,edf", False)])
def test_an_einsum_is_tunable_where_the_applier_reads_it_as_a_product(equation, tunable):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 8, 16))

        def forward(self, x):
            return torch.einsum(equation, x, self.w)

    layer = record(Net(), torch.randn(4, 3, 8)).layer("w")
    assert (layer.kind, layer.tunable) == ("expert", tunable)
    assert tunable or "einsum" in layer.reason


def test_a_weight_used_by_another_module_is_not_tunable():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x):
            return F.linear(x, self.a.weight)

    layer = record(Net(), torch.randn(2, 8)).layer("a")
    assert not layer.tunable
    assert "not called" in layer.reason


def test_autocast_and_weight_norm_do_not_hide_the_weight():
    model = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(2, 8))
    del out

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(2, 8)).float().sum().backward()

    report = record_step(model, step)
    assert all(layer.dtype == "bf16" for layer in report.layers)
    assert {layer.roles() for layer in report.layers} == {("fprop", "wgrad"), ("fprop", "dgrad", "wgrad")}


class Raw(nn.Module):
    """Raw weights as graph networks hold them: a narrow one, a table, and one that a policy reaches."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(16, 7))
        self.wide = nn.Parameter(torch.randn(16, 16))
        self.pos_table = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return x @ self.pos_table @ self.wide @ self.W


def test_a_librarys_own_linear_that_is_too_narrow_says_so():
    class Linear(nn.Module):  # as torch_geometric has one
        def __init__(self, width):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, 16))

        def forward(self, x):
            return F.linear(x, self.weight)

    model = nn.Sequential(Linear(16), Linear(7))
    report = record_step(model, lambda: model(torch.randn(4, 16)).sum().backward())
    assert report.layer("0").tunable
    assert "7 x 16 is too narrow" in report.layer("1").reason


def test_a_raw_weight_that_is_not_offered_says_why():
    model = Raw()
    report = record_step(model, lambda: model(torch.randn(4, 16)).sum().backward())
    assert report.layer("wide").tunable
    assert "16 x 7 is too narrow: no low-precision GEMM runs with a side below 8" in report.layer("W").reason
    assert "a table or a gain" in report.layer("pos_table").reason


class Borrowed(nn.Module):
    """Multiplies by the weight of a layer that is never called, as Mamba does by that of ``dt_proj``."""

    def __init__(self):
        super().__init__()
        self.dt_proj = nn.Linear(8, 16)

    def forward(self, x):
        return self.dt_proj.weight @ x.transpose(1, 2)


def test_a_borrowed_weight_names_who_multiplies_by_it():
    model = nn.Sequential(Borrowed())
    report = record_step(model, lambda: model(torch.randn(2, 5, 8)).sum().backward())
    layer = report.layer("0.dt_proj")
    assert layer.reason.startswith("its module's forward is not called: 0 multiplies by its weight")


def test_a_layer_whose_gradients_are_differentiated_is_flagged_and_a_checkpointed_one_is_not():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def penalty():
        x = torch.randn(16, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()

    assert all("double_backward" in layer.flags for layer in record_step(model, penalty).layers)

    def checkpointed():
        x = torch.randn(16, 4, requires_grad=True)
        for reentrant in (False, True):
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    assert not any("double_backward" in layer.flags for layer in record_step(model, checkpointed).layers)


NORMS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda module: prune.l1_unstructured(module, "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("how", NORMS)
def test_a_weight_that_is_computed_is_its_layers_own(how):
    norm = NORMS[how]
    model = nn.Sequential(
        norm(nn.Conv1d(4, 8, 3)), norm(nn.ConvTranspose1d(8, 4, 3)), nn.Flatten(), norm(nn.Linear(24, 8))
    )
    report = record(model, torch.randn(2, 4, 6))
    assert [(layer.name, layer.kind, layer.tunable) for layer in report.layers] == [
        ("0", "conv", True),
        ("1", "conv", True),
        ("3", "linear", True),
    ]
    assert [layer.roles() for layer in report.layers] == [("fprop", "wgrad"), *[("fprop", "dgrad", "wgrad")] * 2]
    linear = report.layer("3")
    assert {(g.m, g.k, g.n) for g in linear.gemms if g.role == "fprop"} == {(2, 24, 8)}  # not a power iteration's


def test_a_weight_that_its_module_changes_first_is_not_tunable_and_says_so():
    class Scaled(nn.Linear):  # as StyleGAN's
        def forward(self, x):
            return F.linear(x, self.weight * 0.1, self.bias)

    class Standardised(nn.Conv1d):
        def forward(self, x):
            return F.conv1d(x, self.weight - self.weight.mean(), self.bias)

    report = record(nn.Sequential(Standardised(4, 8, 3), Scaled(4, 8)), torch.randn(2, 4, 6))
    convolution, linear = report.layers
    assert (linear.tunable, linear.reason.partition(" before")[0]) == (False, "computed by the module (mul)")
    assert "a convolution with a forward of its own" in convolution.reason


def test_a_layer_that_ran_is_not_called_never_called():
    model = nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, 8))
    layer = record(model, torch.randn(2, 8)).layer("0")
    assert (layer.flags, layer.tunable) == ((), False)
    assert "not followed" in layer.reason


def test_experts_of_a_grouped_product_are_tunable_and_flagged():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Parameter(torch.randn(4, 32, WIDTH))

        def forward(self, x, ends):
            return torch._grouped_mm(x.bfloat16(), self.up.bfloat16().transpose(-2, -1), offs=ends)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.experts = nn.Linear(WIDTH, WIDTH), Experts()

        def forward(self, x, ends):
            return self.experts(self.inner(x), ends).float()

    ends = torch.tensor([8, 8, 40, 64], dtype=torch.int32)
    layer = record(Model(), torch.randn(64, WIDTH), ends).layer("experts.up")
    assert layer.tunable, layer.reason
    assert "grouped" in layer.flags
    assert {(g.role, g.m, g.k, g.n) for g in layer.gemms} == {
        ("fprop", 64, WIDTH, 32), ("dgrad", 64, 32, WIDTH), ("wgrad", 32, 64, WIDTH)
    }  # fmt: skip


class SoftMixture(nn.Module):
    """Experts that are all run, mixed by a softmax; two sets of classes; attention by hand beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.gate = nn.Linear(32, 32), nn.Linear(32, 4)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.kinds, self.words = nn.Linear(32, 7), nn.Linear(32, 50)

    def forward(self, x):
        scores = torch.softmax(self.query(x) @ x.transpose(-1, -2), -1)
        weights = torch.softmax(self.gate(x), -1)
        x = scores @ sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return self.kinds(x), self.words(x)


def test_what_counts_experts_or_classes_does_not_widen_with_the_model():
    model = SoftMixture()

    def step():
        kinds, words = model(torch.randn(2, 8, 32))
        loss = nn.functional.cross_entropy(kinds.flatten(0, 1), torch.zeros(16, dtype=torch.long))
        (loss + nn.functional.cross_entropy(words.flatten(0, 1), torch.zeros(16, dtype=torch.long))).backward()

    report = record_step(model, step)
    narrow = {layer.name for layer in report.layers if "narrow" in layer.flags}
    (head,) = (layer.name for layer in report.layers if "head" in layer.flags)
    assert narrow | {head} == {"gate", "kinds", "words"}
