"""Does ``autoprec check --numerics`` name a wrong kernel, and nothing else?

    python benchmarks/numerics/kernel_faults.py [--write]

Faults are put into the execution of one layer and GEMM of a model, each as a kernel's author would make it; the check
must name that layer and GEMM first. Clean models, each as this CPU really runs it, must pass. ``--write`` keeps the
tables as ``benchmarks/results/DATE_kernel_faults.md``.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from autoprec.applying.policy import TorchPolicy  # noqa: E402
from autoprec.applying.raw_weights import unit_execution  # noqa: E402
from autoprec.applying.units import tunable_units  # noqa: E402
from autoprec.numerics.linear import LinearExecution  # noqa: E402
from autoprec.numerics.operand import QuantizedOperand  # noqa: E402
from autoprec.numerics.plan import GemmStep, Multiply  # noqa: E402
from autoprec.numerics.scaling import DelayedScale  # noqa: E402
from autoprec.policy import policy_from_dict  # noqa: E402
from autoprec.trial.inside.checking.gemm_check import GemmCheck  # noqa: E402
from benchmarks.graph.zoo import MODELS, Built  # noqa: E402

RECIPES: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int8 tensor": {"format": "int8", "scaling": {"granularity": "tensor"}},
    "int8 stochastic": {"format": "int8", "stochastic_rounding": True},
    "fp8": {"format": "fp8"},
    "fp8 row": {"format": "fp8", "scaling": {"granularity": "row"}},
    "fp8 block": {"format": "fp8", "scaling": {"granularity": "block"}},
    "fp8 delayed": {"format": "fp8", "scaling": {"scale": "delayed", "amax_compute_algo": "most_recent"}},
    "fp8 hybrid": {"format": "fp8", "operands": {"grad_output": "e5m2"}},
    "mxfp8": {"format": "mxfp8"},
    "nvfp4": {"format": "nvfp4", "hadamard": True, "stochastic_rounding": True, "weight_2d": True},
    "bf16": {"format": "bf16"},
    "bf16 -> fp32": {"format": "bf16", "output": "fp32"},
    "fp16": {"format": "fp16"},
    "fp32": {"format": "fp32"},
}
Product = Callable[[QuantizedOperand, QuantizedOperand], Tensor]


class Perceptron(nn.Module):
    """Three layers, two of them of one shape; sizes need not be multiples of anything."""

    def __init__(self, width: int, outer: int = 0) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, outer)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.second(torch.relu(self.first(x))) + x)
        return self.third(h).square().mean()


def perceptron(rows: int, width: int, outer: int) -> Callable[[], Built]:
    """Return what builds a perceptron and its batch."""
    return lambda: (Perceptron(width, outer), {"x": torch.randn(rows, width)})


def checked(
    build: Callable[[], Built],
    recipe: str,
    *,
    activations: str = "keep",
    backend: str = "auto",
    steps: int = 2,
    spoil: Callable[[nn.Module], None] | None = None,
) -> dict[str, Any]:
    """Train a model for some steps under one recipe; return what the check reports."""
    torch.manual_seed(0)
    model, inputs = build()
    document = {
        "schema": "autoprec.policy/1", "recipes": {"it": RECIPES[recipe]}, "default": "it", "activations": activations,
    }  # fmt: skip
    document["layers"] = [{"match": name, "recipe": "keep"} for name, unit in tunable_units(model).items()
                          if unit.kind in ("conv", "recurrent")]  # fmt: skip
    policy = policy_from_dict(document, cls=TorchPolicy)
    policy.apply(model, backend=backend)
    if spoil is not None:
        spoil(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    check = GemmCheck(model)
    try:
        for step in range(steps):
            batch = {key: value * (1 + step) if value.is_floating_point() else value for key, value in inputs.items()}
            optimizer.zero_grad()
            model(**batch).backward()
            optimizer.step()
    finally:
        found = check.end()
    return found


# ---------------------------------------------------------------------------- faults
def execution(model: nn.Module, layer: str) -> LinearExecution:
    found = unit_execution(tunable_units(model)[layer])
    assert isinstance(found, LinearExecution)
    return found


def in_product(layer: str, gemm: str, change: Callable[[Product, QuantizedOperand, QuantizedOperand], Tensor]) -> Any:
    """Return what puts a fault into the product of one GEMM of a layer."""

    def spoil(model: nn.Module) -> None:
        run = execution(model, layer)

        def wrong(steps: Any) -> Any:
            step: GemmStep = getattr(steps, gemm)
            real: Multiply = step.multiply

            def multiply(a: QuantizedOperand, b: QuantizedOperand, step: GemmStep, dtype: torch.dtype) -> Tensor:
                return change(lambda left, right: real(left, right, step, dtype), a, b)

            return replace(steps, **{gemm: replace(step, multiply=multiply)})

        run.compiled = {key: wrong(steps) for key, steps in run.compiled.items()}

    return spoil


def wrong_store(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """One tile of 8 x 8 is stored where its neighbour belongs."""
    out = real(a, b).clone()
    out[8:16, 8:16] = out[8:16, 0:8]
    return out


def swapped_scale(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """Two columns are multiplied by each other's scale."""
    assert b.scale is not None
    order = torch.arange(b.scale.numel())
    order[:2] = order[:2].flip(0)
    return real(a, replace(b, scale=b.scale.flatten()[order].view(b.scale.shape)))


