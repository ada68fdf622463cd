"""Training scripts that nobody wrote for AutoPrec, tried as they are: what works, what was not seen, and why.

    python benchmarks/scripts/scripts.py --from DIR --work DIR            # run what is missing, then print the table
    python benchmarks/scripts/scripts.py --from DIR --work DIR --only nanogpt,mnist [--again check,run]
    python benchmarks/scripts/scripts.py --work DIR --table FILE.md
    python benchmarks/scripts/scripts.py --from DIR --work OTHER --only vae --more "--cost-scale tokens=64"

``scripts.yaml`` names the scripts: repository, path, the arguments that make the run tiny, the data to generate. DIR of
``--from`` holds one clone per repository (``git clone https://github.com/karpathy/nanoGPT DIR/nanoGPT``); what is not
there is listed as skipped. ``odd_loops/`` holds loops of our own that frameworks rarely test. Every script runs in a
scratch copy of its repository: bare, through inspect, search, check and run, through verify over fresh paired seeds
where a policy was adopted, and bare again where the search says that it is not deterministic (are its losses the same
bits?). All files are hashed before and after each command. Results are kept per script in ``--work``, so that a rerun
does only what is missing. ``--more`` adds options to the search, whose results belong into another ``--work``: at a
larger scale tiny models gain from 8 bits.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.scripts import data as scripts_data
from benchmarks.scripts import table as scripts_table
from benchmarks.scripts.table import SEARCH

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STEPS = ("bare", "inspect", "search", "check", "run", "verify", "again")
LIMITS = {"bare": 120.0, "again": 120.0, "inspect": 240.0, "check": 240.0, "run": 180.0} | dict.fromkeys(
    ("search", "verify"), 600.0
)
#: An endless script is stopped here; that it was still training then is what is asked of it.
ENDLESS = 25.0
#: Runs like those of the search's finalists, under fresh paired seeds: verify begins after the search's own.
VERIFY = "--steps 4 --seeds 4 --json"
#: Written by AutoPrec, or by Python itself, on purpose.
OURS = ("autoprec-runs", "__pycache__")


@dataclass(frozen=True)
class Script:
    name: str
    path: str
    repository: str = ""
    cwd: str = "."
    args: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    endless: bool = False
    launcher: tuple[str, ...] = ()
    #: Where a script without a repository lies in this one.
    ours: str = "benchmarks/scripts/odd_loops"

    @property
    def folder(self) -> str:
        return self.repository.split("/")[-1]

    @property
    def words(self) -> list[str]:
        return [*self.launcher, self.path, *self.args]

    def missing(self, clones: Path | None) -> str:
        """Why this script cannot be tried here; empty when it can."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if self.repository and (clones is None or not (clones / self.folder / self.cwd / self.path).is_file()):
            return f"no clone of {self.repository} with {self.path}"
        return ""


def manifest() -> list[Script]:
    found = []
    for row in yaml.safe_load((HERE / "scripts.yaml").read_text(encoding="utf-8"))["scripts"]:
        words = {key: tuple(str(row.pop(key, "")).split()) for key in ("args", "packages", "launcher")}
        found.append(Script(**row | words | {"data": tuple(row.get("data", ()))}))
    return found


def contents(tree: Path) -> dict[str, str]:
    """Return the hash of every file (and the mark of every folder) that AutoPrec has no business in."""
    found = {}
    for base, folders, files in os.walk(tree):
        folders[:] = [name for name in folders if name not in OURS and name != ".git"]
        for name in folders:
            found[os.path.relpath(os.path.join(base, name), tree)] = "folder"
        for name in files:
            path = os.path.join(base, name)
            with open(path, "rb") as file:
                found[os.path.relpath(path, tree)] = hashlib.sha1(file.read()).hexdigest()
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    gone = [f"- {name}" for name in before if name not in after]
    new = [f"+ {name}" for name in after if name not in before]
    return sorted(gone + new + [f"~ {name}" for name in before if name in after and before[name] != after[name]])


