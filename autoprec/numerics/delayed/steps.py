"""Delayed scales: amaxes are noted in every forward and backward, and learned once an optimizer step.

A step of the history is a step of the optimizer, whatever a script runs in between: micro-batches, a layer that runs
several times, two losses. Within it the amax is the largest one, and all forwards use the same scales. It is over

* when a ``torch.optim`` optimizer that holds Parameters of the model has stepped (a hook of the process, outside of
  compiled graphs; optimizers that step inside the backward pass: when that has ended);
* else, found at the next training forward in eager mode, when trained Parameters have been written to since the last
  one (their version counters: loops that update weights in place);
* else, as long as neither has ever happened, when a backward pass has run and left no gradient in any Parameter
  (``torch.autograd.grad``, ``functional_call``, weights written through ``.data``, engines that move gradients away);
  on one rank alone, as ranks might find different things.

A model whose weights change in none of these ways, as in a compiled forward without an optimizer, learns nothing and
scales each tensor by its own amax, as at the first step.

Over ranks, amaxes are reduced then, as Transformer Engine does: every rank quantises with the same scale although it
sees other data. One small all-reduce carries the largest magnitudes of all delayed operands of a model, with zeros for
those a rank has not seen (experts that it did not route to). The group is that of DDP, or the mesh of FSDP2, and that
of tensor parallelism; elsewhere a rank learns alone.
The first step has no history: there each rank scales by its own amax.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from autoprec.numerics.linear import LinearExecution, in_backward
from autoprec.numerics.operand import QuantizerState, Spec
from autoprec.numerics.scaling import learn_together
from autoprec.numerics.sharded import fsdp_groups, reduced

Slot = tuple[QuantizerState, str, Spec]
#: Whether forwards are those of this rank alone: see :func:`not_reduced`.
_alone = False


@contextlib.contextmanager
def not_reduced() -> Iterator[None]:
    """Let every rank learn alone meanwhile: one may fail in a pass that the others end."""
    global _alone
    before, _alone = _alone, True
    try:
        yield
    finally:
        _alone = before


def _slots(executions: Iterable[Any]) -> Iterator[Slot]:
    """Yield every delayed operand of every layer, in an order that depends on the policy and the model alone."""
    for execution in executions:
        if isinstance(execution, LinearExecution):
            for operand, spec in execution.delayed_operands().values():
                yield execution.quantizers, operand, spec


def _meshes(root: nn.Module) -> Iterator[Any]:
    """Yield the device meshes of a model under FSDP2 or tensor parallelism, again and again.

    Inside a forward Parameters may be gathered; under both, those that are not split know of FSDP2's mesh alone.
    """
    for parameter in root.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            yield mesh
    yield from (group.mesh_info.mesh for group in fsdp_groups(root))


def data_parallel_groups(root: nn.Module) -> list[Any]:
    """Return the process groups over which a model's ranks see other data or other parts of a weight.

    As seen from inside its forward.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    wrapper: Any = nn.parallel.DistributedDataParallel
    active = getattr(wrapper, "_get_active_ddp_module", lambda: None)()
    found = [] if active is None else [active.process_group]
    for mesh in dict.fromkeys(_meshes(root)):
        found += [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return list(dict.fromkeys(found))


class _Weights:
    """The trained Parameters of a model, and whether they were written to.

    ``before``: those of the model that this one was copied from were, since the first forward of the step.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.held: list[Tensor] = []
        self.versions, self.before = -1, False

    def find(self) -> list[Tensor]:
        """Return them as optimizers hold them; those that FSDP2 gathers for a forward are not the ones it trains."""
        sharded = [one.sharded_param for group in fsdp_groups(self.root) for one in group.fsdp_params]
        return [p for p in (sharded or self.root.parameters()) if p.requires_grad and isinstance(p, nn.Parameter)]

    def forget(self) -> None:
        """Begin a step: the next forward finds them as they are then."""
        self.held, self.versions, self.before = [], -1, False

    def written(self) -> bool:
        """Say whether one has been written to since the first forward of this step."""
        if self.versions < 0:
            return self.before
        return sum(p._version for p in self.held) != self.versions

    def look(self) -> None:
        """Know them as they are now, where this is the first forward of a step."""
        if self.versions < 0:
            self.held = self.find()
            self.versions = sum(p._version for p in self.held)


class DelayedReduction:
    """Runs before each forward of a model whose policy has delayed scaling; ``slots`` is empty where none has.

    Attributes:
        groups: over which the amaxes of this step are reduced when it is over; found in its forwards.
        by_weights: a step was recognised by an optimizer or by the Parameters, and is from now on.
    """

    def __init__(self, root: nn.Module, executions: Iterable[Any]) -> None:
        self.root, self.slots = root, list(_slots(executions))
        self.weights = _Weights(root)
        self.by_weights = self.queued = False
        self.groups: list[Any] = []
        device = next((p.device for p in root.parameters() if p.device.type != "meta"), None)
        for state, operand, spec in self.slots:
            if device is not None:
                state.prepare([(operand, spec)], device)
        self.scales = [state.history(operand, spec) for state, operand, spec in self.slots]
        _LIVE[root] = weakref.ref(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedReduction:
        """A copied model reduces its own scales; process groups are found anew."""
        made = DelayedReduction(copy.deepcopy(self.root, memo), ())
        made.slots = copy.deepcopy(self.slots, memo)
        made.by_weights, made.weights.before = self.by_weights, self.weights.written()
        made.scales = [state.history(operand, spec) for state, operand, spec in made.slots]
        return made

    def __call__(self) -> None:
        """Begin a training forward: where the step before is over and nobody has said so, it is learned from."""
        if not (self.root.training and torch.is_grad_enabled()) or in_backward():
            return
        if not torch.compiler.is_compiling() or (dist.is_available() and dist.is_initialized()):
            self._eagerly()

    @_disable_dynamo
    def _eagerly(self) -> None:
        written = self.weights.written()
        self.by_weights = self.by_weights or written
        if written or (not self.by_weights and not self.groups and self._gradients_taken()):
            self.end_step()
        self.weights.look()
        self.groups = [] if _alone else [g for g in data_parallel_groups(self.root) if dist.get_world_size(g) > 1]

    def _gradients_taken(self) -> bool:
        passed_back = any(state.passed_back for state, _, _ in self.slots)
        return passed_back and all(p.grad is None for p in self.weights.held)

    def trained_by(self, optimizer: Optimizer) -> bool:
        """Say whether an optimizer holds Parameters of this model."""
        own = {id(p) for p in self.weights.find()}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def stepped(self) -> None:
        """End a step because an optimizer has taken it; inside a backward pass, when that has ended."""
        self.by_weights = True
        if not in_backward():
            self.end_step()
        elif not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_step)

    def end_step(self) -> None:
        """Compute the scales of the next step from what this one has seen."""
        self.queued = False
        self.weights.forget()
        groups, self.groups = self.groups, []
        for state, _, _ in self.slots:
            state.passed_back = False
        if not groups:
            # compiled layers: from the second step on their graphs take the scale as given
            pairs = list(zip(self.slots, self.scales, strict=True))
            learn_together([scale for (state, _, _), scale in pairs if state.traced])
            for (state, _, _), scale in pairs:
                if not state.traced:
                    scale.roll()
            return
        noted = [scale.seen for scale in self.scales]
        device = next((amax.device for amax in noted if amax is not None), torch.device("cpu"))
        found = [torch.zeros((), dtype=torch.float32, device=device) if amax is None else amax for amax in noted]
        largest = reduced(torch.stack(found), tuple(group.group_name for group in groups))
        for scale, amax in zip(self.scales, largest.unbind(), strict=True):
            scale.learn(amax)
            scale.give()


#: Every model's latest, for the optimizers of this process.
_LIVE: weakref.WeakKeyDictionary[nn.Module, weakref.ref[DelayedReduction]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    for ref in list(_LIVE.values()):
        one = ref()
        if one is not None and one.slots and one.trained_by(optimizer):
            one.stepped()


# once and here: torch goes through its hooks while one of them may put a policy's next phase on a model
register_optimizer_step_post_hook(_after_step)
