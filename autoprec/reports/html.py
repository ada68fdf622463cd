"""One self-contained HTML page per study: no script, no network, readable without the background."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from autoprec.export import exact_target
from autoprec.graph.report import GraphReport
from autoprec.policy import policy_from_dict
from autoprec.reports.charts import gap_chart, loss_chart, pareto_chart
from autoprec.reports.layers import best_policy, layer_map, layer_rows
from autoprec.reports.sensitivity import heat_map
from autoprec.reports.shares import share_chart, share_words
from autoprec.reports.summary import Summary, summarise
from autoprec.reports.svg import Chart
from autoprec.reports.text import cost_text, verdict_lines
from autoprec.support.files import write_atomic
from autoprec.support.text import visible
from autoprec.support.units import gap_name
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.rows import note_of, number, percent, shown, source_of
from autoprec.tuning.study.run import Run

_GLOSSARY = (
    ("over 16-bit", "steps per second against the fastest 16-bit run that was measured, which is what most people run "
     "today: bf16 autocast, or the script itself where it trains in 16 bits"),
    ("speed, over the script", "steps per second against the script as written, on the target named above"),
    ("divergence", "mean relative distance of the loss curve from the reference's, over the second half of a trial "
     "that started from the same weights and saw the same data"),
    ("noise floor", "the divergence that rounding the initial weights once produces: two runs that close are the same"),
    ("gradient error", "distance of the policy's gradient from the reference's on the same weights and batch, in "
     "percent of the reference's norm"),
    ("fprop, dgrad, wgrad", "the three matrix products of a linear layer: forward, gradient of its input, gradient of "
     "its weight"),
    ("modelled", "computed by the cost model for a GPU that was not there; other times and memory were measured"),
)  # fmt: skip


#: Longer cells wrap; names never do, and figures only before their interval.
_SENTENCE = 40
_WHY = (
    "What each kind of layer saves and the gradient error it adds. Times of single layers are the cost model's, "
    "corrected by the trials, and where the whole policy was timed they add up to no more than it saved."
)


def _cell(text: str) -> str:
    if len(text) > _SENTENCE:
        return f'<td class="text">{escape(text)}</td>'
    figure, bracket, interval = escape(text).partition(" (")
    return f'<td class="range">{figure} <span>({interval}</span></td>' if bracket else f"<td>{figure}</td>"


def _table(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in titles)
    body = "".join(f'<tr class="{css}">' + "".join(_cell(cell) for cell in cells) + "</tr>" for css, cells in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _variants(result: SearchResult) -> str:
    """Return how each variant of the script's arguments went."""
    rows = [("", (f"{v['name']}: {v['arguments']}", v["status"], v["reason"])) for v in result.variants]
    return _table(("variant", "", "why"), rows) if rows else ""


def _section(title: str, lead: str, body: str) -> str:
    if not body:
        return ""
    paragraph = f"<p>{escape(lead)}</p>" if lead else ""
    return f"<section><h2>{escape(title)}</h2>{paragraph}{body}</section>"


def _figure(chart: Chart | None) -> str:
    return chart.text() if chart is not None else ""


def _tiles(summary: Summary) -> str:
    best, reference, base = summary.row("best"), summary.row("reference") or {}, summary.baseline
    if best is None:
        return ""
    step = f"{shown('step_time_ms', best)} per step"
    if base is not None and number(best.get("speedup_over_16bit")) is not None:
        over = f"{step}; {shown('speedup', best)} over the {summary.result.written}"
        tiles = [(f"over {base['name']}", shown("speedup_over_16bit", best), over)]
    else:
        tiles = [("speed", shown("speedup", best), step)]
    if number(best.get("memory_bytes")) is not None:
        before = f"of {shown('memory_bytes', reference)}" if number(reference.get("memory_bytes")) else ""
        tiles.append(("memory", shown("memory_bytes", best), before))
    noise = summary.result.noise_floor
    floor = f"noise floor {percent(noise)}" if noise is not None else ""
    tiles.append((gap_name(summary.result.metric), shown("divergence", best), floor))
    cells = [f"<div><b>{escape(v)}</b><span>{escape(k)}</span><small>{escape(n)}</small></div>" for k, v, n in tiles]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _usage(result: SearchResult, records: Sequence[Run]) -> str:
    if not result.policy or result.verdict != "adopt":
        return ""
    arguments = next((row["arguments"] for row in result.variants if row.get("adopted", row.get("chosen"))), "")
    policy, script = escape(result.policy), escape(f"{result.script or 'train.py'} {arguments}".strip())
    document = best_policy(result, records)
    target = exact_target(policy_from_dict(document)) if document else "python"
    return (
        f"<pre>autoprec run --policy {policy} {script}\nautoprec check --policy {policy} {script}\n"
        f"autoprec export {policy} --to {target}</pre><p>or, in the training code, after the model is built:</p>"
        f"<pre>import autoprec\nautoprec.load(&quot;{policy}&quot;).apply(model)</pre>"
    )


