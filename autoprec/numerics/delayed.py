"""Delayed scales that agree on all ranks: amaxes are reduced over the data-parallel group once per training forward.

As Transformer Engine does: every rank quantises with the same scale although it sees other data. One small all-reduce
carries the largest magnitudes of all delayed operands of a model, with zeros for those a rank has not seen (experts
that it did not route to). The group is that of DDP, or the mesh of FSDP2, and that of tensor parallelism; elsewhere a
rank learns alone.
The first step has no history: there each rank scales by its own amax.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo

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


class DelayedReduction:
    """Runs before each forward of a model whose policy has delayed scaling; ``slots`` is empty where none has.

    Compiled layers note what they see and learn here as well; in a graph of the whole model this is its first part.
    """

    def __init__(self, root: nn.Module, executions: Iterable[Any]) -> None:
        self.root, self.slots = root, list(_slots(executions))
        self.pending = self.begun = False
        self.groups: list[Any] = []
        device = next((p.device for p in root.parameters() if p.device.type != "meta"), None)
        for state, operand, spec in self.slots:
            if device is not None:
                state.prepare([(operand, spec)], device)
        self.scales = [state.history(operand, spec) for state, operand, spec in self.slots]

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedReduction:
        """A copied model reduces its own scales; process groups are found anew."""
        made = DelayedReduction(copy.deepcopy(self.root, memo), ())
        made.slots = copy.deepcopy(self.slots, memo)
        made.scales = [state.history(operand, spec) for state, operand, spec in made.slots]
        return made

    def __call__(self) -> None:
        """Compute the scales of the next training forward from what the last one and its backward have seen."""
        if not (self.root.training and torch.is_grad_enabled()) or in_backward():
            return
        if torch.compiler.is_compiling() and not (dist.is_available() and dist.is_initialized()):
            if self.begun:
                learn_together(self.scales)
            self.begun = True
        else:
            self._eagerly()

    @_disable_dynamo
    def _eagerly(self) -> None:
        groups = [] if _alone else [g for g in data_parallel_groups(self.root) if dist.get_world_size(g) > 1]
        for state, _, _ in self.slots:
            state.shared = bool(groups)
        self.settle()
        self.groups, self.pending = groups, bool(groups)

    def settle(self) -> None:
        """Learn what is pending now: after an optimizer step, so that a checkpoint has the scales of the next one."""
        if not self.pending:
            # compiled layers: from the second step on their graphs take the scale as given
            learn_together([one for (state, _, _), one in zip(self.slots, self.scales, strict=True) if state.traced])
            return
        self.pending = False
        noted = [scale.seen for scale in self.scales]
        device = next((amax.device for amax in noted if amax is not None), torch.device("cpu"))
        found = [torch.zeros((), device=device) if amax is None else amax for amax in noted]
        largest = reduced(torch.stack(found), tuple(group.group_name for group in self.groups))
        for scale, amax in zip(self.scales, largest.unbind(), strict=True):
            scale.learn(amax)
            scale.give()
