"""The figures that a day on a GPU is to show, each with its goal and a verdict, from the rows that its parts keep.

Nothing is measured here. A figure whose rows are missing says which; one that a library's failure leaves out says so.
Verdicts are strict: the largest of several values counts, and no tolerance is added to a goal.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PRESETS

__all__ = ["FIGURES_FILE", "Figure", "documents", "figures", "gap", "table"]

#: Where ``fidelity.py`` keeps what two of the figures are made of, beside its own rows.
FIGURES_FILE = "figures.json"
BACKENDS = ("native", "torchao", "transformer_engine")
#: torchao's names of the recipes that both run.
SAME = {"torchao-tensorwise": "native-fp8_tensorwise", "torchao-rowwise": "native-fp8_rowwise"}
#: What may be lost of the loss where two policies count as equally far from the script (``--max-divergence``).
EQUAL = 0.0025


@dataclass(frozen=True)
class Figure:
    """One figure: ``verdict`` is met, missed, or why it cannot be told."""

    what: str
    goal: str
    measured: str
    verdict: str


class AbsentError(Exception):
    """The rows of a figure are not there."""


def figures(out: Path, *, small: str = "gpt2-124m", billion: str = "llama-1.3b") -> list[Figure]:
    """Return the figures of what lies under ``out``.

    Args:
        out: the folder of ``run.py``'s parts.
        small: the model whose search is timed.
        billion: the model of at least a billion parameters.
    """
    asked: tuple[tuple[str, str, Callable[[], tuple[str, bool]]], ...] = (
        ("gradient error of every backend, from emulated", "<= 10 %", lambda: _gradients(out)),
        ("native speed / torchao's, same recipe, compiled blocks", ">= 0.98x", lambda: _beside_torchao(out)),
        (f"policy / best preset at equal divergence, {small}", ">= 1x", lambda: _over_preset(out, small)),
        (f"policy / best preset at equal divergence, {billion}", ">= 1x", lambda: _over_preset(out, billion)),
        (f"policy / bf16 + compile, {billion}", ">= 1.2x", lambda: _over_bf16(out, billion)),
        ("modelled step time", "within 8 %", lambda: _modelled(out)),
        (f"search of {small}", "<= 480 s", lambda: _search(out, small)),
    )
    found = []
    for what, goal, make in asked:
        try:
            measured, met = make()
            found.append(Figure(what, goal, measured, "met" if met else "missed"))
        except AbsentError as absent:
            found.append(Figure(what, goal, "-", f"not measured: {absent}"))
        except Exception as error:  # a row of another form must not end the day
            found.append(Figure(what, goal, "-", f"not told: {type(error).__name__}: {error}"))
    return found


def table(found: list[Figure]) -> list[str]:
    """Return the figures as a table."""
    lines = ["| figure | goal | measured | verdict |", "|---|---|---|---|"]
    return lines + [f"| {one.what} | {one.goal} | {one.measured} | {one.verdict} |" for one in found]


def documents(found: list[Figure]) -> list[dict[str, str]]:
    """Return the figures as plain data."""
    return [asdict(one) for one in found]


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        raise AbsentError(f"no {path.parent.name}/{path.name}") from None


def _gradients(out: Path) -> tuple[str, bool]:
    rows = _read(out / "fidelity" / FIGURES_FILE).get("gradients", {})
    absent = [name for name in BACKENDS if not rows.get(name, {}).get("probes")]
    said = [
        f"{name} {row['largest']:.1%} at most (median {row['median']:.1%}, {row['probes']} of {row['of']} probes)"
        for name, row in rows.items()
        if row["probes"]
    ]
    if absent:
        raise AbsentError("; ".join([f"{', '.join(absent)} ran no probe", *said]))
    return "; ".join(said), all(row["largest"] <= 0.10 for row in rows.values())


def _beside_torchao(out: Path) -> tuple[str, bool]:
    ratios = {}
    for library, ours in SAME.items():
        rows = [_read(out / "blocks" / f"{name}.json").get("compiled", {"failed": "it"}) for name in (library, ours)]
        lacking = [name for name, row in zip((library, ours), rows, strict=True) if "step_ms" not in row]
        if lacking:
            raise AbsentError(f"{lacking[0]} failed")
        ratios[library] = rows[0]["step_ms"] / rows[1]["step_ms"]
    said = ", ".join(f"{name.removeprefix('torchao-')} {ratio:.3f}x" for name, ratio in ratios.items())
    return said, min(ratios.values()) >= 0.98


def _run(out: Path, model: str, name: str) -> dict[str, Any]:
    row = _read(out / "end_to_end" / "parts" / f"{model}-{name}.json")
    if "failed" in row:
        raise AbsentError(f"{model}-{name} failed: {row['failed'][:80]}")
    return row


def gap(losses: list[float], reference: list[float]) -> float:
    """Return the mean relative distance of two loss curves, the first loss (before any update) left out."""
    pairs = list(zip(losses, reference, strict=False))[1:]
    return sum(abs(a - b) / b for a, b in pairs) / max(1, len(pairs))


def _over_preset(out: Path, model: str) -> tuple[str, bool]:
    reference, policy = _run(out, model, "bf16"), _run(out, model, "autoprec")
    allowed = max(EQUAL, gap(policy["losses"], reference["losses"]))
    presets: dict[str, float] = {}
    left: list[str] = []
    for name in PRESETS:
        path = out / "end_to_end" / "parts" / f"{model}-{name}.json"
        if not path.exists():
            continue
        row = _read(path)
        if "failed" in row:
            left.append(f"{name} failed")
        elif not gap(row["losses"], reference["losses"]) <= allowed:  # also where it is not a number
            left.append(f"{name} diverges more")
        else:
            presets[name] = row["items_per_s"]
    if not presets.keys() - {"bf16"}:
        raise AbsentError("; ".join([f"no FP8 preset of {model} to compare with", *left]))
    best = max(presets, key=lambda name: presets[name])
    ratio = policy["items_per_s"] / presets[best]
    return "; ".join([f"{ratio:.3f}x (of {best}, best of {len(presets)})", *left]), ratio >= 1.0


def _over_bf16(out: Path, model: str) -> tuple[str, bool]:
    reference, policy = _run(out, model, "bf16"), _run(out, model, "autoprec")
    ratio = policy["items_per_s"] / reference["items_per_s"]
    distance = gap(policy["losses"], reference["losses"])
    return f"{ratio:.3f}x, divergence {distance:.3%}", ratio >= 1.2


def _modelled(out: Path) -> tuple[str, bool]:
    times = _read(out / "fidelity" / FIGURES_FILE).get("times", {})
    if not times.get("rows"):
        raise AbsentError("no step was timed")
    off = {row["policy"]: row["modelled_ms"] / row["measured_ms"] - 1 for row in times["rows"]}
    most = max(off, key=lambda name: abs(off[name]))
    middle = statistics.median(abs(value) for value in off.values())
    return f"{off[most]:+.1%} at most ({most}), median {middle:.1%} of {len(off)} policies", abs(off[most]) <= 0.08


def _search(out: Path, model: str) -> tuple[str, bool]:
    found = _run(out, model, "search")
    # where it went on from an earlier call, the study knows the seconds of all of them
    seconds = max(found["wall_s"], found.get("seconds", 0.0))
    said = f"{seconds:.0f} s, {found['trials']['complete']} trials, {found['verdict']}"
    if found.get("cut_short"):
        return f"{said}; cut short: {found['cut_short']}"[:300], False
    return said, seconds <= 480.0
