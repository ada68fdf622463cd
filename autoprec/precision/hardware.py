"""Target hardware as frozen data: dense peaks, memory, links, and what each architecture can multiply, with sources.

The figures live in ``targets.yaml`` beside this file; a user adds GPUs with a file of the same shape.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from autoprec.errors import UnknownNameError, UsageError
from autoprec.precision.recipes import OPERANDS, Recipe
from autoprec.support.files import read_document
from autoprec.support.validation import Frozen, validated

SCHEMA = "autoprec.targets/1"

_ALWAYS = ("fp32", "tf32", "bf16", "fp16")
#: family -> every GEMM dimension must be a multiple of this (Transformer Engine's and torch._scaled_mm's run-time
#: checks: 16 bytes per row for 8 bits, whole blocks for block scaling, 32 for MX).
_ALIGNMENT = {
    "fp8_tensor": 16,
    "fp8_delayed": 16,
    "fp8_row": 16,
    "fp8_block": 128,
    "mxfp8": 32,
    "nvfp4": 32,
    "int8": 16,
}
#: Share of a device's memory that a step may be modelled to need. Published runs reserved up to 1.16 times what is
#: modelled as allocated (docs/cost-model.md): fragments, workspaces and buffers of communication.
FITS = 0.86
#: Recipe families: what decides which kernel runs and what quantising costs.
FAMILIES = (*_ALWAYS, *_ALIGNMENT)
#: feature flag of a CPU -> its unit that multiplies bf16
_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16", "bf16": "FEAT_BF16", "svebf16": "SVE_BF16"}
#: feature flag of a CPU -> its unit that multiplies int8 without an overflow in 16 bits
_INT8_UNITS = {
    "amx_int8": "AMX",
    "avx512_vnni": "AVX512_VNNI",
    "avx_vnni": "AVX_VNNI",
    "i8mm": "I8MM",
    "asimddp": "DOTPROD",
}
#: unit -> what ``ONEDNN_MAX_CPU_ISA`` must at least allow, in the order of oneDNN's instruction sets
_ISAS = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16")
_UNIT_ISA = {"AVX_VNNI": "AVX2_VNNI", "AVX512_VNNI": "AVX512_CORE_VNNI", "AVX512_BF16": "AVX512_CORE_BF16"}


def recipe_family(recipe: Recipe) -> str:
    """Return the family (one of :data:`FAMILIES`) of a recipe."""
    if recipe.format != "fp8":
        return recipe.format
    scaling = recipe.scaling
    if scaling is None or scaling.scale == "delayed":
        return "fp8_delayed" if scaling is not None else "fp8_tensor"
    return f"fp8_{scaling.granularity}"


def alignment(family: str) -> int:
    """Return what M, K and N must be a multiple of for a GEMM of this family on a GPU."""
    return _ALIGNMENT.get(family, 1)


#: kind of grouped GEMM -> the compute capability it runs on, and its name
_GROUPED = {"row": ((9, 0), "FP8"), "mxfp8": ((10, 0), "MXFP8")}


def grouped_refusal(recipe: Recipe, capability: tuple[int, int] | None) -> str:
    """Return why torch has no grouped GEMM (3-D weights of experts) for a recipe on an NVIDIA GPU, or nothing.

    ``_scaled_grouped_mm`` takes E4M3 with a scale for each row, or as MXFP8; torch's own tests of these (2.11 and 2.13)
    run on compute capability 9.0 and 10.0 alone. ``capability`` None: on whichever GPU has one.
    """
    what = recipe.describe()
    if recipe.output == "fp32":
        return f"no grouped GEMM runs {what}: what it returns is rounded to 16 bits"
    if not recipe.scaled:
        return "" if recipe.format == "bf16" else f"no grouped GEMM runs {what}: torch groups bf16, FP8 and MXFP8"
    kind = recipe.scaling.granularity if recipe.format == "fp8" and recipe.scaling is not None else recipe.format
    if kind not in _GROUPED:
        return f"no grouped GEMM runs {what}: torch's takes FP8 with a scale for each row, or MXFP8"
    if {recipe.operand_format(operand) for operand in OPERANDS} != {"e4m3"}:
        return f"torch's grouped GEMM multiplies E4M3 by E4M3 only: {what} has E5M2"
    needed, name = _GROUPED[kind]
    if capability not in (None, needed):
        here = f"this is {capability[0]}.{capability[1]}" if capability > (0, 0) else "this device has none"
        return f"torch's grouped {name} GEMM runs on compute capability {needed[0]}.{needed[1]} only, {here}"
    return ""


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether something can run, why (not), and which toolkit it needs; a "no" is false."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    ok: bool
    reason: str = ""
    needs: str = ""

    def __bool__(self) -> bool:
        return self.ok


_PEAKS = ("fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4", "int8")
_Positive = Annotated[float, Field(gt=0)]
#: What a file has in GB or GB/s.
_Giga = Annotated[float, Field(gt=0), AfterValidator(lambda value: value * 1e9)]


def _known_peaks(peaks: Mapping[str, float]) -> Mapping[str, float]:
    if unknown := sorted(peaks.keys() - set(_PEAKS)):
        raise ValueError(f"no peak is of '{unknown[0]}', only of {', '.join(_PEAKS)}")
    if "bf16" not in peaks:
        raise ValueError("bf16 is missing, which every policy is compared with")
    return peaks


def _both_or_none(links: Mapping[str, float]) -> Mapping[str, float]:
    if links.keys() not in (set(), {"scale_up", "scale_out"}):
        raise ValueError("give scale_up and scale_out, or neither: links: {}")
    return links


@dataclass(frozen=True, kw_only=True)
class Target:
    """One device the cost model knows, as it is written in a file, whose amounts are in GB.

    Attributes:
        peaks: dense TFLOP/s by format (fp32, tf32, bf16, fp16, fp8, mxfp8, nvfp4, int8), FP32 accumulation.
        units: streaming multiprocessors or compute units (how many GEMM tiles run at once).
        memory_bytes, bandwidth: bytes, and bytes per second.
        links: bytes per second, per GPU and direction: ``scale_up`` inside a node, ``scale_out`` between nodes.
        layouts: copies an 8-bit operand needs that is used along both its dimensions (2 where the GEMM takes
            operands contiguous along K only).
        recipes: family -> :class:`Capability`; these and ``layouts`` are those of the architecture.
        source, date: where the figures come from, and their date.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    name: str = ""
    title: str
    vendor: Annotated[str, Field(pattern="^(nvidia|amd|other)$")]  # cpu: this machine
    architecture: str
    capability: str
    peaks: Annotated[Mapping[str, _Positive], AfterValidator(_known_peaks)]
    units: Annotated[int, Field(gt=0)]
    memory_bytes: Annotated[int, Field(alias="memory", gt=0), BeforeValidator(lambda gb: int(float(gb) * 1e9))]
    bandwidth: _Giga
    links: Annotated[Mapping[str, _Giga], AfterValidator(_both_or_none)]
    layouts: int = 1
    recipes: Mapping[str, Capability] = field(default_factory=dict)
    match: tuple[str, ...] = ()
    source: str
    date: str
    notes: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """Bytes that a step may be modelled or measured to need here: the device's, less a margin."""
        return int(FITS * self.memory_bytes)

    @property
    def is_cpu(self) -> bool:
        """True for the machine at hand used as a training device."""
        return self.vendor == "cpu"

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number of an NVIDIA GPU; (0, 0) of what has none."""
        major, _, minor = self.capability.partition(".")
        return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)

    def peak(self, family: str) -> float:
        """Return the dense peak of a family in FLOP/s; 0.0 when the device does not multiply it."""
        fmt = "fp8" if family.startswith("fp8_") else family
        return float(self.peaks.get(fmt, 0.0)) * 1e12

    def can_run(self, recipe: Recipe | None) -> Capability:
        """Say whether this device multiplies a recipe (``None``, keep, always does)."""
        if recipe is None:
            return Capability(True)
        family = recipe_family(recipe)
        if self.is_cpu and family == "bf16" and cpu_bf16_units() == ():
            return Capability(
                False, "this CPU has no bf16 instructions: its bf16 GEMMs are many times slower than fp32"
            )
        if family in _ALWAYS:
            if self.is_cpu or self.peak(family):
                return Capability(True)
            return Capability(False, f"{self.title} has no {family} peak in the table")
        found = self.recipes.get(family, Capability(False, f"{self.title} lists no {family}"))
        if (
            family == "nvfp4"
            and self.architecture == "blackwell-rtx"
            and (recipe.hadamard or recipe.stochastic_rounding)
        ):
            return Capability(False, "no Hadamard transform or stochastic rounding on capability 12: use nvfp4_plain")
        if found.ok and not self.is_cpu and not self.peak(family):
            return Capability(False, f"{self.title} has no {family} peak in the table")
        return found

    def multiple(self, family: str) -> int:
        """Return what M, K and N must be a multiple of for a GEMM of this family here; emulation takes any size."""
        return 1 if self.is_cpu else alignment(family)

    def to_json(self) -> dict[str, Any]:
        """Return the row ``autoprec doctor --targets --json`` prints."""
        row = asdict(self)
        for name, about in row["recipes"].items():
            about["multiple_of"] = self.multiple(name)
        units = {"peaks": "peaks_tflops", "bandwidth": "bandwidth_bytes_per_s", "links": "links_bytes_per_s"}
        row = {units.get(key, key): value for key, value in row.items() if key != "match"}
        return row | {"notes": list(self.notes)}


_Family = Literal["fp8_tensor", "fp8_delayed", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "int8"]


class _Architecture(Frozen):
    source: str
    layouts: int = Field(1, ge=1, le=2)
    recipes: dict[_Family, Capability]


class _Table(Frozen):
    schema_: Literal["autoprec.targets/1"] = Field(alias="schema")
    sources: dict[str, str] = Field(default_factory=dict)
    architectures: dict[str, _Architecture] = Field(default_factory=dict)
    targets: dict[str, Target]


def _build(table: _Table, architectures: Mapping[str, _Architecture], sources: Mapping[str, str]) -> dict[str, Target]:
    out: dict[str, Target] = {}
    for name, entry in table.targets.items():
        if entry.architecture not in architectures:
            raise UnknownNameError("architecture", entry.architecture, architectures, where=f"targets.{name}")
        family = architectures[entry.architecture]
        recipes = {str(key): value for key, value in family.recipes.items()}
        source = sources.get(entry.source, entry.source)
        out[name] = replace(entry, name=name, layouts=family.layouts, recipes=recipes, source=source)
    return out


@lru_cache(maxsize=1)
def _packaged() -> _Table:
    return _Table.model_validate(read_document(Path(__file__).with_name("targets.yaml")))


def load_targets(path: Path | str) -> dict[str, Target]:
    """Read a user's own targets from a YAML or JSON file; packaged architectures and sources may be named.

    Raises:
        FileError: missing, unreadable, or not valid.
        UnknownNameError: an architecture nobody knows.
    """
    table, base = validated(_Table, read_document(path), where=str(path), about="targets"), _packaged()
    return _build(table, {**base.architectures, **table.architectures}, {**base.sources, **table.sources})


@lru_cache(maxsize=8)
def cpu_flags(cpuinfo: Path | str = "/proc/cpuinfo") -> tuple[str, ...]:
    """Return the feature flags of this CPU, read once; nothing where they cannot be read."""
    try:
        lines = Path(cpuinfo).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    flags = (line.partition(":")[2].split() for line in lines if re.match(r"(flags|Features)\s*:", line))
    return tuple(next(flags, ()))


def _units(names: Mapping[str, str], cpuinfo: Path | str) -> tuple[str, ...] | None:
    flags = cpu_flags(cpuinfo)
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    allowed = _ISAS[: _ISAS.index(most) + 1] if most in _ISAS else (*_ISAS, "")
    if most == "AVX512_CORE":  # its own kernels, without VNNI, go before those of AVX2 with it
        allowed = tuple(isa for isa in allowed if "VNNI" not in isa)
    found = (unit for flag, unit in names.items() if flag in flags)
    return tuple(unit for unit in found if _UNIT_ISA.get(unit, "") in allowed) if flags else None


def cpu_bf16_units(cpuinfo: Path | str = "/proc/cpuinfo") -> tuple[str, ...] | None:
    """Return the units that multiply bf16 in this CPU, by its feature flags; None where they cannot be read.

    AVX512-BF16, AMX-BF16 (x86) and FEAT_BF16 (ARM) do, where ``ONEDNN_MAX_CPU_ISA`` lets oneDNN use them. With none of
    them, a library widens every bf16 operand to fp32 first, which is several times slower than fp32 itself.
    """
    return _units(_BF16_UNITS, cpuinfo)


def cpu_int8_units(cpuinfo: Path | str = "/proc/cpuinfo") -> tuple[str, ...] | None:
    """Return the units that multiply int8 in this CPU, as :func:`cpu_bf16_units`; none on one that has AVX2 alone."""
    return _units(_INT8_UNITS, cpuinfo)


def cpu_instructions() -> str:
    """Return what this CPU multiplies int8 and bf16 with, for the evidence of a policy; nothing where it is unknown."""
    int8, bf16 = cpu_int8_units(), cpu_bf16_units()
    if int8 is None or bf16 is None:
        return ""
    return f"int8: {', '.join(int8) or 'none'}; bf16: {', '.join(bf16) or 'none'}"


def cores() -> int:
    """Return how many cores this process may run on: those it is bound to, where the system tells (macOS does not)."""
    bound = getattr(os, "sched_getaffinity", None)
    return len(bound(0)) if bound is not None else os.cpu_count() or 1


def free_bytes(meminfo: Path | str = "/proc/meminfo", group: Path | str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes that a process can still have on this machine, within its control group; None: unknown."""
    known = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path(meminfo).read_text(encoding="utf-8").splitlines()
        known.append(1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")))
    with contextlib.suppress(OSError, ValueError):  # "max" is not a number: there is no limit
        most, used = (int((Path(group) / f"memory.{name}").read_text()) for name in ("max", "current"))
        known.append(max(0, most - used))
    return min(known, default=None)


def limit_bytes(device: Target, has: int = 0) -> int:
    """Return the bytes that a step may be modelled or measured to need: the device's, less a margin.

    Args:
        has: what the device at hand has in all, which may be more or less than the table says; 0 in a rehearsal. Of a
            CPU it is what the machine has left.
    """
    has = free_bytes() or 0 if device.is_cpu else has
    return int(FITS * (has or device.memory_bytes))


def _cpu() -> Target:
    """Return this machine as a target; its rates are measured, not looked up (:mod:`autoprec.cost.device.cpu`)."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Target(
        name="cpu",
        title="this machine's CPU",
        vendor="cpu",
        architecture="cpu",
        capability="",
        peaks={},
        units=os.cpu_count() or 1,
        memory_bytes=int(pages),
        bandwidth=0.0,
        links={},
        layouts=1,
        recipes={str(key): value for key, value in _packaged().architectures["cpu"].recipes.items()},
        source="three products are timed on this machine when a search begins",
        date="",
    )


@lru_cache(maxsize=1)
def _targets() -> Mapping[str, Target]:
    base = _packaged()
    return {**_build(base, base.architectures, base.sources), "cpu": _cpu()}


#: The packaged table, read when it is first asked for (importing this module reads no file).
TARGETS: Mapping[str, Target]


def __getattr__(name: str) -> Mapping[str, Target]:
    if name != "TARGETS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _targets()


def named(name: str, table: Mapping[str, Target], *, where: str = "") -> Target:
    """Return a target of a table by name, case-insensitively.

    Args:
        name: in any case.
        table: targets by name.
        where: file or option that said so, for the message.

    Raises:
        UnknownNameError: with the nearest valid name.
    """
    found = table.get(name) or next((entry for key, entry in table.items() if key.lower() == name.lower()), None)
    if found is None:
        raise UnknownNameError("target", name, table, where=where)
    return found


def target(name: str) -> Target:
    """Return a packaged target by name, case-insensitively, or one from ``FILE.yaml`` / ``FILE.yaml:name``.

    Raises:
        UnknownNameError: with the nearest valid name.
        UsageError: a file of several targets, and none is named.
        FileError: the file is missing or not valid.
    """
    path, _, inside = name.partition(":")
    if path.endswith((".yaml", ".yml", ".json")):
        own = load_targets(path)
        if inside:
            return named(inside, own, where=path)
        if len(own) != 1:
            listed = ", ".join(f"{path}:{key}" for key in own) or "describe one under `targets:`"
            raise UsageError(f"holds {len(own)} targets, and none is named", where=path, fix=listed)
        return next(iter(own.values()))
    return named(name, _targets())


def by_device_name(device: str) -> Target | None:
    """Return the packaged target of a device name as CUDA or ROCm prints it, or None; the longest match wins.

    Whole words are compared (an ``RTX A1000`` is not an ``A100``), a laptop's GPU is never the desktop's, and a MIG
    slice is not the whole card.
    """
    words = set(re.findall(r"[A-Za-z0-9]+", device))
    if words & {"Laptop", "MIG"}:
        return None
    fitting = [
        (len(pattern), entry)
        for entry in _targets().values()
        for pattern in entry.match
        if words >= set(pattern.split())
    ]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None