def transposed(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """A square weight is read by columns."""
    return real(a, replace(b, codes=b.codes.t()))


def row_off_by_one(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """Every row is stored one too far down."""
    return real(a, b).roll(1, 0)


def one_scale_for_all(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """A tensor's scale is used where each row has its own."""
    assert a.scale is not None
    return real(replace(a, scale=a.scale.amax().expand_as(a.scale).contiguous()), b)


def short_sum(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """Sums end at a multiple of 16: the rest of K is left out."""
    codes = a.codes.clone()
    codes[:, codes.shape[1] // 16 * 16 :] = 0
    return real(replace(a, codes=codes), b)


def twice(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """The result is added to a buffer that holds it already."""
    return real(a, b) * 2


def not_a_number(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """One value was never written, and what was there is NaN."""
    out = real(a, b).clone()
    out[3, 5] = torch.nan
    return out


def bf16_sums(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """Partial sums over halves of K are rounded to bfloat16 before they are added."""
    halves = [a.codes.clone(), a.codes.clone()]
    middle = a.codes.shape[1] // 2
    halves[0][:, middle:], halves[1][:, :middle] = 0, 0
    first, second = (real(replace(a, codes=codes), b) for codes in halves)
    return (first.bfloat16() + second.bfloat16()).to(first.dtype)


def one_product_less(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """One product of one row's sums is missing."""
    codes = a.codes.clone()
    codes[0, a.codes[0].to(torch.float32).abs().argmax()] = 0
    return real(replace(a, codes=codes), b)


def stale_weight() -> Callable[[Product, QuantizedOperand, QuantizedOperand], Tensor]:
    """Dgrad multiplies by the codes that the weight had in the first step."""
    first: list[QuantizedOperand] = []

    def change(real: Product, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
        first.append(b)
        return real(a, first[0])

    return change


def without_bias(layer: str) -> Any:
    """The epilogue does not add the bias."""

    def spoil(model: nn.Module) -> None:
        bias = model.get_submodule(layer).bias
        in_product(layer, "fprop", lambda real, a, b: real(a, b) - bias.detach())(model)

    return spoil


class Stale(DelayedScale):
    """Learns from the first amax only."""

    __slots__ = ()

    def learn(self, amax: Tensor) -> None:
        if self.history is None or not self.history.any():
            super().learn(amax)


def stale_scale(layer: str) -> Any:
    """The scale of the weight is that of the first step for ever."""

    def spoil(model: nn.Module) -> None:
        run = execution(model, layer)
        for operand, spec in run.delayed_operands().values():
            if operand == "weight":
                run.quantizers.history(operand, spec).__class__ = Stale

    return spoil


@dataclass
class Truncating:
    """Casts whose conversion cuts off instead of rounding, of one operand."""

    real: Any
    operand: str

    def pair(self, x: Tensor, first: Any, second: Any, operand: str) -> Any:
        made = self.real.pair(x, first, second, operand)
        return tuple(map(self.cut, made, (x, x))) if operand == self.operand else made

    def cut(self, made: QuantizedOperand | None, x: Tensor) -> QuantizedOperand | None:
        return None if made is None else replace(made, codes=(x / made.scale).trunc().clamp(-127, 127).to(torch.int8))


def truncation(layer: str, operand: str) -> Any:
    def spoil(model: nn.Module) -> None:
        run = execution(model, layer)
        run.casts = Truncating(run.casts, operand)

    return spoil


_ODD = perceptron(33, 75, 20)
#: What is wrong, in which model, recipe, backend, layer and GEMM, and how it comes there.
Fault = tuple[str, Callable[[], Built], str, str, str, str, Any]


def faults() -> list[Fault]:
    """Return the faults; each names the layer and GEMM that must be found first."""
    gpt, mlp, wide = MODELS["GPT tied"], perceptron(48, 64, 32), perceptron(64, 1024, 96)
    layer = next(name for name in tunable_units(gpt()[0]) if name.endswith(".fc"))
    product = [
        ("a tile stored in the wrong place", gpt, "int8", "auto", layer, "fprop", wrong_store),
        ("two columns' scales swapped", mlp, "int8", "auto", "second", "fprop", swapped_scale),
        ("a square weight transposed", mlp, "int8 tensor", "auto", "second", "dgrad", transposed),
        ("rows off by one", gpt, "int8 tensor", "auto", layer, "dgrad", row_off_by_one),
        ("one scale for all rows", gpt, "int8", "auto", layer, "wgrad", one_scale_for_all),
        ("the rest of K beyond a multiple of 16 left out", _ODD, "fp8 row", "native", "third", "fprop", short_sum),
        ("wgrad added to itself", MODELS["one layer called 3x"], "int8", "auto", "", "wgrad", twice),
        ("dgrad with the last step's weight", wide, "fp8", "auto", "second", "dgrad", stale_weight()),
        ("NaN written", gpt, "fp8 row", "native", layer, "wgrad", not_a_number),
        ("partial sums rounded to bf16", wide, "int8", "auto", "second", "fprop", bf16_sums),
        ("one of 1,024 products missing, in one row", wide, "fp8 row", "auto", "first", "fprop", one_product_less),
    ]
    found: list[Fault] = []
    for what, build, recipe, backend, name, gemm, change in product:
        name = name or next(iter(tunable_units(build()[0])))
        found.append((what, build, recipe, backend, name, gemm, in_product(name, gemm, change)))
    return [
        *found,
        ("the bias left out", mlp, "int8", "auto", "second", "fprop", without_bias("second")),
        ("a delayed scale that stays", mlp, "fp8 delayed", "auto", "second", "fprop", stale_scale("second")),
        ("codes cut off, not rounded", gpt, "int8", "auto", layer, "dgrad", truncation(layer, "grad_output")),
    ]


def clean() -> list[tuple[str, Callable[[], Built], dict[str, Any]]]:
    """Return models in which nothing is wrong, by architecture, recipe, width and autocast."""
    found: list[tuple[str, Callable[[], Built], dict[str, Any]]] = []
    names = list(RECIPES)
    for index, (name, build) in enumerate(MODELS.items()):
        for recipe in (names[index % len(names)], names[(index + 5) % len(names)]):
            autocast = index % 2 and name != "custom autograd function"  # which autocast breaks
            found.append((name, build, {"recipe": recipe, "activations": "bf16" if autocast else "keep"}))
    for rows, width, outer in ((17, 33, 5), (1, 64, 16), (256, 256, 1000), (64, 4096, 24), (1024, 48, 16)):
        for recipe in ("int8", "int8 tensor", "bf16"):
            made = perceptron(rows, width, outer)
            found.append((f"perceptron {rows} x {width} x {outer}", made, {"recipe": recipe}))
    for recipe in ("fp8", "fp8 row", "fp8 delayed", "fp8 hybrid"):
        for activations in ("keep", "bf16"):
            options = {"recipe": recipe, "backend": "native", "activations": activations, "steps": 4}
            found.append(("perceptron 48 x 64 x 32, torch._scaled_mm", perceptron(48, 64, 32), options))
    return found


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep the tables as a dated file")
    write = parser.parse_args().write
    warnings.simplefilter("ignore")
    rows, named = [], 0
    for what, build, recipe, backend, layer, gemm, spoil in faults():
        report = checked(build, recipe, backend=backend, spoil=spoil, steps=3)
        first = report.findings[0] if report.findings else {}
        right = (first.get("layer"), first.get("gemm")) == (layer, gemm)
        others = {f"{row['gemm']} of {row['layer']}" for row in report.findings} - {f"{gemm} of {layer}"}
        right = right and all(other.endswith(f" of {layer}") for other in others)  # an operand serves two GEMMs
        named += right
        size = " x ".join(str(first.get(key, "-")) for key in "mnk")
        said = f"{first.get('code', 'nothing')}: {gemm} of {first.get('layer')}" if first else "nothing"
        rows.append((what, recipe, f"{gemm} of {layer}", said, size, str(first.get("wrong", "-")),
                     ", ".join(sorted(others)), "yes" if right else "**no**"))  # fmt: skip
        print(*rows[-1], sep=" | ", flush=True)
    passed, worst, models = [], 0.0, clean()
    for what, build, options in models:
        report = checked(build, **options)
        most = max((row["worst"] for row in report.gemms), default=0.0)
        worst = max(worst, most)
        said = (
            "clean" if report.ok else "**" + "; ".join(f"{f['gemm']} of {f['layer']}" for f in report.findings) + "**"
        )
        count = len(report.gemms)
        passed.append((what, ", ".join(str(value) for value in options.values()), str(count), f"{most:.2f}", said))
        print(*passed[-1], sep=" | ", flush=True)
    alarms = sum(row[-1] != "clean" for row in passed)
    empty = sum(row[2] == "0" for row in passed)
    gemms = sum(int(row[2]) for row in passed)
    summary = (
        f"{named} of {len(rows)} faults named, first, with the right layer and GEMM, and no other layer. "
        f"{alarms} false alarms over {len(models)} clean models: {gemms} GEMMs, at most {worst:.2f} of their bound; "
        f"{empty} of the models have no GEMM that is compared."
    )
    print(summary)
    if write:
        heads = ("fault", "recipe", "put into", "first finding", "M x N x K", "values wrong", "others named", "named")
        ours = ("model", "recipe and options", "GEMMs", "worst, of the bound", "found")
        date = datetime.date.today().isoformat()
        text = (
            "# Injected kernel faults, and clean models\n\n`python benchmarks/numerics/kernel_faults.py --write`\n\n"
            f"torch {torch.__version__}, on a CPU; {date}. INT8 runs by this machine's integer units, FP8 with backend "
            "native by `torch._scaled_mm`, other 8-bit recipes emulated.\n\n"
            f"{summary}\n\n{_table(heads, rows)}\n{_table(ours, passed)}"
        )
        (ROOT / "benchmarks/results" / f"{date}_kernel_faults.md").write_text(text, encoding="utf-8")
    return int(named < len(rows) or alarms > 0)


if __name__ == "__main__":
    raise SystemExit(main())
