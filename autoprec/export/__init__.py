"""Policies as configuration of other training stacks, and back.

Every exporter lists what its target cannot express; :func:`export` refuses a lossy export unless it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoprec.errors import UnknownNameError, UnsupportedError
from autoprec.export.base import Export, Exporter, Loss, Request
from autoprec.policy import Policy, first_match

__all__ = ["EXPORTERS", "Export", "Exporter", "Loss", "Request", "exact_target", "export", "exporter"]

#: Every target; its module in :mod:`.stacks` has the same name (``python`` for lightning) and is imported when named.
EXPORTERS = (
    "python",
    "torchao",
    "torchao-fqn",
    "transformer-engine",
    "accelerate",
    "megatron",
    "dlfw-inspect",
    "lightning",
    "msamp",
    "torchtitan",
    "automodel",
)

#: Targets that convert ``nn.Linear`` and nothing else, kinds of other layers, and what is said where none is known.
_LINEAR_ALONE = frozenset(
    ("python", "lightning", "torchao", "torchao-fqn", "accelerate", "transformer-engine", "msamp")
)
_KINDS = {
    "conv": "convolutions are",
    "conv1d": "transformers' Conv1D is",
    "attention_projection": "nn.MultiheadAttention is",
    "expert": "raw weights are",
    "functional": "raw weights are",
    "rnn": "recurrent layers are",
}
_ONLY_LINEAR = (
    "only nn.Linear is converted; --layers with what `autoprec inspect --json` prints lists what other layers lose "
    "(convolutions, Conv1D, recurrent layers, nn.MultiheadAttention, raw weights)"
)


def exporter(name: str) -> Exporter:
    """Return an exporter by name.

    Raises:
        UnknownNameError: with the nearest valid name.
    """
    if name not in EXPORTERS:
        raise UnknownNameError("export target", name, EXPORTERS)
    if name == "lightning":
        return Exporter(name, importlib.import_module("autoprec.export.stacks.python").write_lightning)
    module = importlib.import_module(f"autoprec.export.stacks.{name.replace('-', '_')}")
    return Exporter(name, module.write)


def exact_target(policy: Policy) -> str:
    """Return the first of the stacks that most people use which can express a policy without any loss.

    ``python`` is the last resort: a module with no other dependency than PyTorch, which needs no stack at all.
    """
    for name in ("torchao", "transformer-engine", "accelerate"):
        if not _exported(name, Request(policy)).losses:
            return name
    return "python"


def _exported(target: str, request: Request) -> Export:
    """Return what a target makes of the first phase; none has a word for the others (Transformer Engine's debug
    features take no steps, Megatron's flags none but for layers), so each is listed.
    """
    done = exporter(target).export(request)
    lost = [
        Loss(f"phases: {', '.join(phase.changes)} from {phase.label}", "what the run begins with, to its end")
        for phase in request.policy.phases
    ]
    if request.policy.rollout is not None:
        lost.append(Loss("rollout", "nothing of it is written: set the precision of the engine that generates there"))
    notes = done.notes
    if target in _LINEAR_ALONE:
        told = {(loss.what, loss.match) for loss in done.losses}
        lost += [loss for loss in _not_linear(request) if (loss.what, loss.match) not in told]
        notes += () if request.kinds else (_ONLY_LINEAR,)
    return replace(done, losses=(*done.losses, *lost), notes=notes)


def _not_linear(request: Request) -> list[Loss]:
    """Return what rules lose that are about other layers than nn.Linear, where it is known which those are."""
    around = request.policy.activations
    instead = "as the script wrote it" if around == "keep" else f"{around}, as the activations"
    found = []
    for name, plan in request.plans().items():
        what = _KINDS.get(request.kinds.get(name, ""))
        if what and not plan.keeps and any(r is None or r.format != around for r in plan.recipes):
            rule = first_match(request.policy.layers, name)
            found.append(Loss(plan.describe(), f"{instead}: {what} not converted", rule.match if rule else "*"))
    return list(dict.fromkeys(found))


def export(
    policy: Policy,
    to: str,
    *,
    layers: Sequence[str] | Mapping[str, str] = (),
    allow_lossy: bool = False,
    name: str = "policy.yaml",
) -> Export:
    """Write a policy as the configuration of another stack.

    Args:
        policy: the policy.
        to: a key of :data:`EXPORTERS`.
        layers: names of the model's tunable layers, in model order; some targets need them to be exact.
            A mapping gives their kinds, as ``inspect --json`` has them.
        allow_lossy: accept what the target cannot express; it is listed in the result.
        name: what the policy is called in comments.

    Raises:
        UnknownNameError: no such target.
        UnsupportedError: the target cannot express all of it and ``allow_lossy`` is off; the message lists what.
    """
    kinds = {key: kind for key, kind in layers.items() if kind} if isinstance(layers, Mapping) else {}
    done = _exported(to, Request(policy, tuple(layers), name, kinds))
    if done.losses and not allow_lossy:
        listed = "".join(f"\n  - {line}" for line in done.lossy)
        raise UnsupportedError(
            f"{to} cannot express all of this policy:{listed}", where=name, fix="accept that with --allow-lossy"
        )
    return done
