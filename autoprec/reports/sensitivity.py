"""The sensitivity table as a heat map: groups down, choices across, gradient error as colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from autoprec.tuning.study.rows import number

#: From harmless to harmful, readable under black text.
_COLOURS = ((232, 243, 238), (250, 226, 166), (235, 140, 110))
#: Where harmless ends, where the search's own limit lies, where training always suffers: first as a share of the
#: mini-batch gradient noise (docs/concepts.md), then as a plain relative error, where the noise is not known.
_SHARES, _ERRORS = (0.01, 0.12, 1.0), (0.001, 0.03, 0.3)


def heat_colour(place: float) -> str:
    """Return the colour of a place between 0 (harmless) and 1 (harmful)."""
    place = min(max(place, 0.0), 1.0) * (len(_COLOURS) - 1)
    index = min(int(place), len(_COLOURS) - 2)
    part = place - index
    mixed = [round(a + (b - a) * part) for a, b in zip(_COLOURS[index], _COLOURS[index + 1], strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def _place(value: float, marks: tuple[float, float, float]) -> float:
    """Return 0 at or below the first mark, one half at the second, 1 at or above the third; logarithmic between."""
    low, middle, high = marks
    if value <= middle:
        return 0.5 * max(0.0, math.log(max(value, low) / low) / math.log(middle / low))
    return min(1.0, 0.5 + 0.5 * math.log(value / middle) / math.log(high / middle))


def heat_map(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of the map from rows of ``{"group", "choice", "gradient_error", ...}``.

    ``noise_share`` is the error in units of the mini-batch gradient noise, ``measured`` false for inferred entries.
    """
    table: dict[str, dict[str, tuple[float, float, bool]]] = {}
    choices: dict[str, None] = {}
    for row in rows:
        error, share = number(row.get("gradient_error")), number(row.get("noise_share"))
        if error is not None and "group" in row and "choice" in row:
            choices[str(row["choice"])] = None
            place = _place(error, _ERRORS) if share is None else _place(share, _SHARES)
            cell = (error, place, bool(row.get("measured", True)))
            table.setdefault(str(row["group"]), {})[str(row["choice"])] = cell
    if not table:
        return ""
    lines = ["<tr><th>layers</th>" + "".join(f"<th>{_breaking(choice)}</th>" for choice in choices) + "</tr>"]
    for group, cells in table.items():
        line = [f"<td><code>{escape(group)}</code></td>"]
        for choice in choices:
            if choice not in cells:
                line.append("<td></td>")
                continue
            error, place, measured = cells[choice]
            hint = "measured" if measured else "inferred from other measurements"
            text = f"{100 * error:.2g} %" + ("" if measured else " ~")
            line.append(f'<td class="h" style="background:{heat_colour(place)}" title="{hint}">{text}</td>')
        lines.append(f"<tr>{''.join(line)}</tr>")
    return f'<div class="wide"><table class="heat">{"".join(lines)}</table></div>'


def _breaking(choice: str) -> str:
    """Return a choice that may go on in the next line behind a slash: a map of ten of them fits a page then."""
    return escape(choice).replace("/", "/<wbr>")
