"""Casts of a weight that are kept from one micro-batch to the next, as a weight changes once an optimizer step.

A cast is used again while the weight is the same Parameter in the same memory, at the same version, and no
``torch.optim`` optimizer has stepped. That misses one way to write a weight: through ``.data``, which bumps no version,
between two micro-batches of one step (adversarial weight perturbation is often written so), or in loops that update
weights so and have no optimizer. So the weight is compared as well. On a CPU that is all of it, by sums of its bits,
before each use: a row may be written alone, and where an input is always zero (the border of an image) its column
never changes. On a GPU, where the host would have to wait for the answer, it is some elements; the answer of one step
is read in the next, and if weights were written in this way a warning says so and nothing is kept from then on. Codes
take memory between two forwards, so they are kept only where micro-batches are seen: from the second forward of a
weight between two optimizer steps on, and from the first on once a step had two.

Compiled graphs cast in each forward, as torchao's do. Transformer Engine's ``is_first_microbatch`` is this question,
asked of the user.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from autoprec.errors import AutoPrecWarning
from autoprec.numerics.operand import QuantizedOperand, Spec

#: So many sums of a weight's bits, on a GPU so many of its elements, are compared.
_PARTS = 64
#: What spreads elements over rows and columns alike, whatever the shape: the golden section.
_SPREAD = 0.618034
#: Integers of as many bytes as an element.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STALE = (
    "weights were written between two micro-batches without a new version (through .data): the forwards of one step "
    "used their casts from before; no cast is kept any more. Write to them under torch.no_grad() instead."
)


class _Process:
    """What holds for all weights: how many steps optimizers have taken, and what a GPU says of written weights."""

    def __init__(self) -> None:
        self.steps, self.off = 0, False
        self.flags: dict[torch.device, Tensor] = {}
        self.asked: list[tuple[Tensor, torch.cuda.Event]] = []

    def note(self, written: Tensor) -> None:
        """Keep a device's answer, bool ``[]``, for :meth:`stepped`."""
        flag = self.flags.setdefault(written.device, torch.zeros_like(written))
        flag |= written

    def stepped(self) -> None:
        """Count a step; read the answers that have come, and ask for those of this step."""
        self.steps += 1
        waiting = []
        for answer, event in self.asked:
            if not event.query():  # type: ignore[no-untyped-call]
                waiting.append((answer, event))
            elif answer and not self.off:
                self.off = True
                warnings.warn(_STALE, AutoPrecWarning, stacklevel=2)
        self.asked = [] if self.off else waiting + [_asked(flag) for flag in self.flags.values()]


def _asked(flag: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Ask a GPU for a flag; the answer may be read once the event has passed."""
    answer = torch.empty((), dtype=torch.bool, pin_memory=True)
    answer.copy_(flag, non_blocking=True)
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(flag.device))
    return answer, event


_process = _Process()


def _after_step(_optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    _process.stepped()


register_optimizer_step_post_hook(_after_step)


class KeptCasts:
    """The casts of one layer's weight."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._forwards, self._repeats, self._keeps = 0, False, False
        self._made: dict[Spec, QuantizedOperand] = {}
        self._sample: Tensor | None = None

    def __reduce__(self) -> tuple[type[KeptCasts], tuple[()]]:
        """A copy, whose layer has another weight, and a pickle begin without casts."""
        return KeptCasts, ()

    def begin(self, weight: Tensor) -> None:
        """Note a forward that a backward pass may follow; casts of a weight that has changed are dropped.

        Args:
            weight: ``[out_features, in_features]``, as the layer is given it.
        """
        self._keeps = False
        if not _may_keep(weight):
            return
        key = _key_of(weight)
        if key != self._key:
            self._repeats = self._forwards > 1
            self._key, self._forwards, self._made, self._sample = key, 0, {}, None
        self._forwards += 1
        if self._made and self._is_written(weight):
            self._made, self._sample = {}, None
        self._keeps = self._repeats or self._forwards > 1

    def get(self, weight: Tensor, spec: Spec | None) -> QuantizedOperand | None:
        """Return the cast of a weight ``[out_features, in_features]`` for one GEMM; None where none may be used."""
        if not self._keeps or spec is None or spec not in self._made or self._key != _key_of(weight):
            return None
        return self._made[spec]

    def keep(self, weight: Tensor, *made: QuantizedOperand | None) -> None:
        """Keep casts of the weight of the last :meth:`begin`, where they will be asked for again.

        Args:
            weight: ``[out_features, in_features]``.
            made: its casts; None is passed over.
        """
        if not self._keeps or self._key != _key_of(weight):
            return
        if self._sample is None:
            self._sample = sampled(weight).clone()
        for one in made:
            # what draws random numbers, or learns a scale, is made anew
            if one is not None and not one.spec.stochastic and one.spec.rule.scale != "delayed":
                self._made[one.spec] = one

    def _is_written(self, weight: Tensor) -> bool:
        if self._sample is None or self._sample.device != weight.device:
            return True
        written = (sampled(weight) != self._sample).any()
        if weight.is_cuda:
            _process.note(written)
            return _process.off
        return bool(written)


def sampled(weight: Tensor) -> Tensor:
    """Return what tells whether a weight was written to: 64 sums of its bits and the rest, ``[64 + rest]``, int64.

    On a GPU ``[<= 64]`` of its elements, spread over it.

    Args:
        weight: of two dimensions or more.
    """
    held = weight.detach()
    flat = (held if held.is_contiguous() else held.mT).reshape(-1)  # of a Conv1D without a copy
    if weight.is_cuda:
        places = torch.arange(_PARTS, device=weight.device) * (int(flat.numel() * _SPREAD) | 1) % flat.numel()
        return flat[places]
    if flat.storage_offset() * flat.itemsize % 8:  # of a flat vector
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % (_PARTS * 8 // flat.itemsize)
    sums = flat[:whole].view(torch.int64).view(_PARTS, -1).sum(1)
    return torch.cat([sums, flat[whole:].view(_BITS[flat.itemsize]).to(torch.int64)])


def _key_of(weight: Tensor) -> tuple[object, ...]:
    return weight.data_ptr(), weight._version, weight.shape, weight.stride(), _process.steps


def _may_keep(weight: Tensor) -> bool:
    """Say whether an optimizer alone changes a weight: a trained Parameter or a view of it, outside a CUDA graph."""
    owner = weight if weight._base is None else weight._base
    plain = isinstance(owner, nn.Parameter) and type(owner.data) is Tensor and owner.requires_grad and owner.is_leaf
    captured = weight.is_cuda and torch.cuda.is_current_stream_capturing()
    return plain and not captured and not _process.off
