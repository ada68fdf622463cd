"""Scripts that nobody calls faulty, judged by ``autoprec check`` and ``lint`` without a policy: is what is found right?

``python -m benchmarks.precision.table --clean --work DIR`` judges the scripts of this repository, with ``--from
CLONES`` those of other people as well (``benchmarks/scripts/scripts.yaml``). Each runs in a scratch copy, both commands
in a process of their own and with a limit; what was done is kept in DIR, so that a rerun does only what is missing.
``justified.yaml`` says of each finding that a person has looked at, with the source beside it, whether it is right.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scripts.scripts import ROOT, Script, Trial, commit, manifest
from benchmarks.scripts.table import machine

JUSTIFIED = Path(__file__).with_name("justified.yaml")
COMMANDS = ("check", "lint")
MODELS = ("conv", "dlrm", "lstm", "moe", "seq2seq", "tab", "unet", "gpt6")
LIBRARY_MODELS = ("vit", "convnext", "mixer", "bert", "gpt2", "whisper")
WAYS = ((), ("--autocast",), ("--autocast", "--micro-batches", "4"))
#: What a command ends with where it has said what it found, or that the script has no step to judge.
_ENDS = (0, 1)


@dataclass(frozen=True)
class Row:
    """One finding, once for a script: where both commands say it, or one alone.

    Attributes:
        script, code, place, severity, message, fix: of the finding.
        by: the commands that say it.
        right, why: what a person says of it; None where nobody has looked yet.
    """

    script: str
    code: str
    place: str
    severity: str
    message: str
    fix: str
    by: tuple[str, ...]
    right: bool | None = None
    why: str = ""


def ours() -> list[Script]:
    """Return the scripts of this repository: examples, those that are timed by hand, each in several ways."""
    found = []
    for name in (*MODELS, *LIBRARY_MODELS):
        for way in WAYS:
            label = "-".join(("hand", name, *(word.strip("-") for word in way)))
            packages = ("timm", "transformers") if name in LIBRARY_MODELS else ()
            found.append(
                Script(label, "train.py", args=(name, *way), packages=packages, ours="benchmarks/scripts/by_hand")
            )
    for path in (*sorted((ROOT / "examples").glob("train_*.py")), ROOT / "examples" / "llama_proxy.py"):
        found.append(Script(f"example-{path.stem}", path.name, ours="examples"))
    return found


def judged(script: Script, command: str, clones: Path | None, work: Path, limit: float) -> dict[str, Any]:
    """Return the record of one script, to which a command is added where it is missing."""
    path = work / f"{script.name}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    record |= {"name": script.name, "skipped": script.missing(clones)}
    trial = Trial(script, clones, work)
    if not record["skipped"] and command not in record:
        tree = trial.copy(command)
        words = ["--", *script.words] if script.launcher or command == "lint" else script.words
        done = trial.command([sys.executable, "-m", "autoprec", command, "--json", *words], tree, limit, {})
        shutil.rmtree(tree)
        record["commit"] = commit()
        try:
            answer = json.loads(done["out"])
        except json.JSONDecodeError:
            answer = {}
        judged_step = answer.get("judged") or {}
        kept = {
            "answered": bool(answer),
            "findings": answer.get("findings", []),
            "unseen": answer.get("unseen") or judged_step.get("unseen", []),
            "looked_at": judged_step.get("looked_at", {}),
            "lifted": (answer.get("lifted") or {}).get("failed", ""),
        }
        text = json.dumps(kept).replace(f"{tree}/", "").replace(f"{ROOT}/", "")
        record[command] = {name: done[name] for name in ("code", "seconds", "changed", "err")} | json.loads(text)
        print(f"{time.strftime('%H:%M:%S')} {script.name:28} {command:6} {told(record, command)}", flush=True)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return record


def told(record: dict[str, Any], command: str) -> str:
    """Return what a command said of one script, shortly."""
    done = record.get(command)
    if done is None:
        return "not run"
    if done["code"] == "time":
        return "cut off"
    if crashed(done):
        return f"FAULT: exit {done['code']}: {done['err'].strip().splitlines()[-1:]}"
    if not done["answered"]:
        lines = [line for line in done["err"].splitlines() if line.startswith("autoprec: error: ")]
        return (lines or [f"exit {done['code']}"])[-1].removeprefix("autoprec: error: ")
    found = Counter(f"{one['severity']} {one['code']}" for one in done["findings"])
    unseen = f"; not judged: {'; '.join(done['unseen'])}" if done["unseen"] else ""
    said = ", ".join(f"{count} {what}" if count > 1 else what for what, count in found.items())
    return (said or "nothing found") + unseen


def crashed(done: dict[str, Any]) -> bool:
    """Say whether a command ended as none should."""
    odd = not done["answered"] and done["code"] in _ENDS
    return "defect of AutoPrec" in done["err"] or odd


def rows_of(record: dict[str, Any], justified: Sequence[dict[str, Any]]) -> list[Row]:
    """Return the findings about one script with what a person says of them."""
    by: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for command in COMMANDS:
        for one in record.get(command, {}).get("findings", ()):
            place = f"{one['file']}:{one['line']}" if one["line"] else one["file"]
            by.setdefault((one["code"], place), []).append((command, one))
    found = []
    for (code, place), several in by.items():
        said = next((row for row in justified if speaks_of(row, record["name"], code, place)), {})
        one, commands = several[0][1], tuple(command for command, _ in several)
        texts = (one["severity"], one["message"], one["fix"])
        found.append(Row(record["name"], code, place, *texts, commands, said.get("right"), said.get("why", "")))
    return found


def speaks_of(row: dict[str, Any], script: str, code: str, place: str) -> bool:
    """Say whether a row of ``justified.yaml`` is about a finding: scripts may be several, a place may be left out."""
    return script in row["scripts"] and code == row["code"] and place.endswith(row.get("place", ""))


def page(records: Sequence[dict[str, Any]], limit: float) -> str:
    """Return the page of what was found in all scripts, and whether it is right."""
    justified = yaml.safe_load(JUSTIFIED.read_text(encoding="utf-8"))["findings"]
    tried = [record for record in records if not record["skipped"]]
    answered = [record for record in tried if any(record.get(command, {}).get("answered") for command in COMMANDS)]
    third = {script.name for script in manifest() if script.repository}
    found = [row for record in tried for row in rows_of(record, justified)]
    count = Counter((row.severity, row.right) for row in found)
    done = [(record, command) for record in tried for command in COMMANDS if command in record]
    cut = [f"{one['name']} ({command})" for one, command in done if one[command]["code"] == "time"]
    broken = [f"{one['name']} ({command})" for one, command in done if crashed(one[command])]
    changed = [f"{one['name']} ({command})" for one, command in done if one[command]["changed"]]
    unlike = [f"{one.script} ({one.code})" for one in found if both_answered(one.script, tried) and len(one.by) < 2]
    table = [
        ("scripts whose step was judged, of them from other people's repositories",
         f"{len(answered)}, {sum(one['name'] in third for one in answered)}"),
        *((f"findings of severity {severity}: right, wrong, not looked at",
           ", ".join(str(count[severity, right]) for right in (True, False, None)))
          for severity in ("error", "warning", "note")),
        ("findings that `check` and `lint` do not both say", listed(unlike)),
        (f"commands cut off after {limit:g} s", listed(cut)),
        ("commands that ended as none should", listed(broken)),
        ("commands that changed a file", listed(changed)),
    ]  # fmt: skip
    lines = ["| what | figure |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in table), ""]
    lines += ["| script | severity, code | place | said | right |", "|---|---|---|---|---|"]
    for row in sorted(found, key=lambda row: ("error", "warning", "note").index(row.severity)):
        right = {True: "yes", False: "**no**", None: "not looked at"}[row.right]
        said = row.message.replace("|", "/")
        lines.append(f"| {row.script} | {row.severity}, {row.code} | {row.place} | {said} | {right}: {row.why} |")
    quiet = [record["name"] for record in answered if not rows_of(record, justified)]
    lines += ["", f"Nothing found in {len(quiet)}: {', '.join(quiet)}.", "", "Not judged:", ""]
    for record in records:
        if record["skipped"] or record not in answered:
            lines.append(f"- {record['name']}: {record['skipped'] or told(record, 'check')}")
    lines += ["", "Judged, and not wholly:", ""]
    for record in answered:
        both = [record[command] for command in COMMANDS if command in record]
        texts = dict.fromkeys(text for one in both for text in (*one["unseen"], one["lifted"]) if text)
        lines += [f"- {record['name']}: {text}" for text in texts]
    commits = ", ".join(sorted({record["commit"] for record in records if "commit" in record}))
    return f"{time.strftime('%Y-%m-%d')}, commits {commits}, {machine()}.\n\n" + "\n".join(lines) + "\n"


def both_answered(name: str, records: Sequence[dict[str, Any]]) -> bool:
    """Say whether both commands have judged the script of that name."""
    record = next(one for one in records if one["name"] == name)
    return all(record.get(command, {}).get("answered") for command in COMMANDS)


def listed(names: Sequence[str]) -> str:
    """Return how many there are, and which."""
    return f"{len(names)} {', '.join(names)}".strip()


def clean(names: Sequence[str], clones: Path | None, work: Path, limit: float) -> int:
    """Judge every script that is to be clean, print the page; return how many findings of severity error are not right.

    Args:
        names: of the scripts, or beginnings of them; empty for all.
        clones: a folder with one clone per repository; None for the scripts of this repository alone.
        work: where records and scratch copies are kept.
        limit: seconds for each command.
    """
    work = work.resolve()
    (work / "scratch").mkdir(parents=True, exist_ok=True)
    scripts = [one for one in (*ours(), *manifest()) if not one.repository or clones is not None]
    chosen = [one for one in scripts if not names or one.name.startswith(tuple(names))]
    held = clones.resolve() if clones is not None else None
    for command in COMMANDS:
        records = [judged(one, command, held, work, limit) for one in chosen]
    print(page(records, limit))
    justified = yaml.safe_load(JUSTIFIED.read_text(encoding="utf-8"))["findings"]
    found = [row for record in records for row in rows_of(record, justified)]
    return sum(row.severity == "error" and not row.right for row in found)
