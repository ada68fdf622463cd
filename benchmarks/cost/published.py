"""What others have measured and published, and what the model says to the same question.

``published.yaml`` holds the tables with attribution; rows marked ``fit`` were used to choose the default rates, rows
marked ``score`` were not. ``benchmarks/cost/cost_model.py`` prints both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoprec.cost.kernels import gemm_seconds, layer_cost, operand_cast
from autoprec.cost.model import CostModel
from autoprec.cost.rates import Rates, default_rates
from autoprec.cost.scale import GemmWork
from autoprec.graph.report import GemmCall, GraphReport, Layer, Operator
from autoprec.policy.schema import LayerPlan
from autoprec.precision.hardware import Target, target
from autoprec.precision.recipes import BUILTIN_RECIPES, Recipe
from autoprec.support.files import read_document
from benchmarks.cost.decoder import PRESETS, decoder_report

__all__ = ["Row", "evaluate", "family_plan", "published", "published_target"]

_RECIPES: dict[str, Recipe] = {
    "bf16": BUILTIN_RECIPES["bf16"],
    "fp8_tensor": BUILTIN_RECIPES["fp8_tensorwise"],
    "fp8_delayed": BUILTIN_RECIPES["fp8_delayed"],
    "fp8_row": BUILTIN_RECIPES["fp8_rowwise"],
    "fp8_block": BUILTIN_RECIPES["fp8_block"],
    "mxfp8": BUILTIN_RECIPES["mxfp8"],
    "nvfp4": BUILTIN_RECIPES["nvfp4"],
}


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure beside the modelled one.

    ``kind`` is ms (a time), speedup (over bf16), sign, size (bytes) or memory (over bf16); ``use`` is fit or score.
    """

    target: str
    what: str
    family: str
    kind: str
    use: str
    source: str
    published: float
    modelled: float

    @property
    def error(self) -> float:
        """Relative error of a time or size; difference of a ratio over bf16; 0 or 1 of a sign."""
        if self.kind in ("ms", "size"):
            return self.modelled / self.published - 1.0
        if self.kind == "sign":
            return float((self.modelled > 1.0) != (self.published > 0))
        return self.modelled - self.published


@lru_cache(maxsize=1)
def published() -> dict[str, Any]:
    """Return the tables of ``published.yaml``."""
    return read_document(Path(__file__).with_name("published.yaml"))


def published_target(name: str) -> Target:
    """Return the target of a row; ``h100-ao`` is the H100 of torchao's tables, with 2.4 TB/s of memory."""
    if name == "h100-ao":
        return replace(target("h100"), bandwidth=2.4e12)
    return target(name)


def family_plan(name: str) -> LayerPlan:
    """Return the plan behind a column: a family, or ``fp8_row_gw_hp`` (row-wise with wgrad in bf16)."""
    if name == "fp8_row_gw_hp":
        row, bf16 = _RECIPES["fp8_row"], _RECIPES["bf16"]
        return LayerPlan(fprop=row, dgrad=row, wgrad=bf16)
    return LayerPlan.uniform(_RECIPES[name])


def forward_ms(device: Target, rates: Rates, shape: tuple[int, int, int], family: str, *, quantise: bool) -> float:
    """Return the time of one forward of a 16-bit linear layer; with its casts as a training forward makes them."""
    m, k, n = shape
    seconds = gemm_seconds(device, rates, family, m, k, n)
    if quantise and family != "bf16":
        recipe = _RECIPES[family]
        # the input is written in both layouts (wgrad needs it), the weight in one (the input needs no gradient)
        seconds += operand_cast(device, rates, recipe, float(m * k), (0, 1), 2.0)[0]
        seconds += operand_cast(device, rates, recipe, float(k * n), (0,), 2.0)[0]
    return seconds * 1e3


def _rates(device: Target, source: str, override: Mapping[str, Rates]) -> Rates:
    """Return what a row's kernels reach: Transformer Engine casts in its own, torchao's casts are compiled."""
    rates = override.get(device.architecture) or default_rates(device, library=True)
    return rates if source in ("te", "bridge") else rates.compiled()


