"""The dtype that a copy's weights are held in, in place and back."""

import copy

import torch
from torch import nn

from autoprec.applying.generating.recast import cast, dtypes_of, put_dtypes


def pair_of() -> tuple[nn.Module, nn.Module]:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    return model, copy.deepcopy(model)


def test_weights_and_buffers_are_cast_and_the_parameters_stay_the_same_objects() -> None:
    model, rollout = pair_of()
    before = dict(rollout.named_parameters())
    cast(model, rollout, torch.bfloat16)
    assert all(one is before[name] and one.dtype is torch.bfloat16 for name, one in rollout.named_parameters())
    assert rollout[1].running_mean.dtype is torch.bfloat16  # type: ignore[index]
    assert rollout[1].num_batches_tracked.dtype is torch.int64  # type: ignore[index]
    rollout.load_state_dict(model.state_dict())
    assert rollout[0].weight.dtype is torch.bfloat16  # type: ignore[index]
    put_dtypes(rollout, None)
    assert {one.dtype for one in rollout.parameters()} == {torch.float32}
    assert rollout[1].running_mean.dtype is torch.float32  # type: ignore[index]
    assert dtypes_of(rollout) is None


def test_weights_that_the_script_has_rounded_are_read_anew_where_they_are_the_models() -> None:
    """Fp16 has three bits more than bf16: of weights that bf16 has rounded it would hold none of them."""
    model, rollout = pair_of()
    rollout.to(torch.bfloat16)
    cast(model, rollout, torch.float16)
    assert torch.equal(rollout[0].weight, model[0].weight.half())  # type: ignore[index]

    model, rollout = pair_of()
    rollout.to(torch.bfloat16)
    with torch.no_grad():
        rollout[0].bias.zero_()  # type: ignore[index]  # weights of its own: they stay what they are
    held = rollout[0].weight.clone()  # type: ignore[index]
    cast(model, rollout, torch.float16)
    assert torch.equal(rollout[0].weight, held.half())  # type: ignore[index]


def test_dtypes_go_back_and_forth_between_two_times() -> None:
    model, rollout = pair_of()
    cast(model, rollout, torch.float16)
    narrow = dtypes_of(rollout)
    put_dtypes(rollout, None)
    put_dtypes(rollout, narrow)
    assert {one.dtype for one in rollout.parameters()} == {torch.float16}
    assert rollout[1].running_mean.dtype is torch.float16  # type: ignore[index]
    put_dtypes(rollout, None)
    assert {one.dtype for one in rollout.parameters()} == {torch.float32}
