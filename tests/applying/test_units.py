"""What a policy can decide about, and its names, whatever wraps the model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrizations

from autoprec.applying.units import clean_name, kind_of, tunable_units, unwrap


class Conv1D(nn.Module):
    """Shape and attributes of ``transformers.pytorch_utils.Conv1D``."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.weight, self.bias = nf, nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.a, self.twin = nn.Linear(16, 16), None
        self.twin = self.a
        self.c1, self.conv, self.up = Conv1D(8, 16), nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 3)
        self.attention = nn.MultiheadAttention(16, 2)
        self.norm, self.lazy = nn.LayerNorm(16), nn.LazyLinear(4)
        self.gain = nn.Parameter(torch.ones(16))


def test_kinds_and_names() -> None:
    units = tunable_units(Net())
    assert {name: unit.kind for name, unit in units.items()} == {
        "a": "linear",
        "c1": "conv1d",
        "conv": "conv",
        "up": "conv",
        "attention.in_proj_weight": "attention",
        "attention.out_proj": "attention",
    }
    assert units["attention.out_proj"].weight.shape == (16, 16)
    assert list(tunable_units(Net())) == list(units)


def test_wrappers_are_looked_through() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1] = checkpoint_wrapper(net[1])
    assert list(tunable_units(net)) == ["0", "1"]
    assert unwrap(nn.DataParallel(net)) is net
    net[0] = torch.compile(net[0], backend="eager")
    assert list(tunable_units(net)) == ["0", "1"]
    assert clean_name("a._orig_mod.b._checkpoint_wrapped_module.c") == "a.b.c"


def test_parametrised_and_subclassed_linears() -> None:
    assert kind_of(parametrizations.weight_norm(nn.Linear(4, 4))) == "linear"

    class Own(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    class Named(nn.Linear):
        pass

    assert kind_of(Own(4, 4)) == "functional"
    assert kind_of(Named(4, 4)) == "linear"
    assert kind_of(nn.Linear(4, 4).to(torch.float8_e4m3fn).requires_grad_(False)) == "linear"


def test_looking_at_a_parametrised_layer_does_not_change_it() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 12)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    unit = tunable_units(model)["0"]
    assert (unit.kind, tuple(unit.weight.shape), unit.weight.requires_grad) == ("linear", (12, 8), True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