def _gemm_rows(document: Mapping[str, Any], override: Mapping[str, Rates]) -> list[Row]:
    out = []
    for row in document["rows"]:
        device = published_target(row["target"])
        rates = _rates(device, row["source"], override)
        shapes = [tuple(shape) for shape in document["shapes"][row["shapes"]]]
        for family, measured in row["ms"].items():
            quantise = row["mode"] == "autocast"
            modelled = sum(forward_ms(device, rates, shape, family, quantise=quantise) for shape in shapes)
            what = f"{row['mode']} {row['shapes']}"
            out.append(Row(row["target"], what, family, "ms", row["use"], row["source"], measured, modelled))
    return out


def _linear_rows(rows: list[dict[str, Any]], override: Mapping[str, Rates]) -> list[Row]:
    out = []
    for row in rows:
        device = published_target(row["target"])
        rates = _rates(device, row["source"], override)
        m, k, n = row["shape"]
        roles = tuple(row.get("roles", ("fprop", "dgrad", "wgrad")))
        work = GemmWork(m, k, n, 1, 1.0, roles)
        base = layer_cost(device, rates, work, family_plan("bf16"), script="bf16").seconds
        for family, measured in row["speedup"].items():
            other = layer_cost(device, rates, work, family_plan(family), script="bf16").seconds
            what = "linear " + "x".join(str(size) for size in row["shape"]) + ("" if len(roles) == 3 else " forward")
            out.append(Row(row["target"], what, family, "speedup", row["use"], row["source"], measured, base / other))
    return out


@lru_cache(maxsize=8)
def _report(model: str, batch: int, seq: int, recompute: str) -> GraphReport:
    return decoder_report(PRESETS[model], batch=batch, seq=seq, recompute=recompute)


def _lowered(report: GraphReport, row: Mapping[str, Any], family: str) -> list[str]:
    """Return the layers that a run lowered: not the first and last blocks that a row names, nor Llama's head."""
    first, last = (row.get(name, {}).get(family, 0) for name in ("bf16_first", "bf16_tail"))
    blocks = PRESETS[row["model"]].layers
    head = family in row.get("head", ()) or row["model"] not in ("llama3-8b", "qwen3-8b")
    return [
        layer.name
        for layer in report.layers
        if (head if "head" in layer.flags else first <= int(layer.name.split(".")[2]) < blocks - last)
    ]


def _step_rows(rows: list[dict[str, Any]], override: Mapping[str, Rates]) -> list[Row]:
    out = []
    for row in rows:
        device = published_target(row["target"])
        rates = _rates(device, row["source"], override)
        recompute = "selective" if row["selective"] else ""
        report = _report(row["model"], row["batch"], row["seq"], recompute)
        calls = row.get("accumulation", 1)
        # the optimizer steps once for all micro-batches, and Transformer Engine casts weights once for them
        once = {"shards": row["gpus"] * calls, "weight_reuse": float(calls)}
        model = CostModel(report, device, rates=rates, **once)
        # gathering 8-bit weights spares amax and cast; a transposed copy is still made (2 of 6 bytes)
        gathered = CostModel(report, device, rates=rates, shards=row["gpus"], weight_reuse=3.0)
        # torchao's rowwise_with_gw_hp casts the weight of dgrad per tensor, with the largest of the row scales: one
        # pass in place of three (6 of 10 bytes, roofline_utils)
        tensor_weight = CostModel(report, device, rates=rates, shards=row["gpus"], weight_reuse=10.0 / 6.0)
        kind = "speedup" if "speedup" in row else "sign"
        base = model.estimate({}).time_ms
        for family, measured in row[kind].items():
            plan = family_plan(family)
            # tensor-wise rows gather weights that each device has quantised for its own shard
            chosen = gathered if family in row.get("fp8_gather", ()) else model
            if family == "fp8_row_gw_hp":
                chosen = tensor_weight
            names = _lowered(report, row, family)
            gain = base / chosen.estimate(dict.fromkeys(names, plan)).time_ms
            out.append(
                Row(row["target"], f"step {row['model']}", family, kind, row["use"], row["source"], measured, gain)
            )
    return out


