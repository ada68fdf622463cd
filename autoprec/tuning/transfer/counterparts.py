"""Which layer of the proxy stands where a layer of the big model stands.

Same role, same stack, same relative depth. Blocks at the edges are counted, not scaled: where a policy treats the first
block (or the last two) unlike the rest, that is said of the first block of any depth, and it would be wrong to spread
it over the first tenth of a model with eighty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoprec.errors import PolicyMismatchError, nearest
from autoprec.graph.report import GraphReport
from autoprec.graph.roles import Place

Choices = Mapping[str, str]
#: A run of equal blocks at an end is an edge up to this share of the proxy's blocks; a longer one is half a model.
_EDGE_SHARE = 1 / 3
#: A share of the FLOPs that may have no known role before the transfer is refused.
_MOST_UNKNOWN = 0.25


@dataclass(frozen=True, slots=True)
class Edges:
    """How many blocks at the front and the back of a series are first and last ones."""

    front: int = 0
    back: int = 0

    def rank(self, rank: int, count: int, others: int) -> int:
        """Return which of ``others`` blocks stands where block ``rank`` of ``count`` stands.

        Args:
            rank: position of the block, from 0.
            count: blocks of the series.
            others: blocks of the other model's series.
        """
        front, back = (self.front, self.back) if others > self.front + self.back else (0, 0)
        if rank < front:
            return rank
        if count - 1 - rank < back:
            return others - (count - rank)
        share = (rank - front + 0.5) / max(1, count - front - back)
        return front + min(others - front - back - 1, int(share * (others - front - back)))


def edges_of(ranks: Mapping[int, str]) -> Edges:
    """Return the edges of a series of blocks from what each of them runs (``ranks``: block -> any text)."""
    ordered = [ranks[rank] for rank in sorted(ranks)]
    count = len(ordered)
    if count < 3 or len(set(ordered)) == 1:
        return Edges()
    front = next(i for i, text in enumerate(ordered) if text != ordered[0])
    back = next(i for i, text in enumerate(reversed(ordered)) if text != ordered[-1])
    most = max(1, int(count * _EDGE_SHARE))
    return Edges(front if front <= most else 0, back if back <= most else 0)


@dataclass(frozen=True)
class Counterparts:
    """The proxy's layer for every layer of the big model.

    Attributes:
        here, there: places of the layers of the big model, and of the proxy.
        of: layer of the big model -> layer of the proxy; absent where there is none.
        alone: layers without a counterpart, in model order.
    """

    here: Mapping[str, Place]
    there: Mapping[str, Place]
    of: dict[str, str]
    alone: tuple[str, ...]

    def pair(self, name: str) -> tuple[Place, Place]:
        """Return the places of a layer of the big model and of its counterpart."""
        return self.here[name], self.there[self.of[name]]


#: What a counterpart has in common, the most telling first; None says nothing.
_KEYS: tuple[Callable[[Place], object], ...] = (
    lambda p: (p.stack, p.alike) if p.role else None,
    lambda p: (p.stack, p.role, p.part) if p.role else None,
    lambda p: (p.stack, p.role) if p.role else None,
    lambda p: (p.role, p.part) if p.role else None,
    lambda p: p.role or None,
    lambda p: p.alike,
)


def counterparts(target: Mapping[str, Place], proxy: Mapping[str, Place], choices: Choices) -> Counterparts:
    """Match two models.

    Args:
        target, proxy: places of the layers of the big model and of the proxy.
        choices: what every layer of the proxy runs; tells its first and last blocks from the others.
    """
    index: dict[tuple[int, object], list[Place]] = {}
    for place in proxy.values():
        for number, key in enumerate(_KEYS):
            index.setdefault((number, key(place)), []).append(place)
    edges: dict[tuple[str, str], Edges] = {}
    of: dict[str, str] = {}
    for name, place in target.items():
        said = [(number, common) for number, key in enumerate(_KEYS) if (common := key(place))]
        found = next((index[one] for one in said if one in index), None)
        if found is None:
            continue
        series = (found[0].stack, found[0].role or found[0].alike)
        if series not in edges:
            edges[series] = edges_of(_texts(proxy, series, choices))
        wanted = edges[series].rank(place.rank, place.count, found[0].count)
        of[name] = min(found, key=lambda p: abs(p.rank - wanted)).name
    return Counterparts(target, proxy, of, tuple(name for name in target if name not in of))


def _texts(proxy: Mapping[str, Place], series: tuple[str, str], choices: Choices) -> dict[int, str]:
    """Return what each block of a series runs, as one text."""
    out: dict[int, str] = {}
    for name, place in proxy.items():
        if (place.stack, place.role or place.alike) == series:
            out[place.rank] = f"{out.get(place.rank, '')}|{place.part}={choices.get(name, '')}"
    return out


def refuse_unknown(report: GraphReport, matched: Counterparts) -> None:
    """Refuse a transfer that would leave more than a quarter of the FLOPs to chance.

    Raises:
        PolicyMismatchError: too many layers have no known role, or none has a counterpart; with the nearest guess.
    """
    here, there = matched.here, matched.there
    weights = {layer.name: float(layer.total_flops or 1) for layer in report.tunable}
    unknown = [name for name in matched.alone if not here[name].role]
    share = sum(weights[name] for name in unknown) / (sum(weights.values()) or 1.0)
    if matched.of and share <= _MOST_UNKNOWN:
        return
    listed = unknown or list(matched.alone)
    kinds = list(dict.fromkeys(here[name].alike for name in listed))
    first = next(name for name in listed if here[name].alike == kinds[0])
    close = nearest(first, there)
    guess = here[first].guess or (there[close[0]].role if close else "")
    shown = ", ".join(f"'{kind}'" for kind in kinds[:5]) + (f" and {len(kinds) - 5} more" if len(kinds) > 5 else "")
    hint = f"'{kinds[0]}={guess or 'ROLE'}'"
    raise PolicyMismatchError(
        f"{len(listed)} of {len(weights)} layers have no counterpart in the proxy: {shown}"
        + (f" (nearest layer of the proxy: '{close[0]}')" if close else "")
        + (f"; by its shape the first may be {here[first].guess}" if here[first].guess else ""),
        fix=f"is this the same kind of model? otherwise say what they are: --role {hint} (docs/long_run.md)",
    )
