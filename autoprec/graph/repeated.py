"""A step in which blocks that are alike were recorded once, written out for all of them.

A decoder repeats a block: of 80 blocks of three kinds, three are run and recorded. What was recorded of the first of
each kind is copied for the others in the order in which they run, forward from the first block to the last, backward
from the last to the first. A copy reads what the block before it made; the block after it hands back its gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoprec.graph.report import GraphReport, Layer, Operator


@dataclass(frozen=True, slots=True)
class Blocks:
    """The repeated blocks of a model.

    Attributes:
        path: the list that holds them, ``model.layers``.
        first: of each block, the number of the first block of its kind, which is the one that was recorded.
    """

    path: str
    first: tuple[int, ...]

    @property
    def recorded(self) -> tuple[int, ...]:
        """The blocks that were recorded, in order."""
        return tuple(sorted(set(self.first)))

    def of(self, module: str) -> int | None:
        """Return the number of the block that a module lies in; None outside of them."""
        head, _, _rest = module.removeprefix(f"{self.path}.").partition(".")
        return int(head) if module.startswith(f"{self.path}.") and head.isdigit() else None

    def moved(self, name: str, before: int, after: int) -> str:
        """Return a name in one block as that of the same thing in another.

        Args:
            name: of a module or parameter.
            before, after: numbers of the two blocks.
        """
        old = f"{self.path}.{before}"
        return f"{self.path}.{after}{name[len(old) :]}" if name == old or name.startswith(f"{old}.") else name


#: The module of operators that hand a gradient to its Parameter.
_ACCUMULATES = "<accumulate>"
#: Positions in a list of operators, the last excluded.
Span = tuple[int, int]


def repeat(report: GraphReport, blocks: Blocks) -> GraphReport:
    """Write the recorded blocks of a step out for all blocks of the model.

    Raises:
        ValueError: the passes of two recorded blocks run into each other, so that neither can be told apart.
    """
    if len(blocks.recorded) == len(blocks.first):
        return report
    operators = _Written(report.operators, blocks).operators()
    layers = tuple(_layers(report.layers, blocks))
    in_layers = sum(layer.total_flops for layer in layers if layer.tunable)
    total = sum(row.flops for row in operators)
    added = {
        name: sum(map(amount, operators)) - sum(map(amount, report.operators))
        for name, amount in (("saved_for_backward", _saved), ("live_at_backward", _saved))
        if name in report.memory
    }
    return replace(
        report,
        layers=layers,
        operators=tuple(operators),
        groups=dict(_groups(report.groups, blocks)),
        total_flops=total,
        tunable_flops_share=in_layers / total if total else 0.0,
        memory={name: size + added.get(name, 0) for name, size in report.memory.items()},
    )


def _saved(row: Operator) -> int:
    return sum(row.out_saved) if row.phase == "forward" else 0


def _layers(layers: Sequence[Layer], blocks: Blocks) -> Iterator[Layer]:
    """Yield the layers in model order, those of a block that was not run after those of its recorded one."""
    own: dict[int, list[Layer]] = {}
    for layer in layers:
        block = blocks.of(layer.name)
        if block is not None:
            own.setdefault(block, []).append(layer)
    begun = False
    for layer in layers:
        if blocks.of(layer.name) is None:
            yield layer
        elif not begun:
            begun = True
            for number, first in enumerate(blocks.first):
                for one in own.get(first, ()):
                    if number == first:
                        yield one
                        continue
                    names = {key: blocks.moved(getattr(one, key), first, number) for key in ("name", "weight", "group")}
                    flags = tuple(flag for flag in one.flags if flag != "first")
                    yield replace(one, flags=flags, **names)  # type: ignore[arg-type]


def _groups(groups: Mapping[str, tuple[str, ...]], blocks: Blocks) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the groups: of a recorded block once for every block like it."""
    for name, members in groups.items():
        inside = {blocks.of(member) for member in members}
        block = inside.pop() if len(inside) == 1 else None
        if block is None:
            yield name, members
            continue
        for number, first in enumerate(blocks.first):
            if first == block:
                yield blocks.moved(name, block, number), tuple(blocks.moved(m, block, number) for m in members)


