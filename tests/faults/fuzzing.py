"""Feed the loaders hostile files in this process and count what happened: ``python -m tests.faults.fuzzing``.

    python -m tests.faults.fuzzing --count 1000 --seed 0 [--bombs 0.02] [--folder DIR]

Prints one JSON object: outcomes, the slowest input (CPU seconds), peak memory (bytes), and every event of Python's
audit hooks that is not the reading of the input itself: code compiled or executed, modules imported, files opened,
processes started, sockets made.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import resource
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from autoprec.errors import PolicyError, SpaceError
from autoprec.policy import Policy, dump_yaml, load_policy, parse_policy, resolve
from autoprec.policy.space import load_space
from autoprec.support.files import parse_document
from tests.faults.bad_documents import BOMBS, HEADS, hostile, policy_seeds, space_seeds

#: Audit events that mean that loading did more than read its file.
FORBIDDEN = (
    "exec",
    "compile",
    "import",
    "open",
    "subprocess.",
    "os.",
    "socket.",
    "ctypes.",
    "pickle.",
    "marshal.",
    "code.",
)
NAMES = ["h.0.attn", "h.1.fc", "a" * 200, "lm_head", "é"]
MEMORY = 256 * 2**20


class Watch:
    """Counts audit events while ``path`` is being loaded."""

    def __init__(self, path: Path) -> None:
        self.path, self.on = str(path), False
        self.events: collections.Counter[str] = collections.Counter()
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on or not event.startswith(FORBIDDEN):
            return
        if (event == "open" and str(args[0]) == self.path) or event in (
            "os.scandir",
            "os.listdir",
        ):  # of the shipped spaces
            return
        self.events[f"{event} {args[:1]!r}"[:120]] += 1


def _peak() -> int:
    """Return this process's largest resident memory, in bytes; ``ru_maxrss`` would remember what its parent held."""
    status = Path("/proc/self/status")
    if status.exists():
        found = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(found.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


#: An input that took longer (CPU s) is loaded three times, and the least is its time.
_SURE_S = 0.3


class Fuzz:
    """One loader per turn on one file, with the figures."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "input.yaml"
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.crashes: list[str] = []
        self.slowest, self.slowest_input = 0.0, b""
        self.watch = Watch(self.path)

    def load(self, kind: str, raw: bytes) -> None:
        """Load one input as a policy or a space, and use what comes out as a search would."""
        self.path.write_bytes(raw)
        outcome, seconds = self._timed(kind)
        if seconds > max(self.slowest, _SURE_S):  # on a busy machine the same input takes up to twice as long
            seconds = min(seconds, *(self._timed(kind)[1] for _ in range(2)))
        self.outcomes[f"{kind} {outcome}"] += 1
        if seconds > self.slowest:
            self.slowest, self.slowest_input = seconds, raw[:200]
        if kind == "policy" and outcome == "valid" and len(raw) < 10_000:
            self._survives(raw)

    def _timed(self, kind: str) -> tuple[str, float]:
        """Load what lies there; return how that ended, and its CPU seconds."""
        began, self.watch.on = time.process_time(), True
        try:
            if kind == "policy":
                policy: Policy = load_policy(self.path)
                if len(policy.layers) < 100:  # globs are compiled where they are used, one by one
                    resolve(policy, NAMES, strict=False)
            else:
                space = load_space(self.path)
                [space.rule_for(name) for name in NAMES]
            outcome = "valid"
        except (PolicyError, SpaceError) as error:
            outcome = "refused" if error.what and error.where and len(str(error)) < 20_000 else "refused badly"
        except Exception:
            outcome = "crashed"
            self.crashes.append(traceback.format_exc()[-2000:])
        self.watch.on = False
        return outcome, time.process_time() - began

    def _survives(self, raw: bytes) -> None:
        """What was accepted means the same after it was written and read again."""
        policy: Policy = load_policy(self.path)
        if parse_policy(dump_yaml(policy.to_dict())) != policy:
            self.outcomes["policy changed by writing"] += 1
            self.crashes.append(f"changed by writing: {raw!r}"[:2000])

    def report(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return {
            "inputs": sum(n for key, n in self.outcomes.items() if "writing" not in key),
            "outcomes": dict(sorted(self.outcomes.items())),
            "code executed": sum(self.watch.events.values()),
            "events": dict(self.watch.events.most_common(5)),
            "slowest_s": round(self.slowest, 3),
            "slowest_input": repr(self.slowest_input[:120]),
            "memory_bytes": _peak(),
            "crashes": self.crashes[:3],
        }


def warm(fuzz: Fuzz) -> None:
    """Load one good and a few bad files, so that what Python imports once (codecs, messages) is imported."""
    for kind, seeds in (("policy", policy_seeds()), ("space", space_seeds())):
        for raw in (*seeds, b"", b"\xff", b"{", b"a: &a 1", b"schema: autoprec.policy/1\nx: 1", b'{"a": 1}'):
            fuzz.load(kind, raw)
    parse_document("{}")
    fuzz.outcomes.clear()
    fuzz.watch.events.clear()
    fuzz.slowest = 0.0


def own(fuzz: Fuzz, count: int, seed: int, bombs: float) -> None:
    """Feed mutated documents and bombs."""
    chance = random.Random(seed)
    seeds = {"policy": policy_seeds(), "space": space_seeds()}
    for index in range(count):
        kind = ("policy", "space")[index % 2]
        fuzz.load(kind, hostile(chance, seeds[kind], bombs=bombs))


def each_bomb(fuzz: Fuzz, size: int) -> None:
    """Feed every bomb below every head, at one size, to both loaders."""
    for make in BOMBS:
        for head in HEADS:
            raw = (head + make(size)).encode()
            fuzz.load("policy", raw)
            fuzz.load("space", raw)


def main() -> None:
    """Run the fuzzer; a limit of memory holds meanwhile."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bombs", type=float, default=0.02)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--each-bomb", type=int, default=0, help="instead: every bomb at this size, to both loaders")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        fuzz = Fuzz(Path(folder))
        warm(fuzz)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        if options.each_bomb:
            each_bomb(fuzz, options.each_bomb)
        else:
            own(fuzz, options.count, options.seed, options.bombs)
        print(json.dumps(fuzz.report()))


if __name__ == "__main__":
    main()
