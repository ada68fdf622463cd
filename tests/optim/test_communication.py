import math
from datetime import timedelta
from typing import get_args
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoprec.errors import UnsupportedError
from autoprec.optim.audit import audit_optimizer
from autoprec.optim.communication import (
    WIRE,
    _pack,
    _shares,
    _unpack,
    find_distributed,
    install_gradient_hook,
)
from autoprec.optim.optimizer import runtime_of, wrap_optimizer
from autoprec.policy import CommunicationPolicy
from tests.levels import LEVELS
from tests.warm import run_ranks


def compressed_mean(gradients, how):
    """Return the mean over ranks that the hook computes, for all ranks' flat gradients held in one process."""
    ranks = len(gradients)
    shares = torch.stack([_shares(g.reshape(-1), ranks) for g in gradients])
    length = shares.shape[2]
    received = torch.stack([_unpack(_pack(rank, how), length, how) for rank in shares])
    mean = received.sum(0).div_(ranks)
    out = torch.cat([_unpack(_pack(share[None], how), length, how) for share in mean], dim=0)
    return out.view(-1)[: gradients[0].numel()].view(gradients[0].shape)


def gradients(ranks: int, count: int = 5000, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(1.5 * torch.randn(count, generator=generator))
    common = torch.randn(count, generator=generator) * scale
    return [common + 2 * torch.randn(count, generator=generator) * scale for _ in range(ranks)]


def snr(found: torch.Tensor, ranks: list[torch.Tensor]) -> float:
    true = torch.stack(ranks).double().mean(0)
    return float(10 * torch.log10(true.square().sum() / (found.double() - true).square().sum()))


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize(("name", "decibels"), [("fp8", 28.0), ("bf16", 50.0)])
def test_signal_to_noise_does_not_fall_with_the_number_of_ranks(ranks, name, decibels):
    made = gradients(ranks)
    assert snr(compressed_mean(made, WIRE[name]), made) >= decibels


@pytest.mark.parametrize("name", ["fp8", "bf16"])
@pytest.mark.parametrize("count", [1, 255, 1024, 1025])
def test_the_mean_keeps_its_shape_and_small_values(name, count):
    made = [g.view(1, -1) * 1e-12 for g in gradients(3, count)]
    found = compressed_mean(made, WIRE[name])
    assert found.shape == (1, count)
    assert torch.isfinite(found).all()
    assert (found != 0).any()


@pytest.mark.parametrize("name", ["fp8", "bf16"])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_on_one_rank_is_seen_by_all(name, bad):
    made = gradients(4, 600)
    made[2][300] = bad
    assert not torch.isfinite(compressed_mean(made, WIRE[name])).all()


def test_bytes_on_the_wire():
    shares = _shares(torch.randn(1 << 16), 4)
    sent = {name: _pack(shares, WIRE[name]).numel() / shares.numel() for name in ("bf16", "fp8")}
    assert sent == {"bf16": 2.0, "fp8": pytest.approx(1.016, rel=1e-3)}


def test_every_format_of_a_policy_has_a_codec():
    assert set(WIRE) == set(get_args(CommunicationPolicy.model_fields["gradients"].annotation))


def _compiled_wrappers():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    compiled = torch.compile(backend="eager")
    for around, inside in ((False, False), (True, False), (False, True), (True, True)):
        model = nn.Linear(4, 4)
        wrapper = nn.parallel.DistributedDataParallel(compiled(model) if inside else model)
        call = compiled(wrapper) if around else wrapper
        assert all(find_distributed(one) is wrapper for one in (model, wrapper, call)), (around, inside)
        assert install_gradient_hook(call, "bf16") is not None
        assert find_distributed(nn.Linear(4, 4)) is None
    dist.destroy_process_group()


def test_a_wrapper_is_found_whatever_is_compiled_around_or_inside_of_it(tmp_path):
    ended = run_ranks(lambda _rank: _compiled_wrappers(), cwd=tmp_path, ranks=1)
    assert ended.returncode == 0, ended.stderr


def test_a_model_that_is_not_distributed_communicates_nothing():
    model = nn.Linear(2, 2)
    assert find_distributed(model) is None
    assert install_gradient_hook(model, "fp8") is None


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 300), nn.Tanh(), nn.Linear(300, 3))


def train(model: nn.Module, rank: int, steps: int) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x = torch.randn(64, 12, generator=generator)
        y = torch.stack([x.sum(1) / 3, x[:, 0], x[:, 1] * x[:, 2]], 1)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def gather(values: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(out, values)
    return out


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for name in ("fp32", "bf16", "fp8"):
        model = network()
        wrapped = nn.parallel.DistributedDataParallel(model)
        hook = install_gradient_hook(model, name)  # by the inner module: its wrapper is found
        assert (hook is None) == (name == "fp32")
        loss = train(wrapped, rank, 25)
        parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        first, second = gather(parameters)
        assert torch.equal(first, second), name
        found[name] = loss
        if hook is not None:
            assert install_gradient_hook(wrapped, "fp32") is hook  # changed in place, not registered again
            with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
                train(wrapped, rank, 1)
            assert (hook.name, reduced.call_count) == ("fp32", 1)
    # a whole level: stochastic rounding draws the same noise on every rank, weights are emulated behind DDP's back
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    policy, optimizer = LEVELS["bf16-sr-fp8"], torch.optim.AdamW(model.parameters(), lr=1e-2)
    wrap_optimizer(optimizer, policy, model)
    for step in range(6):
        optimizer.zero_grad()
        wrapped(torch.randn(8, 12, generator=torch.Generator().manual_seed(2 * step + rank))).square().sum().backward()
        optimizer.step()
    first, second = gather(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(first, second)
    assert torch.equal(model[0].weight, model[0].weight.bfloat16().float())
    assert list(runtime_of(optimizer).weights.emulated.values()) == [2]
    audit = audit_optimizer(policy, optimizer, model)
    assert all(entry["ok"] for entry in audit.values()), audit
    assert audit["communication"]["executed"] == "fp8"
    assert "DDP" in audit["gradients"]["reason"]
    # one bucket, directly: the hook computes what the simulation computes
    model = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    install_gradient_hook(wrapped, "fp8")
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(rank))
    wrapped(x).square().sum().backward()
    alone = network()
    alone(x).square().sum().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in reversed(list(alone.parameters()))])
    both = torch.cat([p.grad.reshape(-1) for p in reversed(list(model.parameters()))])
    mean = torch.stack(gather(flat)).double().mean(0)
    assert float((both - mean).norm() / mean.norm()) < 0.04
    own = nn.parallel.DistributedDataParallel(network())
    own.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(UnsupportedError, match="register_comm_hook"):
        install_gradient_hook(own, "fp8")
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_stay_bit_identical_and_train(tmp_path):
    ended = run_ranks(lambda rank: rank_main(rank, str(tmp_path)), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found = torch.load(tmp_path / "found")
    for name in ("bf16", "fp8"):
        assert found[name] == pytest.approx(found["fp32"], rel=0.05)