class _Written:
    """Writes the operators of a step out, pass by pass."""

    def __init__(self, rows: Sequence[Operator], blocks: Blocks) -> None:
        self.rows, self.blocks = rows, blocks
        self.begin = next((i for i, row in enumerate(rows) if row.phase != "forward"), len(rows))
        self.forward = self._spans(0, self.begin)
        self.backward = self._spans(self.begin, len(rows))
        self._check()
        recorded = blocks.recorded
        #: what each recorded block hands to what comes after it in a pass
        self.made = {block: self._handed(self.forward[block], self.begin) for block in recorded}
        self.given = {
            block: self._handed(self.backward[block], len(rows)) for block in recorded if block in self.backward
        }
        self.entry = self._outside(min(self.forward.values()), 0, self.made[recorded[0]])
        #: the operator whose gradient the last block reads
        self.loss = -1
        if self.backward:
            span = min(self.backward.values())
            highest = next(block for block, own in self.backward.items() if own == span)
            self.loss = self._outside(span, self.begin, self.given[highest])

    def _spans(self, start: int, end: int) -> dict[int, Span]:
        found: dict[int, Span] = {}
        for index in range(start, end):
            block = self.blocks.of(self.rows[index].module)
            if block is not None:
                found[block] = (found.get(block, (index, 0))[0], index + 1)
        for block, (first, last) in found.items():
            while last < end and self.rows[last].module == _ACCUMULATES:  # the gradients of its own Parameters
                last += 1
            found[block] = first, last
        return found

    def _check(self) -> None:
        for spans in (self.forward, self.backward):
            ordered = sorted(spans.values())
            if any(one[1] > other[0] for one, other in itertools.pairwise(ordered)):
                raise ValueError("blocks run into each other")
        if missing := [block for block in self.blocks.recorded if block not in self.forward]:
            raise ValueError(f"block {missing[0]} of {self.blocks.path} does not run in the forward pass")

    def _handed(self, span: Span, end: int) -> int:
        """Return the last operator of a span that something after it reads, in the same pass."""
        read = {source for row in self.rows[span[1] : end] for source in row.sources if span[0] <= source < span[1]}
        return max(read, default=span[1] - 1)

    def _outside(self, span: Span, start: int, like: int) -> int:
        """Return the last operator of a pass before a span that it reads, of a result of the shape of another's; -1."""
        shape = self.rows[like].out_shapes[:1]
        read = {s for row in self.rows[slice(*span)] for s in row.sources if start <= s < span[0]}
        return max((s for s in read if self.rows[s].out_shapes[:1] == shape), default=-1)

    def operators(self) -> list[Operator]:
        """Return all operators, those of copies with the positions of what copies read."""
        chunks = [*self._ordered(self.forward, 0, self.begin, False)]
        chunks += self._ordered(self.backward, self.begin, len(self.rows), True)
        places: dict[tuple[int, int], int] = {}  # (block, or -1; recorded position) -> new position
        position = 0
        for block, span in chunks:
            for index in range(*span):
                places[block, index] = position
                position += 1
        out: list[Operator] = []
        for number, (block, span) in enumerate(chunks):
            near = self._neighbours(chunks, number)
            for index in range(*span):
                out.append(self._copy(index, block, near, places))
        return out

    def _ordered(self, spans: Mapping[int, Span], start: int, end: int, down: bool) -> Iterator[tuple[int, Span]]:
        """Yield (block, or -1 for what lies between blocks; recorded positions) of a pass in the order of running."""
        at = start
        numbers: Iterable[int] = range(len(self.blocks.first))
        if spans:
            at = min(span[0] for span in spans.values())
            yield -1, (start, at)
        for number in reversed(list(numbers)) if down else numbers:
            first = self.blocks.first[number]
            if first not in spans:
                continue
            if number == first:
                yield -1, (at, spans[first][0])
                at = spans[first][1]
            yield number, spans[first]
        yield -1, (at, end)

    def _neighbours(self, chunks: Sequence[tuple[int, Span]], number: int) -> tuple[int, int]:
        """Return the block before a chunk in the forward pass, and the block whose gradient it reads; -1 for none.

        Between blocks they are the last block that ran before the chunk in its pass.
        """
        block = chunks[number][0]
        if block >= 0:
            return block - 1, (block + 1 if block + 1 < len(self.blocks.first) else -1)
        before = next((one for one, span in reversed(chunks[:number]) if one >= 0 and span[0] < self.begin), -1)
        above = next((one for one, span in reversed(chunks[:number]) if one >= 0 and span[0] >= self.begin), -1)
        return before, above

    def _copy(self, index: int, block: int, near: tuple[int, int], places: Mapping[tuple[int, int], int]) -> Operator:
        row = self.rows[index]
        first = self.blocks.first[block] if block >= 0 else -1
        moved = {old: self._place(old, block, first, near, places) for old in {*row.sources, *row.inputs} if old >= 0}
        changes: dict[str, Any] = {
            "sources": tuple(moved.get(old, old) for old in row.sources),
            "inputs": tuple(moved.get(old, old) for old in row.inputs),
        }
        if block >= 0 and index == self.made[first]:
            changes["out_saved"] = self._kept(row, block)
        if block >= 0 and block != first:
            changes |= {key: self.blocks.moved(getattr(row, key), first, block) for key in ("module", "weight")}
            changes["name"] = f"{row.name}_{block}"
        return replace(row, **changes)

    def _kept(self, row: Operator, block: int) -> tuple[int, ...]:
        """Return what is saved of a block's result: by the next block as of the first one's input, or by the rest."""
        last = self.rows[self.made[self.blocks.recorded[-1]]]
        if block == len(self.blocks.first) - 1:
            return last.out_saved if last.out_shapes == row.out_shapes else row.out_saved
        entry = self.rows[self.entry] if self.entry >= 0 else row
        return entry.out_saved if entry.out_saved and entry.out_shapes == row.out_shapes else row.out_saved

    def _place(
        self, old: int, block: int, first: int, near: tuple[int, int], places: Mapping[tuple[int, int], int]
    ) -> int:
        """Return where what a copy reads lies now."""
        before, above = near
        owner = self._owner(old)
        if owner == first and owner >= 0:  # its own
            return places[block, old]
        if old < self.begin:
            handed = old == self.entry if owner < 0 else old == self.made[owner]
            if handed and before >= 0 and (block > 0 or (block < 0 and owner >= 0)):
                return places[before, self.made[self.blocks.first[before]]]
        elif old == self.loss if owner < 0 else old == self.given[owner]:
            if above >= 0 and self.blocks.first[above] in self.given and (block >= 0 or owner >= 0):
                return places[above, self.given[self.blocks.first[above]]]
            if block >= 0 and self.loss >= 0:
                return places[-1, self.loss]
        return places[owner, old]

    def _owner(self, old: int) -> int:
        for block, span in (*self.forward.items(), *self.backward.items()):
            if span[0] <= old < span[1]:
                return block
        return -1
