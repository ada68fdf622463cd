"""The sensitivity table as a heat map: groups down, choices across, gradient error as colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from autoprec.report.summary import number

__all__ = ["heat_colour", "heat_map"]

#: From harmless to harmful, readable under black text.
_COLOURS = ((232, 243, 238), (250, 226, 166), (235, 140, 110))


def heat_colour(place: float) -> str:
    """Return the colour of a place between 0 (harmless) and 1 (harmful)."""
    place = min(max(place, 0.0), 1.0) * (len(_COLOURS) - 1)
    index = min(int(place), len(_COLOURS) - 2)
    part = place - index
    mixed = [round(a + (b - a) * part) for a, b in zip(_COLOURS[index], _COLOURS[index + 1], strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def heat_map(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of the map from rows of ``{"group", "choice", "gradient_error", "measured"}``."""
    table: dict[str, dict[str, tuple[float, bool]]] = {}
    choices: dict[str, None] = {}
    for row in rows:
        error = number(row.get("gradient_error"))
        if error is not None and "group" in row and "choice" in row:
            choices[str(row["choice"])] = None
            table.setdefault(str(row["group"]), {})[str(row["choice"])] = (error, bool(row.get("measured", True)))
    errors = [error for cells in table.values() for error, _ in cells.values() if error > 0]
    if not errors:
        return ""
    low, high = math.log(min(errors)), math.log(max(errors))
    lines = ["<tr><th>layers</th>" + "".join(f"<th>{escape(choice)}</th>" for choice in choices) + "</tr>"]
    for group, cells in table.items():
        line = [f"<td><code>{escape(group)}</code></td>"]
        for choice in choices:
            error, measured = cells.get(choice, (math.nan, True))
            if math.isnan(error):
                line.append("<td></td>")
                continue
            place = (math.log(error) - low) / (high - low) if error > 0 and high > low else 0.0
            hint = "measured" if measured else "inferred from other measurements"
            text = f"{100 * error:.2g} %" + ("" if measured else " ~")
            line.append(f'<td class="h" style="background:{heat_colour(place)}" title="{hint}">{text}</td>')
        lines.append(f"<tr>{''.join(line)}</tr>")
    return f'<div class="wide"><table class="heat">{"".join(lines)}</table></div>'