@dataclass
class Trial:
    """One script in its scratch folder."""

    script: Script
    clones: Path | None
    work: Path
    #: Whether the search adopted a policy; check and run are given bf16 on each of ``tunable`` otherwise.
    adopted: bool = False
    tunable: tuple[str, ...] = ()
    more: str = ""

    def copy(self, name: str) -> Path:
        """Return a fresh copy of the script's repository with its data in it."""

        tree = self.work / "scratch" / self.script.name / name
        if tree.exists():
            shutil.rmtree(tree)
        script = self.script
        source = self.clones / script.folder if script.repository and self.clones else ROOT / script.ours
        shutil.copytree(source, tree, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        for line in self.script.data:
            generator, *words = str(line).split()
            getattr(scripts_data, generator)(tree, *words)
        return tree

    def environment(self, tree: Path, more: dict[str, str]) -> dict[str, str]:
        home = self.work / "scratch" / self.script.name / "home"
        home.mkdir(parents=True, exist_ok=True)
        given = {key: value.replace("{tree}", str(tree)) for key, value in self.script.env.items()}
        fixed = {"HOME": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}
        merged = os.environ | fixed | given | more
        paths = [more.get("PYTHONPATH"), given.get("PYTHONPATH"), str(ROOT), os.environ.get("PYTHONPATH")]
        merged["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        merged["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), merged["PATH"]])
        return merged

    def command(self, words: list[str], tree: Path, limit: float, more: dict[str, str]) -> dict[str, Any]:
        """Run one command in the tree; what it printed, changed and cost."""
        before = contents(tree)
        log = self.work / "scratch" / self.script.name / "log"
        began = time.monotonic()
        with open(f"{log}.out", "w+b") as out, open(f"{log}.err", "w+b") as err:
            process = subprocess.Popen(
                words,
                cwd=tree / self.script.cwd,
                env=self.environment(tree, more),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                code: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = "time"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        done = {"code": code, "seconds": round(time.monotonic() - began, 1)}
        done |= {"changed": differences(before, contents(tree))[:40]}
        texts = {part: Path(f"{log}.{part}").read_text("utf-8", "replace") for part in ("out", "err")}
        return done | {"out": texts["out"], "err": texts["err"][-6000:]}

    def bare(self, calls: int) -> dict[str, Any]:
        """Run the script alone, its losses recorded; it is stopped after so many backward passes (0: never)."""
        tree = self.copy("bare")
        hooks = self.work / "scratch" / self.script.name / "hooks"
        shutil.rmtree(hooks, ignore_errors=True)
        hooks.mkdir()
        shutil.copy(HERE / "record.py", hooks / "sitecustomize.py")
        more = {"PYTHONPATH": str(hooks), "SCRIPTS_RECORD": str(hooks), "PYTHONHASHSEED": "0"}
        if calls:
            more["SCRIPTS_CALLS"] = str(calls)
        words = self.script.words if self.script.launcher else [sys.executable, *self.script.words]
        limit = ENDLESS * 2 if self.script.endless else LIMITS["bare"]
        done = self.command(words, tree, limit, more)
        runs = sorted(path.read_text("ascii").split("\n")[:20] for path in hooks.glob("*.txt"))
        shutil.rmtree(tree)
        return done | {"out": done["out"][-2000:], "losses": runs}

    def autoprec(self, step: str) -> dict[str, Any]:
        base = self.work / "scratch" / self.script.name
        tree = self.copy("tree") if step == "inspect" or not (base / "tree").exists() else base / "tree"
        policy = base / "policy.yaml"
        if step == "search":
            policy.unlink(missing_ok=True)
        elif step in ("check", "run") and not self.adopted:
            rules = [{"match": name, "recipe": "bf16"} for name in self.tunable]
            asked = {"schema": "autoprec.policy/1", "recipes": {"bf16": {"format": "bf16"}}, "layers": rules}
            policy.write_text(yaml.safe_dump(asked, sort_keys=False), encoding="utf-8")
        options = {
            "inspect": ["--json"],
            "search": [*SEARCH.split(), *self.more.split(), "-o", str(policy)],
            "check": ["--policy", str(policy), "--json"],
            "run": ["--policy", str(policy)],
            "verify": ["--policy", str(policy), *VERIFY.split()],
        }[step]
        words = ["--", *self.script.words] if self.script.launcher else self.script.words
        limit = ENDLESS if self.script.endless and step == "run" else LIMITS[step]
        done = self.command([sys.executable, "-m", "autoprec", step, *options, *words], tree, limit, {})
        try:
            answer = json.loads(done["out"]) if step != "run" else {}
        except json.JSONDecodeError:
            answer = {}
        shown = SHOWN[step](answer) if answer else {}
        if step == "verify" and answer:
            stated = yaml.safe_load(policy.read_text(encoding="utf-8"))["evidence"]
            shown["stated"] = {name: stated.get(name, 0.0) for name in ("divergence", "interval", "noise_floor")}
        if step == "search":
            self.adopted = answer.get("verdict") == "adopt"
        if step == "inspect":
            self.tunable = tuple(shown.get("tunable", ()))
        return done | {"out": "" if answer else done["out"][-2000:], "answer": shown}

    def step(self, step: str) -> dict[str, Any]:
        if step in ("bare", "again"):
            return self.bare(20 if step == "again" or self.script.endless else 0)
        return self.autoprec(step)


def shown_of_inspect(answer: dict[str, Any]) -> dict[str, Any]:
    layers = answer["layers"]
    skipped = [f"{row['name']}: {row['reason']}" for row in layers if not row["tunable"]]
    tunable = [row["name"] for row in layers if row["tunable"]]
    shown = {"layers": len(layers), "tunable": tunable, "not_tunable": skipped[:20], "notes": answer["notes"]}
    return shown | {"share": answer["coverage"]["tunable_flops_share"]}


def shown_of_search(answer: dict[str, Any]) -> dict[str, Any]:
    keep = ("verdict", "reason", "trials", "notes", "seconds")
    best = answer.get("best") or {}
    return {key: answer.get(key) for key in keep} | {
        "speedup": best.get("speedup"),
        "divergence": best.get("divergence"),
    }


def shown_of_check(answer: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if isinstance(value, (str, int, float, bool))}


def shown_of_verify(answer: dict[str, Any]) -> dict[str, Any]:
    policy = answer["rows"][0]
    shown = {"fresh": policy["divergences"], "failed": len(policy["failures"])}
    return shown | {"floor": answer["noise_floor"], "reason": answer["reason"]}


SHOWN = {
    "inspect": shown_of_inspect,
    "search": shown_of_search,
    "check": shown_of_check,
    "verify": shown_of_verify,
}


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def try_script(script: Script, clones: Path | None, work: Path, again: set[str], more: str) -> None:
    """Do what is missing of one script; the record is saved after each step."""

    path = work / f"{script.name}.json"
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = {step: value for step, value in record.get("steps", {}).items() if step not in again}
    if "search" in again and not (work / "scratch" / script.name).exists():
        again = again | {"inspect"}
    record |= {"name": script.name, "skipped": script.missing(clones), "steps": kept}
    said = {step: kept.get(step, {}).get("answer", {}) for step in ("inspect", "search")}
    adopted, tunable = said["search"].get("verdict") == "adopt", tuple(said["inspect"].get("tunable", ()))
    trial = Trial(script, clones, work, adopted, tunable, more)
    for step in STEPS if not record["skipped"] else ():
        if step in kept or (step == "again" and not scripts_table.called_random(record)):
            continue
        if step == "verify" and not trial.adopted:
            continue
        began = time.strftime("%H:%M:%S")
        record["commit"] = commit()
        kept[step] = trial.step(step)
        print(f"{began} {script.name:24} {step:8} {kept[step]['code']!s:5} {kept[step]['seconds']:6.1f} s", flush=True)
        path.write_text(json.dumps(record, indent=1), encoding="utf-8")
        if step == "bare" and kept[step]["code"] not in (0, "time" if script.endless else 0):
            print(kept[step]["err"][-1500:], flush=True)
            break
    path.write_text(json.dumps(record, indent=1), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="clones", type=Path, help="folder with one clone per repository")
    parser.add_argument("--work", type=Path, required=True, help="results and scratch copies")
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--again", default="", help="steps to repeat, comma-separated: inspect,search,check,run or all")
    parser.add_argument("--more", default="", help="options added to the search")
    parser.add_argument("--table", type=Path, help="write the page here; nothing is run")
    args = parser.parse_args()
    work: Path = args.work.resolve()
    (work / "scratch").mkdir(parents=True, exist_ok=True)
    wanted = set(filter(None, args.only.split(",")))
    again = set(STEPS if args.again == "all" else filter(None, args.again.split(",")))
    chosen = [script for script in manifest() if not wanted or script.name in wanted]
    order = args.only.split(",")
    chosen.sort(key=lambda script: order.index(script.name) if wanted else 0)
    unknown = wanted - {script.name for script in chosen}
    if unknown:
        raise SystemExit(f"not in scripts.yaml: {', '.join(sorted(unknown))}")
    if not args.table:
        for script in chosen:
            try_script(script, args.clones and args.clones.resolve(), work, again, args.more)

    text = scripts_table.page(chosen, work)
    if args.table:
        args.table.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
