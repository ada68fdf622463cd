"""Small charts as SVG text: linear or logarithmic axes, lines, bands and points; no plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

#: Characters of a point's name that are written into a chart; the tooltip has all of them.
_LONGEST_LABEL = 32


def nice_ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from ``low`` to ``high``, both of which they may undershoot.

    >>> nice_ticks(0, 10)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: a range of data, its title, and whether it is logarithmic (positive ranges only)."""

    low: float
    high: float
    title: str
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], title: str, *, zero: bool = False, log: bool = False) -> Axis:
        """Return an axis that holds all values with a little room; ``zero`` includes the origin.

        Args:
            values: data; what is not finite (or, on a logarithmic axis, not positive) is left out.
            title: of the axis.
            zero: whether the origin is on it.
            log: whether it is logarithmic.
        """
        finite = [value for value in values if math.isfinite(value) and (value > 0 or not log)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        if log:
            return cls(low / 1.3, high * 1.3, title, True)
        if zero:
            low, high = min(low, 0.0), max(high, 0.0)
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return cls(low if zero and low == 0 else low - room, high + room, title)

    def place(self, value: float) -> float:
        """Return where a value lies, 0 at ``low`` and 1 at ``high``."""
        if self.log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the values that have a tick."""
        if not self.log:
            return nice_ticks(self.low, self.high)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        marks = [m * 10.0**d for d in decades for m in ((1, 3) if len(decades) < 4 else (1,))]
        return [mark for mark in marks if self.low <= mark <= self.high]


@dataclass
class Chart:
    """A chart under construction: draw into it, then take :meth:`text`. Sizes are SVG units (pixels at 100 %)."""

    x: Axis
    y: Axis
    title: str
    width: int = 760
    height: int = 380
    left: int = 78
    bottom: int = 46
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)
    _taken: list[tuple[float, float, float, float]] = field(default_factory=list)

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a data point, clipped to the plot."""
        inner_w, inner_h = self.width - self.left - 14, self.height - self.bottom - 14
        across = min(max(self.x.place(x), 0.0), 1.0)
        up = min(max(self.y.place(y), 0.0), 1.0)
        return round(self.left + across * inner_w, 1), round(14 + (1 - up) * inner_h, 1)

    def line(self, xs: Sequence[float], ys: Sequence[float], css: str, label: str = "") -> None:
        """Draw a polyline; non-finite values break it.

        Args:
            xs, ys: coordinates, in units of the axes, of equal length.
            css: class of the line.
            label: shown where the pointer rests on it.
        """
        run: list[str] = []
        pieces: list[list[str]] = [run]
        for x, y in zip(xs, ys, strict=True):
            if math.isfinite(y):
                run.append("{},{}".format(*self.at(x, y)))
            elif run:
                run = []
                pieces.append(run)
        hint = f"<title>{escape(label)}</title>" if label else ""
        self._parts += [f'<polyline class="{css}" points="{" ".join(p)}">{hint}</polyline>' for p in pieces if p]

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], css: str) -> None:
        """Fill the area between two curves; steps without finite edges are left out.

        Args:
            xs: in units of the axis.
            lows, highs: the edges at each of them.
            css: class of the area.
        """
        rows = [row for row in zip(xs, lows, highs, strict=True) if all(map(math.isfinite, row))]
        upper = [self.at(x, high) for x, _, high in rows]
        lower = [self.at(x, low) for x, low, _ in rows]
        points = " ".join(f"{x},{y}" for x, y in [*upper, *reversed(lower)])
        self._parts.append(f'<polygon class="{css}" points="{points}"/>')

    def point(self, x: float, y: float, css: str, hint: str, *, size: float = 4.5) -> None:
        """Draw a dot whose tooltip is ``hint``.

        Args:
            x, y: in units of the axes.
            css: class of the dot.
            hint: text of its tooltip.
            size: radius in pixels.
        """
        px, py = self.at(x, y)
        self._taken.append((px - size, py - size, px + size, py + size))
        self._parts.append(
            f'<circle class="{css}" cx="{px}" cy="{py}" r="{size}"><title>{escape(hint)}</title></circle>'
        )

    def rule(self, *, css: str, label: str, x: float | None = None, y: float | None = None) -> None:
        """Draw a line across the plot at a value of one axis, with its label at an end where that covers nothing.

        Args:
            css: class of the line.
            label: written at its end.
            x: value of a vertical line.
            y: value of a horizontal one; exactly one of both is given.
        """
        (x1, y1) = self.at(self.x.low if x is None else x, self.y.low if y is None else y)
        (x2, y2) = self.at(self.x.high if x is None else x, self.y.high if y is None else y)
        self._parts.append(f'<line class="{css}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')
        ends = (
            (x2 - 4, y2 - 5, "end"),
            (x2 - 4, y2 + 13, "end"),
            (x1 + 4, y2 - 5, "start"),
            (x1 + 4, y2 + 13, "start"),
        )
        free = (place for place in ends if not self._covers(self._box(*place, label)))
        place = next(free, ends[0]) if x is None else self._beside(x2, y2 + 10, label, 4)
        while x is not None and self._covers(self._box(*place, label)):
            place = (place[0], place[1] + 6, place[2])
        self._taken.append(self._box(*place, label))
        where = f'x="{place[0]}" y="{place[1]}" text-anchor="{place[2]}"'
        self._parts.append(f'<text class="note" {where}>{escape(label)}</text>')

    def _covers(self, box: tuple[float, float, float, float]) -> bool:
        left, top, right, bottom = box
        return any(a < right and left < c and b < bottom and top < d for a, b, c, d in self._taken)

    @staticmethod
    def _box(x: float, y: float, anchor: str, label: str) -> tuple[float, float, float, float]:
        """Return (left, top, right, bottom) of a line of 12 px text, by an average character width."""
        width = 6.6 * len(label)
        left = x - width if anchor == "end" else x
        return left, y - 11, left + width, y + 3

    def _beside(self, px: float, py: float, label: str, distance: float) -> tuple[float, float, str]:
        """Return where text goes beside a pixel: to the right, or to the left where it would leave the plot."""
        right = px + distance + 6.6 * len(label) <= self.width - 14
        return (px + distance, py, "start") if right else (px - distance, py, "end")

    def label(self, x: float, y: float, text: str, css: str = "label") -> bool:
        """Write a name beside a data point where it covers no other; return False when no room is left for it.

        Args:
            x, y: of the data point, in units of the axes.
            text: cut where it is long.
            css: class of the text.
        """
        px, py = self.at(x, y)
        text = text if len(text) <= _LONGEST_LABEL else text[: _LONGEST_LABEL - 1] + "…"
        for distance, lift in ((9, 4), (9, -8), (9, 16), (-9, 4), (-9, -8), (-9, 16)):
            place = (px + distance, py + lift, "start" if distance > 0 else "end")
            left, top, right, bottom = box = self._box(*place, text)
            inside = left >= self.left and right <= self.width - 6 and top >= 2 and bottom <= self.height - self.bottom
            if inside and not self._covers(box):
                self._taken.append(box)
                where = f'x="{place[0]:.1f}" y="{place[1]:.1f}" text-anchor="{place[2]}"'
                self._parts.append(f'<text class="{css}" {where}>{escape(text)}</text>')
                return True
        return False

    def legend(self, css: str, label: str) -> None:
        """Add an entry to the legend."""
        self._legend.append((css, label))

    def _axes(self) -> list[str]:
        out = []
        base = self.height - self.bottom
        for tick in self.x.ticks():
            px, _ = self.at(tick, self.y.low)
            out.append(f'<line class="grid" x1="{px}" y1="14" x2="{px}" y2="{base}"/>')
            out.append(f'<text class="tick" x="{px}" y="{base + 16}" text-anchor="middle">{_short(tick)}</text>')
        for tick in self.y.ticks():
            _, py = self.at(self.x.low, tick)
            out.append(f'<line class="grid" x1="{self.left}" y1="{py}" x2="{self.width - 14}" y2="{py}"/>')
            out.append(f'<text class="tick" x="{self.left - 7}" y="{py + 4}" text-anchor="end">{_short(tick)}</text>')
        middle = (14 + base) / 2
        out.append(
            f'<text class="axis" x="{(self.left + self.width) / 2}" y="{self.height - 8}" text-anchor="middle">'
            f"{escape(self.x.title)}</text>"
        )
        out.append(
            f'<text class="axis" x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">'
            f"{escape(self.y.title)}</text>"
        )
        return out

    def text(self) -> str:
        """Return the SVG element, with its legend as a line of HTML below it."""
        keys = "".join(f'<span class="key"><i class="{css}"></i>{escape(label)}</span>' for css, label in self._legend)
        return (
            f'<figure><svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.title)}">'
            + "".join([*self._axes(), *sorted(self._parts, key=lambda part: part.startswith("<text"))])  # over lines
            + f"</svg><figcaption>{keys}</figcaption></figure>"
        )
