"""Which weights may travel in FP8; what travels is tested on two ranks in ``tests/applying``."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoprec.optim.audit import audit_optimizer
from autoprec.optim.optimizer import wrap_optimizer
from autoprec.optim.weight_gather import GatheredWeights, _refusal, _Shard, _wanted
from autoprec.policy import Policy
from autoprec.precision.recipes import BUILTIN_RECIPES

POLICY = Policy.model_validate(
    {
        "recipes": {name: BUILTIN_RECIPES[name] for name in ("fp8_rowwise", "bf16")},
        "layers": [{"match": "0", "recipe": "fp8_rowwise"}],
        "default": "bf16",
        "communication": {"weights": "fp8"},
    }
)


def parameter(**fields):
    mesh = SimpleNamespace(mesh=SimpleNamespace(size=lambda: 2))
    shard = torch.zeros(4, 8)
    held = {"_sharded_local_tensor": shard, "padded_sharded_param_size": shard.size(), "_orig_size": torch.Size((8, 8))}
    return SimpleNamespace(**{**held, "mesh_info": mesh, "post_forward_mesh_info": mesh, **fields})


def test_only_weights_that_are_multiplied_in_fp8_are_wanted():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8))
    assert list(_wanted(model, POLICY)) == ["0"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"_orig_size": torch.Size((7, 8))}, "not sharded evenly"),
        ({"post_forward_mesh_info": object()}, "a part of the ranks"),
        ({"is_dtensor": True}, "two dimensions"),
        ({"_unsharded_param": None}, "before the first step"),
    ],
)
def test_what_cannot_travel_in_fp8_says_why(fields, why):
    found = _refusal(parameter(**fields))
    assert why in found
    assert bool(found) == bool(why)


def test_another_librarys_form_is_left_alone_and_ours_may_be_put_on_again():
    made = parameter()
    made._sharded_local_tensor.fsdp_pre_all_gather = lambda mesh: None
    assert "another library" in _refusal(made)
    made._sharded_local_tensor.fsdp_pre_all_gather = _Shard(made, GatheredWeights()).before
    made._unsharded_param = None
    assert _refusal(made) == ""


def test_a_shard_comes_back_as_a_whole_of_any_size():
    flat, mesh = torch.randn(300), SimpleNamespace(size=lambda: 1)
    made = parameter(_sharded_param_data=flat, _orig_size=torch.Size((3, 100)))
    shard = _Shard(made, GatheredWeights())
    packed, values = shard.before(mesh, None, None, nn.Module(), None)
    whole, (held,) = shard.after(packed, values, torch.bfloat16)
    assert whole is held
    assert (whole.float().view(-1) - flat).norm() < 0.05 * flat.norm()
    again = torch.zeros(3, 100)
    assert shard.after(packed, values, torch.float32, out=again) is None
    assert torch.equal(again.bfloat16(), whole)


def test_without_fsdp2_the_audit_says_that_nothing_is_gathered():
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), POLICY, model)
    row = audit_optimizer(POLICY, optimizer, model)["communication.weights"]
    assert (row["executed"], row["ok"]) == ("-", True)
    assert "not under FSDP2" in row["reason"]
