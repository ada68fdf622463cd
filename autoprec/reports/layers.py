"""The model drawn with its precisions: one row per layer, one cell per GEMM, coloured by format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from autoprec.errors import AutoPrecError
from autoprec.graph.report import GraphReport
from autoprec.policy import Policy, policy_from_dict, resolve
from autoprec.precision.recipes import GEMMS, Recipe
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run

_WORDS = {"fprop": "forward", "dgrad": "backward to the input", "wgrad": "backward to the weight"}


@dataclass(frozen=True, slots=True)
class LayerCell:
    """One layer: its share of the step's GEMM FLOPs, and (format, description) of each GEMM that ran."""

    name: str
    share: float
    gemms: Mapping[str, tuple[str, str]]


def _label(recipe: Recipe | None, activations: str) -> tuple[str, str]:
    if recipe is None:
        return ("keep", "as written") if activations == "keep" else (activations, f"{activations} autocast")
    return recipe.format, recipe.describe()


def best_policy(result: SearchResult, records: Sequence[Run]) -> dict[str, object]:
    """Return the document of the winning policy, as its trial ran it; empty when no record has it."""
    name = result.best.get("name")
    found = [r for r in records if r.policy and r.name == name]
    return dict(found[0].policy) if found else {}


def layer_rows(result: SearchResult, records: Sequence[Run], graph: GraphReport) -> tuple[LayerCell, ...]:
    """Resolve the best policy over the recorded layers; empty without a policy to draw.

    Args:
        result: of the search; its best policy is drawn.
        records: every run of its study.
        graph: the recorded step.
    """
    document = best_policy(result, records)
    if not document:
        return ()
    layers = graph.tunable
    try:
        policy: Policy = policy_from_dict(document)
        plans = resolve(policy, [layer.name for layer in layers], strict=False)
    except AutoPrecError:
        return ()
    total = sum(layer.total_flops for layer in layers) or 1
    return tuple(
        LayerCell(
            layer.name,
            layer.total_flops / total,
            {g: _label(plans[layer.name].recipe(g), policy.activations) for g in GEMMS if g in layer.roles()},
        )
        for layer in layers
    )


def layer_map(rows: Sequence[LayerCell]) -> str:
    """Return the HTML of the map."""
    if not rows:
        return ""
    widest = max(row.share for row in rows) or 1.0
    heads = "".join(f'<th title="{_WORDS[gemm]}">{gemm}</th>' for gemm in GEMMS)
    lines = [f'<div class="wide"><table class="map"><tr><th>layer</th>{heads}<th>share of GEMM work</th></tr>']
    for row in rows:
        bar = f'<div class="bar" style="width:{100 * row.share / widest:.0f}%"></div>'
        lines.append(
            f"<tr><td><code>{escape(row.name)}</code></td>{_boxes(row)}"
            f'<td class="share">{bar}<span>{100 * row.share:.1f} %</span></td></tr>'
        )
    return "".join(lines) + "</table></div>"


def _boxes(row: LayerCell) -> str:
    """Return the cells of the three GEMMs; one wide cell where all three run the same."""
    ran = [row.gemms.get(gemm, ("none", "")) for gemm in GEMMS]
    cells = [(ran[0], len(GEMMS))] if len(set(ran)) == 1 else [(each, 1) for each in ran]
    return "".join(
        f'<td class="f f-{style}" colspan="{span}" title="{escape(words or "does not run")}">{escape(words)}</td>'
        for (style, words), span in cells
    )