def _trials(result: SearchResult, records: Sequence[Run]) -> str:
    titles, shown_runs = result.comparison([{**record.figures, "name": record.name} for record in records])
    rows = []
    for record, (_, cells) in zip(records, shown_runs, strict=True):
        status = record.status if not record.reason else f"{record.status}: {record.reason}"
        rows.append((record.kind, (str(record.number), record.kind, *cells, str(record.seed or ""), status)))
    titles = ("#", "kind", "name", *titles[1:], "seed", "ended")
    summary = f"{len(rows)} runs: references, trials, and the finalists once per paired seed"
    return f"<details><summary>{summary}</summary>{_table(titles, rows)}</details>" if rows else ""


def _reasons(result: SearchResult) -> str:
    layers = result.explanation.get("layers", ())
    why = [("", (str(row["layers"]), str(row["text"]))) for row in layers]
    return _table(("layers", "why"), why) if why else ""


def _words(result: SearchResult) -> str:
    """Return the glossary, with the limits that this search used."""
    terms = dict(_GLOSSARY)
    if result.metric:
        terms[gap_name(result.metric)] = (
            f"divergence of {result.metric}: its mean relative distance from the reference's, over the last half of "
            "what was reported"
        )
    if result.gradient_limit is not None:
        terms["gradient error"] += f"; the limit of this search is {percent(result.gradient_limit)}"
    return "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in terms.items())


def html_report(result: SearchResult, records: Sequence[Run], graph: GraphReport | None = None) -> str:
    """Return the page's text.

    Args:
        result: of the search.
        records: every run of its study.
        graph: the recorded step; None leaves out the map of layers.
    """
    summary, name = summarise(result, records), result.study_name or "study"
    titles, rows = result.comparison()
    comparison = [(row["role"], (*cells, note_of(row) or source_of(row))) for row, cells in rows]
    layers = layer_rows(result, records, graph) if graph is not None else ()
    decisions = result.explanation.get("decisions", ())
    about = [f"script {Path(result.script).name}" if result.script else "", f"target {result.target or 'this machine'}"]
    failed = [f"{name}: {reason}" for name, reason in summary.failures[:50]]
    verdict, *caveats = verdict_lines(result)
    under = f" (under {result.variant['name']}, where no other variant is named)" if result.variant else ""
    word = {"adopt": "Adopt", "undecided": "Not decided yet"}.get(result.verdict, "Stay as you are")
    css = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    body = [
        f'<header class="{escape(result.verdict)}"><h1>{escape(name)}</h1>'
        f'<p class="verdict"><strong>{word}.</strong> {escape(verdict)}</p>{_list(caveats)}'
        f'<p class="facts">{escape(" · ".join(filter(None, [*about, *result.facts()])))}</p>{_tiles(summary)}</header>',
        _section("Compared with what you could do by hand", "",
                 _table((*titles, "figures"), comparison)),
        _section("Every policy tried", f"Each dot is one policy{under}, the mean over its paired runs; the line joins "
                 "those that no other beats on both axes.", _figure(pareto_chart(summary))),
        _section("The loss curve", "The reference and the runs under a policy start from the same weights and see the "
                 "same data.", _figure(loss_chart(summary))),
        _section("Distance from the reference", "Inside the band a difference means nothing.",
                 _figure(gap_chart(summary))),
        _section("Layer by layer", "The model with the precision of each of its matrix products.",
                 layer_map(layers)),
        _section("Why", _WHY if result.verdict == "adopt" else "What keeps each kind of layer as it is.",
                 _reasons(result)),
        _section("What each decision did", share_words(decisions), share_chart(decisions, result.metric)),
        _section("How sensitive the layers are", "Relative gradient error when one group alone changes its precision; "
                 "red is where training suffers.", heat_map(result.sensitivity)),
        _section("Variants", "The script with further arguments, timed beside itself.", _variants(result)),
        _section("What it cost", "", f"<p>{escape(cost_text(summary))}</p>"),
        _section("Use it", "", _usage(result, records)),
        _section("Notes", "", _list(result.notes)),
        _section("Trials that failed", "", _list(failed)),
        _section("All trials", "", _trials(result, records)),
        _section("Words", "", f"<dl>{_words(result)}</dl>"),
    ]  # fmt: skip
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>AutoPrec: {escape(result.study_name or 'study')}</title><style>{css}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def write_html(
    path: Path | str, result: SearchResult, records: Sequence[Run], graph: GraphReport | None = None
) -> Path:
    """Write the report as one HTML file, atomically; ``graph`` lets it draw the model layer by layer.

    Args:
        path: of the file.
        result: of the search.
        records: every run of its study.
        graph: the recorded step; None leaves out the map of layers.
    """
    return write_atomic(path, visible(html_report(result, records, graph)))
