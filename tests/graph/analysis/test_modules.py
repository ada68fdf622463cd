"""Names: those of the applier, through wrappers, with ties known."""

import torch
from torch import nn

from autoprec.applying.units import tunable_units
from autoprec.graph.analysis.modules import ModelNames
from tests.graph.models import Decoder


def test_wrappers_do_not_show():
    model = Decoder(layers=1)
    wrapped = torch.compile(nn.DataParallel(model), backend="eager")
    names = ModelNames(wrapped)
    assert names.root is model
    assert names.name_of(wrapped) == names.name_of(model) == ""
    assert names.name_of(model.blocks[0].up) == "blocks.0.up"
    assert names.name_of(nn.CrossEntropyLoss()) == "<CrossEntropyLoss>"
    assert set(names.applicable()) == set(tunable_units(model))


def test_ties_are_counted_once():
    tied, free = ModelNames(Decoder(tied=True)), ModelNames(Decoder())
    assert tied.tied == {"embed.weight"}
    assert tied.canonical("head.weight") == "embed.weight"
    assert tied.own_parameter("head", "embed.weight") == "head.weight"
    assert tied.own_parameter("norm", "embed.weight") == ""
    assert free.identity()["parameters"] - tied.identity()["parameters"] == free.root.head.weight.numel()


def test_fingerprint_depends_on_names_shapes_and_dtypes_not_on_values():
    first, second = ModelNames(Decoder()).identity(), ModelNames(Decoder()).identity()
    assert first == second
    assert ModelNames(Decoder(layers=1)).identity()["fingerprint"] != first["fingerprint"]
    assert ModelNames(Decoder().to(torch.bfloat16)).identity()["fingerprint"] != first["fingerprint"]
