"""Scripts that nobody calls faulty, judged as ``autoprec check`` and ``lint`` do without a policy: are they right?

``python -m benchmarks.precision.table --clean --work DIR`` judges the scripts of this repository, with ``--from
CLONES`` those of other people as well (``benchmarks/scripts/scripts.yaml``), each in a scratch copy and with a limit.
``judge`` is what both commands do with a step, in a fork of one process that has imported torch: a few seconds a
script. Then the commands themselves run. What was done is kept in DIR, so that a rerun does only what is missing.
``justified.yaml`` says of each finding that a person has looked at, with the source beside it, whether it is right.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from autoprec.tuning.lint.facts import Facts
from autoprec.tuning.lint.rules import findings
from autoprec.tuning.lint.source import settings_of
from benchmarks.precision import running
from benchmarks.scripts.scripts import ROOT, Script, Trial, commit, manifest
from benchmarks.scripts.table import DEFECTS, machine

JUSTIFIED = Path(__file__).with_name("justified.yaml")
COMMANDS = ("judge", "check", "lint")
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
        done, answer = (in_a_fork if command == "judge" else by_command)(trial, tree, command, limit)
        shutil.rmtree(tree)
        record["commit"] = commit()
        judged_step = answer.get("judged") or {}
        kept = {
            "answered": bool(answer),
            "findings": answer.get("findings", []),
            "unseen": answer.get("unseen") or judged_step.get("unseen", []),
            "looked_at": judged_step.get("looked_at", {}),
            "lifted": (answer.get("lifted") or {}).get("failed", ""),
        }
        text = json.dumps(kept).replace(f"{tree / script.cwd}/", "").replace(f"{tree}/", "").replace(f"{ROOT}/", "")
        record[command] = {name: done[name] for name in ("code", "seconds", "changed", "err")} | json.loads(text)
        print(f"{time.strftime('%H:%M:%S')} {script.name:28} {command:6} {told(record, command)}", flush=True)
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return record


def by_command(trial: Trial, tree: Path, command: str, limit: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how a command ended, and its JSON document, empty where it printed none."""
    script = trial.script
    words = ["--", *script.words] if script.launcher or command == "lint" else script.words
    done = trial.command([sys.executable, "-m", "autoprec", command, "--json", *words], tree, limit, {})
    try:
        return done, json.loads(done["out"])
    except json.JSONDecodeError:
        return done, {}


def in_a_fork(trial: Trial, tree: Path, command: str, limit: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return how judging in a fork of this process ended, and what was found, as the JSON of ``check``."""
    began = time.monotonic()
    answer, log = tree.parent / f"{command}.json", tree.parent / f"{command}.err"
    answer.unlink(missing_ok=True)
    environment = trial.environment(tree, {})
    child = os.fork()
    if not child:
        code = 4
        try:
            os.setsid()
            silent = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            os.environ.update(environment)
            sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
            folder = tree / trial.script.cwd
            report = running.judged(folder / trial.script.path, trial.script.args, within=folder)
            step = report.judged.within(str(folder)) if report.judged is not None else None
            facts = Facts(report=replace(report, judged=step), settings=settings_of([trial.script.path], folder))
            rows = [one.to_json() for one in findings(facts)]
            answer.write_text(json.dumps({"findings": rows, "judged": step.to_json() if step is not None else {}}))
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    ended: int | str = "time"
    while time.monotonic() < began + limit:
        if os.waitpid(child, os.WNOHANG)[0]:
            ended = 0 if answer.exists() else 4
            break
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if ended == "time":
        os.waitpid(child, 0)
    text = log.read_text("utf-8", "replace").strip() if log.exists() else ""
    err = f"autoprec: error: {text.splitlines()[-1]}" if ended and text else text[-3000:]
    # what the script itself writes before its step ends is not held back here, as the commands do
    done = {"code": ended, "seconds": round(time.monotonic() - began, 1), "err": err, "changed": []}
    return done, json.loads(answer.read_text("utf-8")) if answer.exists() else {}


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
    return any(words in done["err"] for words in DEFECTS) or odd


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
    answered = [record for record in tried if any(map(judges, (record.get(command, {}) for command in COMMANDS)))]
    third = {script.name for script in manifest() if script.repository}
    found = [row for record in tried for row in rows_of(record, justified)]
    count = Counter((row.severity, row.right) for row in found)
    done = [(record, command) for record in tried for command in COMMANDS if command in record]
    cut = [f"{one['name']} ({command})" for one, command in done if one[command]["code"] == "time"]
    broken = [f"{one['name']} ({command})" for one, command in done if crashed(one[command])]
    changed = [f"{one['name']} ({command})" for one, command in done if one[command]["changed"]]
    unlike = [f"{one.script} ({one.code})" for one in found if set(one.by) != set(answering(one.script, tried))]
    table = [
        ("scripts whose step was judged, of them from other people's repositories",
         f"{len(answered)}, {sum(one['name'] in third for one in answered)}"),
        *((f"findings of severity {severity}: right, wrong, not looked at",
           ", ".join(str(count[severity, right]) for right in (True, False, None)))
          for severity in ("error", "warning", "note")),
        ("findings that not every command says that has judged the step", listed(unlike)),
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
            last = next((command for command in COMMANDS if command in record), "check")
            lines.append(f"- {record['name']}: {record['skipped'] or told(record, last)}")
    lines += ["", "Judged, and not wholly:", ""]
    for record in answered:
        both = [record[command] for command in COMMANDS if command in record]
        texts = dict.fromkeys(text for one in both for text in (*one["unseen"], one["lifted"]) if text)
        lines += [f"- {record['name']}: {text}" for text in texts]
    commits = ", ".join(sorted({record["commit"] for record in records if "commit" in record}))
    return f"{time.strftime('%Y-%m-%d')}, commits {commits}, {machine()}.\n\n" + "\n".join(lines) + "\n"


def answering(name: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the commands that have judged the script of that name."""
    record = next(one for one in records if one["name"] == name)
    return [command for command in COMMANDS if judges(record.get(command, {}))]


def judges(done: dict[str, Any]) -> bool:
    """Say whether a command has judged a step: `lint` answers without one, too."""
    return bool(done.get("answered")) and not any("no step was recorded" in text for text in done["unseen"])


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
