"""What both GPU commands share: the limit, the folder, one dated file that grows with every part."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.bundle import installed  # noqa: E402
from benchmarks.gpu.turns import groups, race, table  # noqa: E402


@dataclass(frozen=True)
class Part:
    """Contenders of one model: ``small`` stands for the model in a rehearsal, ``share`` is of the time that is left."""

    title: str
    names: tuple[str, ...]
    asked: dict[str, Any] = field(default_factory=dict)
    small: str = ""
    bytes_each: float = 1e9
    share: float = 1.0


#: Of a part's time, what compiling may take.
COMPILING = 0.6


class Session:
    """One call: parses the options, installs the bundle, and writes what is measured at once.

    Args:
        name: of the command, for the dated file.
        about: its description.
        limit: seconds that a call takes at most, if ``--limit`` says nothing else.
    """

    def __init__(self, name: str, about: str, *, limit: float) -> None:
        parser = argparse.ArgumentParser(description=about.splitlines()[0])
        parser.add_argument("--limit", type=float, default=limit, help="seconds (default: %(default)s)")
        parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / f"autoprec-gpu-{name}")
        parser.add_argument("--bundle", type=Path, default=ROOT / "gpu-bundle", help="folder of `make gpu-bundle`")
        parser.add_argument("--small", action="store_true", help="tiny models on a CPU: the path, not the figures")
        asked = parser.parse_args()
        self._deadline = time.monotonic() + asked.limit
        self.small, self.out = bool(asked.small), Path(asked.out)
        self.out.mkdir(parents=True, exist_ok=True)
        if self.small:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        paths = [*installed(asked.bundle), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        sys.path[:0] = paths[:-1]
        self.device, self._free = _device(small=self.small)
        date = time.strftime("%Y-%m-%d")
        kept = self.out if self.small else ROOT / "benchmarks" / "results"
        self._file = kept / f"{date}_gpu_{name}.md"
        packages = ("torch", "triton", "torchao", "transformer_engine")
        versions = ", ".join(f"{package} {_version(package)}" for package in packages)
        rehearsal = "a rehearsal with tiny models on a CPU: these figures say nothing of a GPU"
        command = " ".join(["python", *sys.argv])
        head = [f"# {date}, {rehearsal if self.small else self.device}", ""]
        head += [f"`{command}`; Python {platform.python_version()}, {versions}", ""]
        self._file.write_text("\n".join(head))
        self.say(f"{self.device}; the table grows in {self._file}")

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._deadline - time.monotonic()

    def say(self, text: str) -> None:
        """Print a line, and keep it in the dated file."""
        print(text, flush=True)
        with self._file.open("a") as file:
            file.write(f"\n{text}\n")

    def table(self, title: str, lines: list[str]) -> None:
        """Add a table to the dated file, and print it."""
        self.say("\n".join([f"## {title}", "", *lines]))

    def race(self, part: Part) -> None:
        """Time the contenders of a part, in as many groups as fit on the device side by side."""
        asked = part.asked | ({"model": part.small} if self.small else {})
        held = groups(part.names, part.bytes_each, self._free) if not self.small else [list(part.names)]
        items = 0 if "blocks" in asked["model"] else _tokens(asked)
        end = time.monotonic() + part.share * self.left()
        for index, names in enumerate(held):
            now = time.monotonic()
            within = (end - now) / (len(held) - index)
            if within < 5.0:
                self.say(f"{part.title}: no time was left for {', '.join(names)}")
                continue
            out = self.out / asked["model"] / str(index)
            timed = race(names, asked, out, ready_by=now + COMPILING * within, until=now + 0.95 * within)
            self.table(part.title, table(timed, items))

    def close(self) -> None:
        """Say how long it took."""
        self.say(f"{self.left():.0f} s of the limit were left")


def _tokens(asked: dict[str, Any]) -> int:
    from benchmarks.gpu.train_transformer import MODELS

    shape = MODELS[asked["model"]]
    return shape.batch * shape.context * int(asked.get("micro_batches", 1))


def _device(*, small: bool) -> tuple[str, float]:
    """Return the device's name and its free bytes; leaves with a sentence where there is no GPU."""
    if small:
        return platform.processor() or platform.machine(), 0.0
    code = "import torch; print(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0], sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit("no GPU that torch can use: nothing was run (--small rehearses on a CPU)")
    name, free = done.stdout.split("\n")[:2]
    return name, float(free)


def _version(name: str) -> str:
    return next((found.version for found in metadata.distributions(name=name, path=sys.path)), "absent")
