"""Whether a GPU was in a state in which times mean something: clocks, throttling, and who else uses it.

Read with ``nvidia-smi`` right after the last timed step, while the clocks are still those of the run, and compared
with what was read before the first: a trial on a throttled or shared GPU is slower for reasons no policy has.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Fields of ``nvidia-smi --query-gpu``, in the order of :class:`Conditions`. Drivers before 535 call the reasons
#: ``clocks_throttle_reasons``, which newer ones still accept.
QUERY = (
    "clocks.sm",
    "clocks.max.sm",
    "temperature.gpu",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
)
_REASONS = ("hardware slowdown", "hardware thermal slowdown", "software thermal slowdown", "power brake")

#: Memory of other processes that may come or go during a trial (a context of the host process, a desktop).
FOREIGN_MEMORY = 1 << 30
#: The SM clock may lie this far below its maximum: power capping lowers it by 10 to 20 % in long GEMMs.
LOWEST_CLOCK = 0.6
#: Clock cycles that keep the GPU busy while the driver is asked, again and again until it has answered: about 10 ms.
_SPIN = 20_000_000
#: More than this share of the timed steps may not have been compiling.
COMPILING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of a GPU at one moment.

    Attributes:
        clock, highest_clock: SM clock and its maximum, MHz; 0 where the driver does not say.
        temperature: degrees Celsius.
        slowed: why the hardware or driver holds the clocks down; power capping, which is normal, is not among them.
        foreign_memory: bytes that other processes hold on the device.
    """

    clock: float = 0.0
    highest_clock: float = 0.0
    temperature: float = 0.0
    slowed: tuple[str, ...] = ()
    foreign_memory: int = 0

    @classmethod
    def parse(cls, line: str, foreign_memory: int = 0) -> Conditions:
        """Read one line of ``nvidia-smi --format=csv,noheader,nounits``; what it does not say stays 0."""
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(QUERY):
            return cls(foreign_memory=foreign_memory)
        numbers = [float(cell) if cell.replace(".", "", 1).isdigit() else 0.0 for cell in cells[:3]]
        slowed = tuple(why for why, cell in zip(_REASONS, cells[3:], strict=True) if cell == "Active")
        return cls(numbers[0], numbers[1], numbers[2], slowed, foreign_memory)


def ask_driver(fields: Sequence[str], gpu: str = "") -> str:
    """Return the line that ``nvidia-smi`` has about one GPU (the first by default); empty where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    command += ["-i", gpu] if gpu else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


def read_conditions(device: torch.device) -> Conditions | None:
    """Return the state of a CUDA device now (some 20 ms, and more beside other GPUs); None for other devices."""
    if device.type != "cuda":
        return None
    import torch

    foreign = foreign_memory(device)
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if not uuid:  # memory alone still tells of company
        return Conditions(foreign_memory=foreign)
    with ThreadPoolExecutor(1) as threads:
        line = threads.submit(ask_driver, QUERY, f"GPU-{uuid}")
        while not line.done():  # an idle GPU lowers its clock at once, and the driver would tell of that
            torch.cuda._sleep(_SPIN)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)
        return Conditions.parse(line.result(), foreign)


def foreign_memory(device: torch.device) -> int:
    """Return the bytes of a GPU that PyTorch's allocator in this process does not hold."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def unreliable(before: Conditions | None, after: Conditions | None) -> str:
    """Return why times taken between two readings are not to be trusted; empty when they are."""
    if before is None or after is None:
        return ""
    if after.slowed:
        return f"the GPU was throttled ({', '.join(after.slowed)}, {after.temperature:.0f} degrees)"
    if after.highest_clock and after.clock < LOWEST_CLOCK * after.highest_clock:
        return f"the GPU ran at {after.clock:.0f} of {after.highest_clock:.0f} MHz"
    moved = after.foreign_memory - before.foreign_memory
    if abs(moved) > FOREIGN_MEMORY:
        what = "took" if moved > 0 else "gave back"
        return f"another process {what} {abs(moved) / 2**30:.1f} GiB of the GPU during the trial"
    return ""


def still_compiling(graphs: Sequence[int], warmup: int) -> str:
    """Return why a trial's times are mostly compilation; empty when the timed steps ran what was compiled.

    Args:
        graphs: how many were compiled before the first step, and after each.
        warmup: steps that are not timed.
    """
    timed = [after > before for before, after in pairwise(graphs)][warmup:]
    if sum(timed) > COMPILING_SHARE * max(len(timed), 1):
        return f"torch.compile was at work in {sum(timed)} of {len(timed)} timed steps (changing shapes?)"
    return ""
