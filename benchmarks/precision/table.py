"""Faulty scripts of which the right line and kind are named, and clean ones on which an error is found.

``python -m benchmarks.precision.table`` prints a row for each script; ``--cures`` runs the mended ones as well.
``--clean`` judges scripts that have no fault (:mod:`benchmarks.precision.clean`).
``--search`` runs a whole search of each, and says whether its answer names the fault; what follows ``--`` goes to it.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from pathlib import Path

from benchmarks.precision.clean import clean
from benchmarks.precision.running import corpus, found_in, found_in_text
from benchmarks.precision.searches import searched


def faulty(names: list[str], *, cures: bool) -> tuple[int, int]:
    """Print what is found in each faulty script; return how many are right, of how many."""
    right, rows = 0, [one for one in corpus() if not names or one.path.stem in names]
    for fault in rows:
        began = time.process_time()
        try:
            found = found_in(fault.path)
        except Exception:
            traceback.print_exc()
            found = []
        seen = [(one.code, int(one.place.rpartition(":")[2] or 0), one.severity) for one in found]
        ok = any(code == fault.code and line in fault.lines for code, line, _ in seen)
        right += ok
        others = ", ".join(f"{code}:{line} {severity}" for code, line, severity in seen)
        mended = ""
        if cures and fault.cures:
            again = [one.code for one in found_in_text(fault.cured())]
            mended = "cured " if fault.code not in again else "NOT CURED "
        took = time.process_time() - began
        head = f"{'ok ' if ok else 'NO '} {mended}{fault.path.stem}"
        print(f"{head}: {fault.code} at {fault.lines}; found {others} ({took:.1f} s)", flush=True)
    return right, len(rows)


def searches(names: list[str], options: list[str]) -> tuple[int, int]:
    """Print what a whole search of each faulty script says; return how many do not say the fault, of how many.

    A file that is named is searched whatever its fault is. A fault of severity note is none that a search speaks of.
    """
    without = count = 0
    rows = [(one.path, one.code, one.lines) for one in corpus() if not names or one.path.stem in names]
    rows += [(Path(name), "", ()) for name in names if name.endswith(".py")]
    for path, code, lines in rows:
        one, severity = searched(path, code, lines, options), _severity(path, code)
        silent = one.silent if severity != "note" else ()
        without, count = without + bool(silent), count + (severity != "note")
        head = f"{'NO ' if silent else 'ok '} {path.stem}: {code} {severity}, {one.verdict}"
        print(f"{head}; silent: {', '.join(one.silent) or 'none'}; {one.told[:300]!r}", flush=True)
    return without, count


def _severity(path: Path, code: str) -> str:
    return next((one.severity for one in found_in(path) if one.code == code or not code), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="scripts, without .py; default: all")
    parser.add_argument("--cures", action="store_true", help="run the mended scripts as well")
    parser.add_argument("--clean", action="store_true", help="the clean scripts alone")
    parser.add_argument("--from", dest="clones", type=Path, help="--clean: a folder with one clone per repository")
    parser.add_argument("--work", type=Path, default=Path("clean-work"), help="--clean: records and scratch copies")
    parser.add_argument("--limit", type=float, default=120.0, help="--clean: seconds for each command")
    parser.add_argument("--search", action="store_true", help="a whole search of each faulty script")
    arguments, more = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, more = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(arguments)
    if options.search:
        silent, count = searches(options.names, more)
        print(f"answers of a search that do not say the fault: {silent} of {count}")
    elif options.clean:
        wrong = clean(options.names, options.clones, options.work, options.limit)
        print(f"findings of severity error on clean scripts that are not right: {wrong}")
    else:
        right, count = faulty(options.names, cures=options.cures)
        print(f"right line and kind: {right} of {count}")


if __name__ == "__main__":
    main()
