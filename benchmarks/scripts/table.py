"""The page of ``benchmarks/scripts/scripts.py``: what each script's record says, judged by fixed rules.

A script *works* when inspect, search, check and run all ended as they should. It is *told* when AutoPrec stops with a
message that says what to do and blames nothing on a script that runs well alone. Everything else is a *fault*.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from datetime import date
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

COMMANDS = ("inspect", "search", "check", "run")
#: The search that every script is given.
SEARCH = "--target h100 --force --trials 3 --steps 4 --warmup 1 --seeds 2 --no-mlflow --json"
#: What AutoPrec says where its own code has failed, in its process and in the script's.
DEFECTS = ("defect of AutoPrec", "AutoPrec's own code failed")
BLAME = ("not an AutoPrec failure", "run it without AutoPrec first", "training step failed", "training steps failed")
Record = dict[str, Any]


def deterministic(record: Record) -> bool | None:
    """Whether two bare runs under the same seeds saw the same loss bits; None when no backward was recorded."""
    first, second = (record["steps"].get(step, {}).get("losses") for step in ("bare", "again"))
    if not first or not second:
        return None
    return bool([run[: len(other)] for run, other in zip(first, second, strict=False)] == second)


def called_random(record: Record) -> bool:
    search = record["steps"].get("search", {})
    said = json.dumps(search.get("answer", {})) + search.get("err", "")
    return "two trials of the unchanged script differ" in said


def plain(name: str) -> str:
    """A path without the numbers that time stamps and process ids put into it."""
    return re.sub(r"\d+", "#", name)


def touched(record: Record, step: str) -> list[str]:
    """Files of the user that a command changed; for ``run``, beyond what the bare script writes."""
    changed = record["steps"].get(step, {}).get("changed", [])
    if step != "run":
        return changed
    own = {plain(name[2:]) for name in record["steps"]["bare"]["changed"]}  # made there, changed in a second run here
    return [name for name in changed if name[0] != "+" and plain(name[2:]) not in own]


def faults(record: Record, step: str) -> list[str]:
    done = record["steps"].get(step)
    if done is None:
        return []
    bare = record["steps"]["bare"]
    found = []
    err = done["err"]
    stopped = step == "run" and done["code"] == bare["code"] == "time"
    if any(words in err for words in DEFECTS):
        found.append(f"{step}: a defect of AutoPrec")
    elif step == "run" and done["code"] != bare["code"] and not (done["code"] == "time" and record.get("endless")):
        found.append(f"run: ended with {done['code']}, bare with {bare['code']}")
    elif done["code"] == "time" and not stopped and step != "run":
        found.append(f"{step}: not finished in time")
    elif step == "check" and done["code"] == 1:
        found.append("check: executed is not what was asked")
    if bare["code"] in (0, "time") and any(words in err for words in BLAME):
        found.append(f"{step}: blamed on the script")
    if touched(record, step):
        found.append(f"{step}: files changed: {', '.join(touched(record, step)[:3])}")
    if step == "search":
        failed = (done["answer"].get("trials") or {}).get("failed", 0)
        if failed or "no trial could be measured" in err:
            found.append(f"search: {failed or 'all'} trials failed")
        if deterministic(record) and called_random(record):
            found.append("search: called not deterministic")
    return found


#: The divergence within which a search adopts by default.
BUDGET = 0.0025


def fresh_seeds(record: Record) -> tuple[float, float, bool] | None:
    """Return what an adopted policy's divergence is over fresh paired seeds, what was stated, and whether it holds.

    Stated is the mean over the search's own seeds with the half width of its interval, at least the script's own noise.
    """
    answer = record["steps"].get("verify", {}).get("answer", {})
    if not answer.get("fresh"):
        return None
    stated = answer["stated"]
    most = max(stated["divergence"] + stated["interval"], stated["noise_floor"], answer["floor"])
    mean = fmean(answer["fresh"])
    return mean, most, mean <= BUDGET and not answer["failed"]


def message(done: dict[str, Any]) -> str:
    """The first line of an error, as the command printed it."""
    lines = [line for line in done["err"].splitlines() if line.startswith("autoprec: error: ")]
    return lines[-1].removeprefix("autoprec: error: ") if lines else ""


def outcome(record: Record) -> str:
    if record["skipped"]:
        return "skipped"
    steps = record["steps"]
    if "bare" in steps and steps["bare"]["code"] not in (0, "time"):
        return "script fails"
    if any(step not in steps for step in COMMANDS):
        failed = "bare" in steps and steps["bare"]["code"] != 0 and not record.get("endless")
        return "script fails" if failed else "unfinished"
    if any(faults(record, step) for step in COMMANDS):
        return "fault"
    if any(steps[step]["code"] != 0 and message(steps[step]) for step in ("inspect", "search", "check")):
        return "told"
    return "works"


def cell(record: Record, step: str) -> str:
    done = record["steps"].get(step)
    if done is None:
        return ""
    answer = done.get("answer", {})
    if step == "inspect" and answer:
        return f"{answer['layers']} layers, {answer['share']:.0%}"
    if step == "search" and answer:
        return f"{answer['verdict']}" + (f" {answer['speedup']:.2f}x" if answer.get("speedup") else "")
    return {0: "ok", "time": "stopped"}.get(done["code"], f"exit {done['code']}")


def unseen(record: Record) -> str:
    """What AutoPrec said that it does not see or tune, and what went wrong, shortly."""
    steps = record["steps"]
    said = [fault for step in COMMANDS for fault in faults(record, step)]
    said += [message(steps[step]) for step in COMMANDS if step in steps]
    answer = steps.get("inspect", {}).get("answer", {})
    reasons = Counter(line.split(": ", 1)[-1] for line in answer.get("not_tunable", ()))
    said += [f"{count} not tunable: {reason}" for reason, count in reasons.most_common(2)]
    said += answer.get("notes", ())[:3]
    return "; ".join(dict.fromkeys(filter(None, said))).replace("|", "/").replace("\n", " ")[:420]


def bare_cell(record: Record) -> str:
    bare = record["steps"]["bare"]
    ended = {0: f"{bare['seconds']:.0f} s", "time": "endless"}.get(bare["code"], f"exit {bare['code']}")
    same = {True: ", same bits", False: ", not deterministic", None: ""}[deterministic(record)]
    return f"{ended}{same}"


def machine() -> str:
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    flags = Path("/proc/cpuinfo").read_text()
    bf16 = "with" if "avx512_bf16" in flags or "amx_bf16" in flags else "without"
    name = model[0].split(":", 1)[1].strip() if model else platform.machine()
    names = ("torch", "torchvision", "transformers", "accelerate", "lightning", "timm", "peft", "trl", "gymnasium")
    versions = []
    for package in names:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{name} ({bf16} bf16 instructions), Python {platform.python_version()}, {', '.join(versions)}"


def summary(records: list[Record], third: set[str]) -> list[str]:
    kinds = Counter(outcome(record) for record in records)
    tried = [record for record in records if outcome(record) in ("works", "told", "fault")]
    count = max(1, len(tried))
    good = kinds["works"] + kinds["told"]
    wrong = [record["name"] for record in tried if deterministic(record) and called_random(record)]
    changed = [record["name"] for record in tried if any(touched(record, step) for step in COMMANDS)]
    outside = sum(record["name"] in third for record in tried)
    fresh = {record["name"]: found for record in tried if (found := fresh_seeds(record))}
    beyond = [name for name, (_, _, holds) in fresh.items() if not holds]
    above = [f"{name} ({mean:.3%} for {most:.3%})" for name, (mean, most, _) in fresh.items() if mean > most]
    rows = [
        ("scripts tried, of them from other people's repositories", f"{len(tried)}, {outside}"),
        ("from inspect to run without a fault of AutoPrec", f"{good} of {len(tried)} ({good / count:.0%})"),
        ("of these, stopped with a message that says what to do", str(kinds["told"])),
        ("deterministic alone, called not deterministic", f"{len(wrong)} {', '.join(wrong)}".strip()),
        ("scripts of which a command changed a file", f"{len(changed)} {', '.join(changed)}".strip()),
        ("policies adopted, and their divergence looked at over four fresh paired seeds", str(len(fresh))),
        (f"of these, mean divergence beyond the budget of {BUDGET:.2%}", f"{len(beyond)} {', '.join(beyond)}".strip()),
        ("of these, beyond the mean and interval that the answer states", f"{len(above)} {', '.join(above)}".strip()),
        ("skipped here, or failing without AutoPrec", str(kinds["skipped"] + kinds["script fails"])),
    ]
    return ["| what | figure |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in rows)]


HEAD = """# Compatibility

