"""The tables that quality.py prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

HEAD = """\
Tiny models (cases.py: a GPT, a ViT, a convolutional net with BatchNorm, an LSTM, a mixture of experts, a GPT
whose optimizer state and communication are chosen as well, one of 61 groups, NVFP4 with stochastic rounding and
Hadamard transform, runs of 200 steps, an MLP-Mixer, a diffusion transformer, and an encoder-decoder that nothing was
tuned on) are trained for real under emulated recipes; time is modelled for b200 and h100 at the scale of large models.
Every run of a strategy has a trial seed of its own (initial weights, data, noise, sensitivity scan): its trials see
that one seed, as in a real search. What it asked is scored by true values, in two steps. Which of it is non-dominated
is found out under truth seeds, drawn towards an additive model of all of them. How good those are is measured under
judge seeds that nobody has picked by: the best of many noisy means is best partly by luck. The best known front is
picked and judged alike, from everything any strategy asked and from a look around it that knows the truth seeds. Most
harder cases are given less truth than the first two (cases.py, `Seeds`), so that all of this fits a small
machine.

HV: hypervolume of what was asked over (step time, log10 divergence), corner at twenty times the budget of 0.25 %, as
a share of the best known front's (which it may exceed by luck). Regret: fastest asked point within the budget by
judge seeds, against the fastest of the best known front. Mean ± standard error over trial seeds. `ours` is the
sampler in a study of 30 trials, as the others are; `search` is the search as the product runs it: it stops when
nothing is worth a run, and does not look for a front. All but `search` start with the same 6 presets.

`one-pass` is ModelOpt's way: squared gradient of a layer's output times squared change of the output, from one pass,
solved exactly and bisected on measured divergence. `ilp` does not stand for an existing tool: it is our own
sensitivity table and solver without the learning, to see what that adds. Neither chooses anything beside the layers.

Adopted policies are judged under 48 seeds that no search and no strategy saw. The best known front is judged by half of
these or fewer, whose luck all its policies share in part; so their regret is also told against the fastest policy of
the front that is within the budget under the same 48.
"""
#: What is wanted, see :func:`goals`.
WANTED_HV, WANTED_REGRET, WANTED_VIOLATED, WANTED_RANK = 0.93, 0.025, 1 / 48, 0.95


def goals(results: Sequence[dict[str, Any]]) -> str:
    """Return a line per case and the totals, against what is wanted."""
    lines = [
        "## Against the goals",
        "",
        "| case | HV of 30 trials | the search ended after | HV there | regret of what is adopted | adopted, beyond "
        "the budget | over the best preset | rank correlation |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for result in results:
        rows = {row["strategy"]: row["scores"] for row in result["rows"]}
        end = result["endings"]["search"]
        over = _over(end)
        ours = f"{rows['ours'][0]:.3f}" if "ours" in rows else "-"
        lines.append(
            f"| {result['case']}{' (blind)' if result['blind'] else ''} | {ours} | {end['trials']:.1f} trials, "
            f"{end['measured']:.1f} runs | {rows['search'][0]:.3f} | {end['regret']:.1%} | {end['adopted']} of "
            f"{end['runs']}, {end['violated']} | {over} | {np.mean(result['mixed']):.3f} |"
        )
    return "\n".join([*lines, "", *_totals(results), "", ""])


def _totals(results: Sequence[dict[str, Any]]) -> list[str]:
    ends = [result["endings"]["search"] for result in results]
    regrets = [end["regret"] for end in ends if not math.isnan(end["regret"])]
    regret = float(np.mean(regrets)) if regrets else math.nan
    fresh = [end["regret_fresh"] for end in ends if not math.isnan(end.get("regret_fresh", math.nan))]
    violated, adopted = sum(e["violated"] for e in ends), sum(e["adopted"] for e in ends)
    volumes = {r["case"]: row["scores"][0] for r in results for row in r["rows"] if row["strategy"] == "ours"}
    small = [f"{case} {value:.3f}" for case, value in volumes.items() if value < WANTED_HV]
    ranks = {r["case"]: float(np.mean(r["mixed"])) for r in results}
    low = [f"{case} {value:.3f}" for case, value in ranks.items() if value < WANTED_RANK]
    beaten = [f"{r['case']}: {', '.join(r['not_better'])}" for r in results if r["not_better"]]
    goal = f"goal {WANTED_REGRET:.1%}"
    return [
        f"- {_met(regret <= WANTED_REGRET)}: regret of what is adopted {regret:.1%}, mean over {len(regrets)} cases "
        f"({goal})"
        + (f"; against the fastest within the budget under the 48 fresh seeds {np.mean(fresh):.1%}" if fresh else ""),
        f"- {_met(violated <= WANTED_VIOLATED * max(adopted, 1))}: {violated} of {adopted} adopted policies beyond the "
        "budget under 48 fresh seeds (goal 1 of 48)",
        f"- {_met(not small)}: hypervolume of 30 trials >= {WANTED_HV} on every case"
        + (f"; below: {', '.join(small)}" if small else ""),
        f"- {_met(not beaten)}: ours better than every alternative beyond the standard error of the difference"
        + (f"; not so: {'; '.join(beaten)}" if beaten else ""),
        f"- {_met(not low)}: rank correlation of the table >= {WANTED_RANK}"
        + (f"; below: {', '.join(low)}" if low else ""),
    ]


def _over(end: dict[str, Any]) -> str:
    return f"{np.mean(end['over_preset']):+.1%}" if end["over_preset"] else "-"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def show(result: dict[str, Any]) -> str:
    """Return a result as Markdown."""
    even, mixed = np.array(result["even"]), np.array(result["mixed"])
    beside = "".join(f", {name} of {len(values)}" for name, values in result["parameters"].items())
    lines = [
        f"### {result['case']}: {result['groups']} groups x {len(result['choices'])} choices{beside}",
        "",
        f"Front: {len(result['front'])} points out of {result['assignments']} assignments, {result['trained']} "
        f"training runs of {result['steps']} steps; one trial's ln(divergence) has a standard deviation of "
        f"{result['noise']:.2f} from seed to seed. Rank correlation of predicted and measured gradient error, mean of "
        f"{len(even)} scans: {mixed.mean():.3f} (random mixtures), {even.mean():.3f} (all choices drawn evenly).",
        "",
        "| strategy | seeds | trials | HV | regret | ms/trial |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        hv, regret, hv_error, regret_error = row["scores"]
        ms = "-" if row["ms"] is None else f"{row['ms']:.0f}"
        lines.append(
            f"| {row['strategy']} | {row['seeds']} | {row['trials']:.0f} | {hv:.3f} ± {hv_error:.3f} | {regret:.1%} ± "
            f"{regret_error:.1%} | {ms} |"
        )
    lines.append("")
    for name, end in result["endings"].items():
        among = f"{end.get('regret_fresh', math.nan):.1%} against the fastest within the budget under these"
        lines.append(
            f"Decisions of {name}: {end['adopted']} of {end['runs']} adopt, {end['violated']} of them beyond the "
            f"budget under 48 fresh seeds; regret of what was adopted {end['regret']:.1%}, and "
            f"{among}; {_over(end)} over the best "
            f"acceptable preset; {end['trials']:.1f} trials and {end['measured']:.1f} runs per search, references "
            f"included; {end['converged']} converged."
        )
    losses = "; ".join(result["not_better"]) or "none"
    lines += ["", f"Ours not better than the alternative beyond the standard error of the difference: {losses}.", ""]
    return "\n".join(lines)