def _memory_rows(rows: list[dict[str, Any]]) -> list[Row]:
    """Return the peak of each run in GiB: bf16's own, and what the others are of it."""
    out = []
    for row in rows:
        report = decoder_report(
            PRESETS[row["model"]], batch=row["batch"], seq=row["seq"], recompute="selective", loss_chunks=row["chunks"]
        )
        model = CostModel(report, published_target(row["target"]), shards=row["gpus"])
        blocks, base = PRESETS[row["model"]].layers, 0.0
        for family, measured in row["gib"].items():
            last = blocks - row["bf16_tail"].get(family, 0)
            names = [layer.name for layer in report.layers if layer.name != "lm_head"]
            plans = {name: family_plan(family) for name in names if int(name.split(".")[2]) < last}
            found = model.memory(plans)
            assert found is not None
            base = base or found.total
            what, kind = f"memory {row['model']}", "size" if family == "bf16" else "memory"
            shown = (
                (measured * 2**30, found.total)
                if family == "bf16"
                else (measured / row["gib"]["bf16"], found.total / base)
            )
            out.append(Row(row["target"], what, family, kind, row["use"], row["source"], *shown))
    return out


def _linear_memory_rows(row: Mapping[str, Any]) -> list[Row]:
    """Return what is allocated after the forward of one linear layer: weight, what is saved for backward, output."""
    tokens, inputs, outputs = row["shape"]
    size = 2 * tokens * inputs
    layer = Layer(
        "linear",
        "Linear",
        "linear",
        "linear.weight",
        "linear",
        tuple(GemmCall(role, tokens, inputs, outputs) for role in ("fprop", "dgrad", "wgrad")),
        inputs * outputs,
        True,
        "",
        dtype="bf16",
    )
    made = Operator(
        "x",
        "",
        "input",
        "forward",
        "allocation",
        "keep",
        "",
        (),
        (),
        0,
        0,
        out_shapes=((tokens, inputs),),
        out_dtypes=("bf16",),
        out_saved=(size,),
    )
    product = Operator(
        "y",
        "linear",
        "aten::mm",
        "forward",
        "gemm",
        "keep",
        "",
        ((tokens, inputs), (outputs, inputs)),
        ("bf16", "bf16"),
        0,
        0,
        weight="linear.weight",
        out_shapes=((tokens, outputs),),
        out_dtypes=("bf16",),
        out_saved=(0,),
        sources=(0, -1),
    )
    report = GraphReport(
        model={"parameters": inputs * outputs},
        layers=(layer,),
        operators=(made, product),
        groups={},
        total_flops=0,
        tunable_flops_share=1.0,
        memory={"parameters": 2 * inputs * outputs, "saved_for_backward": size},
    )
    model, out = CostModel(report, published_target(row["target"])), []
    for name, measured in row["mib"].items():
        family, _, _ = name.partition("_inference")
        found = model.memory({"linear": family_plan(family)} if family != "bf16" else {})
        assert found is not None
        # for inference the weight is kept in 8 bits alone, and nothing for backward
        held = found.weight_casts if name.endswith("_inference") else found.total
        modelled = held + 2 * tokens * outputs
        out.append(
            Row(row["target"], "memory linear", name, "size", row["use"], row["source"], measured * 2**20, modelled)
        )
    return out


def evaluate(override: Mapping[str, Rates] | None = None, *, use: str = "", architecture: str = "") -> list[Row]:
    """Return every published figure beside the modelled one.

    Args:
        override: architecture -> rates to evaluate in place of the defaults (what the fit varies).
        use: only rows marked ``fit``, or ``score``; all when empty.
        architecture: only rows of devices of this architecture.
    """
    document, rates = published(), override or {}

    def wanted(row: Mapping[str, Any]) -> bool:
        matches = not architecture or published_target(row["target"]).architecture == architecture
        return matches and (not use or row["use"] == use)

    gemms = {**document["gemms"], "rows": list(filter(wanted, document["gemms"]["rows"]))}
    return [
        *_gemm_rows(gemms, rates),
        *_linear_rows(list(filter(wanted, document["linears"])), rates),
        *_step_rows(list(filter(wanted, document["steps"])), rates),
        *_memory_rows(list(filter(wanted, document["memory"]))),
        *(row for linear in filter(wanted, document["linear_memory"]) for row in _linear_memory_rows(linear)),
    ]
