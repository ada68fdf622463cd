"""An HTML page of a recorded step: the operator graph coloured by class, and the layers; one file, no network."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from autoprec.graph.report import GraphReport, Operator
from autoprec.graph.summary import alignment, class_shares, coverage_line, shape_text
from autoprec.support.text import visible

#: Class -> colour; a class of a user's own is grey.
COLOURS = {
    "gemm": "#2563eb",
    "conv": "#0891b2",
    "attention": "#7c3aed",
    "softmax": "#dc2626",
    "norm": "#ea580c",
    "loss": "#be123c",
    "output": "#e11d48",
    "embedding": "#ca8a04",
    "transcendental": "#db2777",
    "reduction": "#b45309",
    "router": "#9333ea",
    "pointwise": "#16a34a",
    "cast": "#64748b",
    "collective": "#0f766e",
    "random": "#78716c",
    "opaque": "#111827",
}
_OTHER = "#9ca3af"
_HIDDEN = frozenset({"view", "allocation", "scalar"})
#: Nodes drawn; a step of a deep model has more, and its blocks repeat.
MAX_NODES = 3000
_ROW, _COLUMN, _WIDTH, _HEIGHT = 30, 138, 128, 20

_STYLE = """
:root{color-scheme:light;font:14px/1.45 system-ui,sans-serif}body{margin:0 auto;max-width:1500px;padding:1.2rem}
h1{font-size:1.3rem;margin:.2rem 0}h2{font-size:1.05rem;margin:1.4rem 0 .4rem}.lead{color:#374151;max-width:90ch}
.bar{display:flex;height:22px;border-radius:4px;overflow:hidden;max-width:900px}.bar i{display:block}
.key span{display:inline-block;margin:.2rem .8rem .2rem 0;white-space:nowrap}.key b{display:inline-block;width:.8em;
height:.8em;border-radius:2px;margin-right:.35em}table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem
.6rem;border-bottom:1px solid #e5e7eb;text-align:left;vertical-align:top}td,th{white-space:nowrap}td.n{text-align:right;
font-variant-numeric:tabular-nums}tr.no td{color:#6b7280}.columns{display:flex;gap:1.5rem;align-items:flex-start;
flex-wrap:wrap}.graph{overflow:auto;max-height:85vh;border:1px solid #e5e7eb;border-radius:6px;flex:1 1 420px}
.layers{overflow:auto;max-height:85vh;flex:1 1 640px}#about{position:sticky;bottom:0;background:#f9fafb;padding:.4rem
.6rem;min-height:3.2em;font-size:12.5px;border-top:1px solid #e5e7eb}svg text{font:11px system-ui,sans-serif;
fill:#fff;pointer-events:none}svg path{fill:none;stroke:#9ca3af}svg path.on{stroke:#111827;stroke-width:2.2}
svg g:hover rect{stroke:#111827;stroke-width:2}.phases button{margin-right:.4rem}.phases button.on{font-weight:700}
"""
_SCRIPT = """
const nodes=JSON.parse(document.getElementById('data').textContent);const about=document.getElementById('about');
document.querySelectorAll('svg g[data-i]').forEach(g=>{g.addEventListener('mouseenter',()=>{const n=nodes[g.dataset.i];
about.textContent=n.join('  \\u00b7  ');const i=g.dataset.i;
document.querySelectorAll(`path[data-a="${i}"],path[data-b="${i}"]`).forEach(p=>p.classList.add('on'))});g.addEventListener('mouseleave',()=>document.querySelectorAll('path.on')
.forEach(p=>p.classList.remove('on')))});
document.querySelectorAll('.phases button').forEach(b=>b.addEventListener('click',()=>{
document.querySelectorAll('.phases button').forEach(o=>o.classList.toggle('on',o===b));
document.querySelectorAll('.graph svg').forEach(s=>s.style.display=s.dataset.phase===b.dataset.phase?'':'none')}));
"""


def _colour(cls: str) -> str:
    return COLOURS.get(cls, _OTHER)


def _contract(operators: Sequence[Operator], phase: str) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """Return the drawn operators of a phase and their inputs among them, views and copies looked through."""
    sources: dict[int, tuple[int, ...]] = {}
    drawn: list[int] = []
    edges: dict[int, tuple[int, ...]] = {}
    for index, operator in enumerate(operators):
        if operator.phase != phase:
            continue
        inputs = tuple(dict.fromkeys(s for i in operator.inputs for s in sources.get(i, ())))
        if operator.cls in _HIDDEN:
            sources[index] = inputs[:8]
        else:
            sources[index] = (index,)
            drawn.append(index)
            edges[index] = inputs
            if len(drawn) >= MAX_NODES:
                break
    return drawn, edges


def _places(drawn: Sequence[int], edges: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, int]]:
    """Return (x, y) of every drawn operator: a row per depth, columns left to right in the order they ran."""
    depth: dict[int, int] = {}
    used: dict[int, int] = {}
    out: dict[int, tuple[int, int]] = {}
    for index in drawn:
        level = 1 + max((depth[i] for i in edges[index]), default=-1)
        depth[index] = level
        column = used.get(level, 0)
        used[level] = column + 1
        out[index] = (8 + column * _COLUMN, 8 + level * _ROW)
    return out


def _svg(operators: Sequence[Operator], phase: str, *, shown: bool) -> str:
    drawn, edges = _contract(operators, phase)
    if not drawn:
        return ""
    places = _places(drawn, edges)
    width = max(x for x, _ in places.values()) + _WIDTH + 10
    height = max(y for _, y in places.values()) + _HEIGHT + 10
    parts = []
    for index in drawn:
        x, y = places[index]
        for source in edges[index]:
            a, b = places[source]
            parts.append(
                f'<path data-a="{source}" data-b="{index}" d="M{a + _WIDTH // 2} {b + _HEIGHT}L{x + _WIDTH // 2} {y}"/>'
            )
    for index in drawn:
        x, y = places[index]
        label = html.escape(operators[index].op.rpartition("::")[2][:20])
        parts.append(
            f'<g data-i="{index}"><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="4" '
            f'fill="{_colour(operators[index].cls)}"/><text x="{x + 5}" y="{y + 14}">{label}</text></g>'
        )
    hidden = "" if shown else ' style="display:none"'
    return (
        f'<svg data-phase="{phase}" width="{width}" height="{height}" role="img" '
        f'aria-label="{phase} operators"{hidden}>{"".join(parts)}</svg>'
    )


def _about(operator: Operator) -> list[str]:
    shapes = " ".join("x".join(map(str, shape)) or "scalar" for shape in operator.shapes)
    where = operator.module or "(root)"
    facts = [operator.op, where, f"{operator.cls}: {operator.precision}", operator.reason, shapes]
    if operator.role:
        facts.append(operator.role + (f" of {operator.weight}" if operator.weight else ""))
    if operator.flops:
        facts.append(f"{operator.flops:,} FLOP")
    return [*facts, f"{operator.bytes:,} bytes", " ".join(dict.fromkeys(operator.out_dtypes))]


def _shares(report: GraphReport) -> str:
    shares = class_shares(report)
    total_bytes = sum(share.bytes for share in shares) or 1
    total = report.total_flops or 1
    bars = "".join(
        f'<i style="width:{share.bytes / total_bytes:.2%};background:{_colour(share.name)}" '
        f'title="{html.escape(share.name)} {share.bytes / total_bytes:.1%} of bytes"></i>'
        for share in shares
        if share.bytes
    )
    key = "".join(
        f'<span><b style="background:{_colour(share.name)}"></b>{html.escape(share.name)} '
        f"({html.escape(share.precision)}): {share.calls} calls, {share.flops / total:.1%} of FLOPs, "
        f"{share.bytes / total_bytes:.1%} of bytes</span>"
        for share in shares
    )
    return f'<div class="bar" title="share of bytes moved">{bars}</div><p class="key">{key}</p>'


def _layers(report: GraphReport) -> str:
    total = report.total_flops or 1
    rows = []
    for layer in report.layers:
        group = "" if layer.group == layer.name else layer.group
        cells = [html.escape(text) for text in (layer.name or "(root)", layer.kind, group, shape_text(layer))]
        multiple = alignment(layer)
        flags = ", ".join(layer.flags)
        rows.append(
            f'<tr class="{"yes" if layer.tunable else "no"}"><td>{cells[0]}</td><td>{cells[1]}</td>'
            f'<td class="n">{cells[3]}</td><td class="n">{layer.total_flops / total:.1%}</td>'
            f'<td class="n">{multiple}</td><td>{html.escape(flags)}</td>'
            f"<td>{'yes' if layer.tunable else 'no'}: {html.escape(layer.reason)}</td><td>{cells[2]}</td></tr>"
        )
    head = "<tr><th>layer</th><th>kind</th><th>M x K x N</th><th>FLOPs</th><th>multiple of</th><th>flags</th>"
    return f"<table>{head}<th>tunable</th><th>group</th></tr>{''.join(rows)}</table>"


def render_page(report: GraphReport) -> str:
    """Return the page as HTML text. Every name of the model is escaped; nothing is loaded from anywhere."""
    heading = html.escape(str(report.model.get("class", "model")))
    phases = [p for p in ("forward", "backward", "recompute") if any(o.phase == p for o in report.operators)]
    graphs = "".join(_svg(report.operators, phase, shown=phase == phases[0]) for phase in phases)
    buttons = "".join(
        f'<button data-phase="{phase}" class="{"on" if phase == phases[0] else ""}">{phase}</button>'
        for phase in phases
    )
    data = json.dumps([_about(operator) for operator in report.operators]).replace("<", "\\u003c")
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report.notes)
    return visible(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{heading}: operators</title>'
        f"<style>{_STYLE}</style></head><body><h1>{heading}</h1>"
        f'<p class="lead">{html.escape(coverage_line(report))}</p>{_shares(report)}'
        f"{f'<ul>{notes}</ul>' if notes else ''}"
        f'<div class="columns"><div class="graph"><p class="phases">{buttons}</p>{graphs}'
        f'<div id="about">Point at an operator to see what it is, why it runs as it does, and who feeds it.</div></div>'
        f'<div class="layers">{_layers(report)}</div></div>'
        f'<script type="application/json" id="data">{data}</script><script>{_SCRIPT}</script></body></html>\n'
    )
