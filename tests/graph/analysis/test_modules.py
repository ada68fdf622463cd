"""Names: those of the applier, through wrappers, with ties known."""

from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.applying.units import tunable_units
from autoprec.graph.analysis.modules import ModelNames
from autoprec.graph.recorder import record_step
from tests.graph.models import Decoder
from tests.warm import run_ranks


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


GATHERED = ("layers and root", "root alone", "not freed after forward", "bfloat16", "before its first step", "no bias")


def record_gathered(rank: int, folder: Path) -> None:
    """Record a step of a model under FSDP2, in several ways to shard it, and save what is known of its layers."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    found = {}
    for how in GATHERED:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64, bias=how != "no bias"), nn.GELU(), nn.Linear(64, 32))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if how == "bfloat16" else None)
        for part in (*(() if how == "root alone" else (model[0], model[2])), model):
            fully_shard(part, reshard_after_forward=how != "not freed after forward", mp_policy=policy)
        if how != "before its first step":
            model(torch.randn(8, 16)).sum().backward()
        report = record_step(model, lambda model=model: model(torch.randn(8, 16)).sum().backward())
        found[how] = {layer.name: (layer.tunable, layer.reason, sorted(layer.flops)) for layer in report.layers}
    torch.save(found, folder / f"gathered.{rank}")
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_weight_that_fsdp2_gathers_is_its_layers(tmp_path: Path) -> None:
    """A search of two ranks said "no trainable GEMM to tune: its weight is computed in a way that is not followed"."""
    ended = run_ranks(lambda rank: record_gathered(rank, tmp_path), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        found = torch.load(tmp_path / f"gathered.{rank}")
        assert tuple(found) == GATHERED
        for how, layers in found.items():
            assert {name: row[0] for name, row in layers.items()} == {"0": True, "2": True}, (how, layers)
            assert layers["0"][2] == ["fprop", "wgrad"], how
            assert layers["2"][2] == ["dgrad", "fprop", "wgrad"], how