Training scripts that nobody wrote for AutoPrec, and loops that frameworks rarely meet, run as they are. Printed by
`python benchmarks/scripts/scripts.py`; `benchmarks/scripts/scripts.yaml` names repositories, arguments and data. The
scripts are not in this repository: clone those you want to try. Their data are tiny and generated, so losses and
verdicts mean nothing here; only that every command ends as it should.

**bare** is the script alone; where a search says that it is not deterministic, it is run alone again with the same
seeds and the loss bits are compared. **inspect** gives the layers found and the share of FLOPs that is tunable,
**search** the verdict of three trials for a modelled H100, **check** whether each layer executed what was asked,
**run** whether the script ends under the policy as it does alone; where nothing was adopted, these two are given
uniform bf16. What was adopted runs under four paired seeds that the search has not seen.
All files of the user are hashed before and after each command. The search is
`{search}`.

{when}, {commit}, {machine}.

"""


def page(scripts: list[Any], work: Path) -> str:
    """Return the page of all records in ``work``."""
    records, sources, third = [], {}, set()
    for script in scripts:
        path = work / f"{script.name}.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found |= {"endless": script.endless}
        if "name" in found and outcome(found) != "unfinished":
            records.append(found)
            where = f"{script.repository}/{script.cwd}/{script.path}".replace("/./", "/")
            sources[script.name] = where if script.repository else f"ours: odd_loops/{script.path}"
            if script.repository:
                third.add(script.name)
    commits = sorted({record["commit"] for record in records if "commit" in record})
    given = {"search": f"search {SEARCH}", "when": date.today().isoformat(), "commit": f"commits {', '.join(commits)}"}
    lines = [HEAD.format(**given, machine=machine()), *summary(records, third), ""]
    columns = ("script", "source", "outcome", "bare", *COMMANDS, "not seen, and why")
    lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    left = []
    for record in records:
        kind = outcome(record)
        if kind in ("skipped", "script fails"):
            last = record["steps"].get("bare", {}).get("err", "").strip().splitlines()[-1:]
            why = record["skipped"] or f"{kind}: {''.join(last)}".replace("|", "/")
            left.append(f"| {record['name']} | {sources[record['name']]} | {why} |")
            continue
        cells = [cell(record, step) for step in COMMANDS]
        row = (record["name"], sources[record["name"]], kind, bare_cell(record), *cells, unseen(record))
        lines.append("| " + " | ".join(row) + " |")
    if left:
        lines += ["", "## Not tried here", "", "| script | source | why |", "|---|---|---|", *left]
    todo = [script.name for script in scripts if script.name not in sources]
    if todo:
        lines += ["", f"In the manifest, not yet run on this machine: {', '.join(todo)}."]
    return "\n".join(lines) + "\n"
