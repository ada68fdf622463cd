"""What AutoPrec does, as hashes: a dump to compare before and after a change that should alter nothing.

    python benchmarks/behaviour.py --out FILE                  # every part; the --room's or the --part's alone
    python benchmarks/behaviour.py --compare OLD NEW           # exit code 1 where an item differs, is gone or is new
    python benchmarks/behaviour.py --room optim --against OLD  # take the room's parts, and compare them with OLD's
    python benchmarks/behaviour.py --list                      # parts, and the rooms that each concerns

A dump maps part -> item -> {"sha256": ..., "text": ...}; ``text`` is there where a person can read the difference. The
parts lie in behaviour_parts.py and behaviour_commands.py. Everything is taken through public names, the command line
and its JSON, so that one version of this script can dump two versions of the package. Tensors are those of this CPU:
compare dumps of one machine and one PyTorch.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

#: What an item is: readable text, or bytes of tensors.
Item = tuple[str, str | bytes]
Dump = dict[str, Any]
#: Parts in the order they run, and the rooms of the package that a change of which should run it.
PARTS: dict[str, tuple[str, ...]] = {
    "help": ("cli", "support"),
    "exits": ("cli", "support", "policy", "errors"),
    "schemas": ("policy",),
    "keys": ("cli", "report", "support", "precision"),
    "recipes": ("numerics", "backends", "applying", "precision"),
    "optimizers": ("optim",),
    "graphs": ("graph",),
    "estimates": ("cost", "graph", "precision"),
    "searches": ("tuning",),
    "losses": ("trial", "applying"),
    "exports": ("export", "policy"),
}
#: Lines of a difference that are printed; the rest is counted.
SHOWN_LINES = 12


def makers() -> dict[str, Callable[[Path], Iterator[Item]]]:
    """Return what makes each part: imported on use, since `--compare` needs none of it."""
    from benchmarks import behaviour_commands as commands
    from benchmarks import behaviour_parts as parts

    return {name: getattr(commands, name, None) or getattr(parts, name) for name in PARTS}


def environment(home: Path) -> None:
    """Make what a command sees the same on every call: terminal, threads, and an empty home."""
    os.environ |= {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in [n for n in os.environ if n.startswith(("AUTOPREC_", "MLFLOW_"))]:
        del os.environ[name]


def taken(part: str, maker: Callable[[Path], Iterator[Item]]) -> Dump:
    """Return the items of a part; one that could not be taken says why, and the others are still there."""
    items: Dump = {}
    with tempfile.TemporaryDirectory(prefix="autoprec-behaviour-") as name:
        try:
            for item, content in maker(Path(name)):
                if isinstance(content, bytes):
                    items[item] = {"sha256": hashlib.sha256(content).hexdigest()}
                    continue
                text = content.replace(name, "DIR").replace(str(ROOT), "REPOSITORY")
                items[item] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
        except Exception as error:  # a part of a package under construction: the other parts still count
            text = f"{type(error).__name__}: {error}"
            items["(broke off)"] = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
            print(f"{part}: broke off: {text}", file=sys.stderr)
    return items


def dump(names: list[str]) -> Dump:
    """Take parts, with the commit they were taken of and the hash of each whole part."""
    import torch

    torch.set_num_threads(1)
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    out: Dump = {"commit": commit, "torch": torch.__version__, "hashes": {}, "parts": {}}
    functions = makers()
    with tempfile.TemporaryDirectory(prefix="autoprec-home-") as home:
        environment(Path(home))
        for name in names:
            began = time.monotonic()
            items = out["parts"][name] = taken(name, functions[name])
            joined = "\n".join(f"{item} {content['sha256']}" for item, content in sorted(items.items()))
            out["hashes"][name] = hashlib.sha256(joined.encode()).hexdigest()
            print(f"{name:11} {out['hashes'][name][:12]}  {len(items):5} items  {time.monotonic() - began:6.1f} s")
    return out


def differences(old: Dump, new: Dump) -> list[str]:
    """Return a line for each item that differs, is gone or is new, in the parts that the new dump has."""
    out = [f"{part}: not in the old dump" for part in new["parts"] if part not in old["parts"]]
    for part in (p for p in new["parts"] if p in old["parts"]):
        before, after = old["parts"][part], new["parts"][part]
        for item in dict.fromkeys([*before, *after]):
            if item not in after or item not in before:
                out.append(f"{part}: {item}: {'gone' if item not in after else 'new'}")
            elif before[item]["sha256"] != after[item]["sha256"]:
                out += [f"{part}: {item}: differs", *changed_lines(before[item], after[item])]
    return out


def changed_lines(before: Dump, after: Dump) -> list[str]:
    """Return the first changed lines of two texts; nothing for tensors."""
    texts = [one.get("text", "").splitlines() for one in (before, after)]
    lines = [x for x in difflib.unified_diff(*texts, n=0, lineterm="") if not x.startswith(("---", "+++", "@@"))]
    more = [f"    ... {len(lines) - SHOWN_LINES} more"] if len(lines) > SHOWN_LINES else []
    return [f"    {line[:150]}" for line in lines[:SHOWN_LINES]] + more


def compared(old: Dump, new: Dump) -> int:
    """Print how two dumps differ, and return the exit code."""
    found = differences(old, new)
    print(*found, sep="\n", end="\n" if found else "")
    items = sum(not line.startswith("    ") for line in found)
    whole = sum(map(len, new["parts"].values()))
    print(f"{items} of {whole} items differ between {old['commit']} and {new['commit']}")
    return int(items > 0)


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the dump here")
    parser.add_argument("--room", default="", help="only the parts that concern this room of autoprec/")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part; may be repeated")
    parser.add_argument("--against", type=Path, help="compare what was taken with this dump")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    if args.list:
        print(*(f"{part:11} {', '.join(rooms)}" for part, rooms in PARTS.items()), sep="\n")
        return 0
    if args.compare:
        old, new = (json.loads(path.read_text()) for path in args.compare)
        return compared(old, new)
    known = sorted({room for rooms in PARTS.values() for room in rooms})
    if args.room and args.room not in known:
        if not (ROOT / "autoprec" / args.room).is_dir():
            parser.error(f"unknown room '{args.room}'; those with parts: {', '.join(known)}")
        print(f"no part concerns {args.room}")
        return 0
    names = args.part or [part for part, rooms in PARTS.items() if not args.room or args.room in rooms]
    found = dump(names)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return compared(json.loads(args.against.read_text()), found) if args.against else 0


if __name__ == "__main__":
    sys.exit(main())
