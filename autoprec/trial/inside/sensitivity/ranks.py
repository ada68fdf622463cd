"""Gradient errors of a distributed step: all ranks replay the same passes, and fail a probe together.

A rank that stopped by itself (no memory for a pass on its device) would leave the others in an exchange, which its next
training step would then answer with gradients of another kind. So ranks exchange nothing in a probe before they have
reported to each other, over a gloo group of their own, that all of them got there; if one did not, the probe has failed
on all of them, with its reason (:mod:`.replay`).

Passes of DistributedDataParallel are played without its exchange, and gradients averaged afterwards. Where the model
itself exchanges tensors in its passes (FSDP, tensor parallelism, SyncBatchNorm), a rank that fails inside of one leaves
the others waiting for it: then nothing can be reported, and the run ends with an error instead of wrong gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from autoprec.errors import AutoPrecError
from autoprec.numerics.delayed.steps import not_reduced
from autoprec.numerics.sharded import world_size

T = TypeVar("T")
#: A pass that takes this much longer on one rank than on another has not slowed down: it waits for one that failed.
TIMEOUT_S = 300.0


class EndedError(Exception):
    """A probe failed on one of the ranks, and so on all; ``str`` is why."""


class RanksApartError(AutoPrecError):
    """Ranks wait for each other in different places, so that their exchanges no longer fit."""


class Ranks:
    """The ranks of the default process group, or this process alone."""

    def __init__(self) -> None:
        self._group: Any = None

    def together(self, work: Callable[[], T]) -> T:
        """Do ``work`` on every rank, and return what it found on this one.

        Raises:
            EndedError: it failed on one of them; on all ranks alike.
            RanksApartError: the others do not answer.
        """
        failed = ""
        try:
            found = work()
        except Exception as error:  # reported to the other ranks, and then to the user
            failed = f"{type(error).__name__}: {error}"
        reported = self._exchanged(failed) if world_size() > 1 else [failed]
        for number, reason in enumerate(reported):
            if reason:
                raise EndedError(f"rank {number}: {reason}" if len(reported) > 1 else reason)
        return found

    def _exchanged(self, failed: str) -> list[str]:
        reported = [""] * world_size()
        try:
            if self._group is None and dist.is_gloo_available():
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
            dist.all_gather_object(reported, failed, group=self._group)
        except Exception as error:
            raise RanksApartError(
                f"while gradient errors were measured the other ranks did not answer for {TIMEOUT_S:.0f} s"
                + (f", after this one had failed ({failed})" if failed else f" ({type(error).__name__}: {error})")
                + ": they wait in the middle of a pass, and training on would mix its tensors with those of a step",
                fix="see the rank's log for why it failed",
            ) from error
        return reported


def replicas(modules: Iterable[nn.Module]) -> list[nn.parallel.DistributedDataParallel]:
    """Return the DistributedDataParallel wrappers around and inside of modules."""
    found = (one for module in modules for one in module.modules())
    return list(dict.fromkeys(one for one in found if isinstance(one, nn.parallel.DistributedDataParallel)))


@contextlib.contextmanager
def playing_alone(wrappers: Iterable[nn.parallel.DistributedDataParallel]) -> Iterator[None]:
    """Let forward and backward run on this rank alone: no gradients, buffers or delayed scales are exchanged."""
    before = [(one, one.require_backward_grad_sync, one.require_forward_param_sync) for one in wrappers]
    try:
        for one, _, _ in before:
            one.require_backward_grad_sync = one.require_forward_param_sync = False
        with not_reduced():
            yield
    finally:
        for one, backward, forward in before:
            one.require_backward_grad_sync, one.require_forward_param_sync = backward, forward


def average(wrappers: Iterable[nn.parallel.DistributedDataParallel]) -> None:
    """Average the gradients that :func:`playing_alone` left on each rank, after :func:`fill`."""
    for wrapper in wrappers:
        size = dist.get_world_size(wrapper.process_group)
        for parameter in _reduced(wrapper) if size > 1 else ():
            dist.all_reduce(parameter.grad, group=wrapper.process_group)
            parameter.grad.div_(size)  # type: ignore[union-attr]


def fill(wrappers: Iterable[nn.parallel.DistributedDataParallel]) -> None:
    """Give each parameter a dense gradient: one that a rank did not reach counts as zero."""
    for wrapper in wrappers:
        for parameter in _reduced(wrapper):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.layout is not torch.strided:
                parameter.grad = parameter.grad.to_dense()


def _reduced(wrapper: nn.parallel.DistributedDataParallel) -> list[nn.Parameter]:
    ignored = wrapper.parameters_to_ignore
    return [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]
