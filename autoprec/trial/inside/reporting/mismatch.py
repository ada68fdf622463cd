"""How far apart the two sides of reinforcement learning are: training, and the copy of the model that generates.

The importance ratio of a policy gradient divides the probabilities of the one by those of the other. Where they compute
in different precision it is not 1 even for equal weights, its noise grows with the length of an answer, and runs
collapse of it (arXiv 2510.26788). So at a training forward both sides run on its own tokens, in the dtypes in which the
script runs them, and two metrics are reported of their logits: ``rollout_kl``, the mean over tokens of the
Kullback-Leibler divergence of training from rollout, and ``rollout_flips``, the share of tokens whose most likely
successor differs.

Both need equal weights, else they tell how far training has gone since the script copied them: only the forwards are
compared before which the copy has those of the model, rounded to its own dtype.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from autoprec.applying.generating.pairs import copies_of, in_step, is_recognised, recognise
from autoprec.applying.units import LAYERS, unwrap
from autoprec.numerics.sharded import any_rank
from autoprec.trial.inside.observe.discovery import Found
from autoprec.trial.inside.observe.hooks import Hooks
from autoprec.trial.inside.observe.loop import Loop
from autoprec.trial.inside.reporting.reports import Reports
from autoprec.trial.losses import MISMATCH

#: The first steps are not compared: the second one's memory is counted, and until then the copy may not have run.
_SKIPPED = 2
#: Values of logits that are compared at once, in double precision.
_AT_ONCE = 1 << 22
_UNNAMED = "it names no copy of the model that generates, and {}: autoprec.register(policy=model, rollout=copy)"
_NAMED = "autoprec.register"
_RECOGNISED = "AutoPrec, of the model and the only other module with its parameters' names and shapes ({})"
_UNSEEN = "no call of the model itself was seen in a training step: its parts are called, or its forward is"
_BEHIND = "the copy had other weights than the model at each training forward: it is written to by no exact copy"


def compare(rollout: Tensor, training: Tensor) -> tuple[float, float]:
    """Return the mean divergence of training from rollout, in nats, and the share of rows whose maximum differs.

    Args:
        rollout, training: logits ``[tokens, vocabulary]``.
    """
    rows = max(1, _AT_ONCE // max(1, rollout.shape[-1]))
    wide = torch.float32 if rollout.device.type == "mps" else torch.float64
    kl, flips = 0.0, 0
    for ours, theirs in zip(torch.split(rollout, rows), torch.split(training, rows), strict=True):
        p, q = (one.to(wide).log_softmax(-1) for one in (ours, theirs))
        gap = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0)  # what is masked out has no share in it
        kl += float(gap.sum())
        flips += int((ours.argmax(-1) != theirs.argmax(-1)).sum())
    return max(kl, 0.0) / len(rollout), flips / len(rollout)


def logits_of(output: Any) -> Tensor | None:
    """Return the logits of a model's output: itself, its attribute, its key, or its first part; None where none are.

    Args:
        output: what the forward returned; logits are ``[..., tokens, vocabulary]``.
    """
    found = getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    found = output if found is None else found
    plain = isinstance(found, Tensor) and found.is_floating_point() and found.dim() >= 2
    return found if plain else None


def measure_mismatch(metric: str, found: Found, hooks: Hooks, loop: Loop, reports: Reports) -> None:
    """Report both metrics at the training forwards of a trial, where one of them is what it was asked for.

    Args:
        metric: what the trial was asked for.
        found: what the script trains.
        hooks: those of the process.
        loop: that counts the steps; what is done here is not on its clock.
        reports: takes the metrics.
    """
    if metric not in MISMATCH:
        return
    rollout = recognise(found.root)
    if rollout is None:
        kinds = ", ".join(sorted(type(one).__name__ for one in copies_of(found.root)))
        reports.why = _UNNAMED.format(f"has several ({kinds})" if kinds else "has none")
        return
    reports.why = _UNSEEN
    source = _RECOGNISED.format(type(rollout).__name__) if is_recognised(found.root) else _NAMED
    loop.at_boundary = _Mismatch(found, rollout, hooks, loop, reports, source).wait


class _Around:
    """A hook before a module's forwards that knows what autocast they run under; copies of the module share it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.enabled, self.dtype = kind, False, torch.bfloat16

    def __call__(self, *_: Any) -> None:
        self.enabled, self.dtype = torch.is_autocast_enabled(self.kind), torch.get_autocast_dtype(self.kind)

    def again(self) -> torch.autocast:
        """Return the autocast that the last forward ran under."""
        return torch.autocast(self.kind, dtype=self.dtype, enabled=self.enabled)

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Around:
        return self

    def __reduce__(self) -> tuple[type[_Around], tuple[str]]:
        return _Around, (self.kind,)


class _Mismatch:
    def __init__(
        self, found: Found, rollout: nn.Module, hooks: Hooks, loop: Loop, reports: Reports, source: str
    ) -> None:
        self._source = source
        self._root, self._rollout, self._device = unwrap(found.root), rollout, found.parameters[0].device
        self._hooks, self._loop, self._reports = hooks, loop, reports
        self._around = _Around(self._device.type)
        rollout.register_forward_pre_hook(self._around)

    def wait(self) -> None:
        """Watch for the model's next training forward."""
        if self._loop.steps >= _SKIPPED:
            self._hooks.watch(self._on_call)

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if unwrap(module) is not self._root:
            return
        self._hooks.unwatch()
        with self._loop.clock.left_out(), self._leaving_no_trace():
            if any_rank(not in_step(self._root, self._rollout), self._device):
                self._reports.why = _BEHIND
                return
            try:
                found = self._both(args, kwargs)
            except Exception as error:
                self._stop(f"the copy's forward failed on the arguments of the model's: {error}"[:300])
                return
        if found is None:
            self._stop("the two sides return no logits of one shape: a tensor, .logits, or the first part of a tuple")
        else:
            self._reports.add(self._source, dict(zip(MISMATCH, found, strict=True)))

    def _stop(self, why: str) -> None:
        self._reports.why, self._loop.at_boundary = why, None

    def _both(self, args: tuple[Any, ...], kwargs: Any) -> tuple[float, float] | None:
        training = logits_of(self._root(*args, **kwargs))
        with self._around.again():
            rollout = logits_of(self._rollout(*args, **kwargs))
        if training is None or rollout is None or training.shape != rollout.shape:
            return None
        ours, theirs = rollout.flatten(0, -2), training.flatten(0, -2)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.shape == training.shape[:-1]:  # padding is generated by neither
            ours, theirs = ours[mask.flatten() != 0], theirs[mask.flatten() != 0]
        return compare(ours, theirs) if len(ours) else None

    @contextlib.contextmanager
    def _leaving_no_trace(self) -> Iterator[None]:
        """Run the body without gradients, dropout, random numbers of the script's, or a peak of memory that stays.

        Layers stay in training mode: under delayed scaling they would else run other scales than those of training.
        """
        cuda = self._device.type == "cuda"
        if cuda:
            self._loop.peak_bytes = max(self._loop.peak_bytes, torch.cuda.max_memory_allocated(self._device))
        training = [part for part in self._root.modules() if part.training and not isinstance(part, LAYERS)]
        try:
            for part in training:
                part.training = False
            with torch.random.fork_rng(devices=[self._device] if cuda else []), torch.no_grad():
                yield
        finally:
            for part in training:
                part.training = True
            if cuda:
                torch.cuda.reset_peak_memory_stats(self._device)
