"""Which tensor of a training step is in which dtype, and what was seen of its numerics: plain data, no torch.

A script's own precision is judged from one real step: every operator that rounds to 16 bits runs beside itself in FP32,
and what is kept between steps is looked at before and after the optimizer's update. What was seen is an
:class:`Observation` with a figure of this run; whether that is a fault is said by the rules of ``autoprec lint``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoprec.support.plain import rebuild, shallow

#: What a row of the census may be about, in the order in which people read it.
KINDS = (
    "parameter",
    "buffer",
    "optimizer state",
    "gradient",
    "reduced gradient",
    "gradient accumulator",
    "copy of the weights",
    "logits",
    "loss",
    "router scores",
    "top-k input",
    "clipping norm",
    "loss scale",
)


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor, or several of a kind, that outlives an operator.

    Attributes:
        kind: one of :data:`KINDS`.
        name: the parameter's or buffer's; ``exp_avg of NAME`` of a state; the line that made it elsewhere.
        dtype: short name, e.g. ``bf16``.
        shape: its shape.
        twin: its dtype in a run of the script that is FP32 throughout; empty where that is the same.
        asked: what else says another dtype: ``_keep_in_fp32_modules`` of the model, or the checkpoint it came from.
        where: ``file:line`` where it is made or read; empty where that was not seen.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    twin: str = ""
    asked: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing that was seen of the script's own precision, with the figures of this run.

    Attributes:
        code: a code of the rule table of ``autoprec lint``.
        where: ``file:line`` of the line that loses precision.
        operator: what ran there, e.g. ``aten::_log_softmax``.
        module: the module it ran in.
        dtypes: of its inputs.
        figures: what was measured, by name; shares are fractions.
        also: further lines that have to do with it.
    """

    code: str
    where: str = ""
    operator: str = ""
    module: str = ""
    dtypes: tuple[str, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judged:
    """What one step says of the script's own precision.

    Attributes:
        census: every persistent thing.
        observations: what was seen to lose precision, in the order in which it ran.
        looked_at: how many operators, parameters, ... were looked at.
        unseen: what could not be judged, and why.
    """

    census: tuple[Held, ...] = ()
    observations: tuple[Observation, ...] = ()
    looked_at: Mapping[str, int] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()

    def by_kind(self) -> dict[str, dict[str, list[Held]]]:
        """Return the census by kind and dtype."""
        out: dict[str, dict[str, list[Held]]] = {}
        for row in sorted(self.census, key=lambda one: KINDS.index(one.kind)):
            out.setdefault(row.kind, {}).setdefault(row.dtype, []).append(row)
        return out

    def within(self, folder: str) -> Judged:
        """Return a copy whose places are relative to a folder where they lie in it."""

        def near(where: str) -> str:
            return where.removeprefix(f"{folder.rstrip('/')}/")

        seen = (replace(one, where=near(one.where), also=tuple(map(near, one.also))) for one in self.observations)
        rows = (replace(row, where=near(row.where), name=near(row.name)) for row in self.census)
        return replace(self, census=tuple(rows), observations=tuple(seen))

    def to_json(self) -> dict[str, Any]:
        """Return the ``judged`` of ``autoprec inspect --json``."""
        return {
            "census": [shallow(row) for row in self.census],
            "observations": [shallow(one) for one in self.observations],
            "looked_at": dict(self.looked_at),
            "unseen": list(self.unseen),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Judged:
        """Rebuild from :meth:`to_json`."""
        return cls(
            tuple(rebuild(Held, {**row, "shape": tuple(row["shape"])}) for row in document["census"]),
            tuple(rebuild(Observation, row) for row in document["observations"]),
            dict(document["looked_at"]),
            tuple(document["unseen"]),
        )
