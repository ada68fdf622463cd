"""Choose the default rates: coordinate search on the rows of published.yaml marked `fit`, nothing else.

python benchmarks/cost/fit_rates.py            # prints the rates to put into autoprec/cost/rates.py
"""

from __future__ import annotations

from dataclasses import replace

from autoprec.cost.rates import Rates, default_rates
from autoprec.precision.hardware import target
from benchmarks.cost.published import evaluate

#: architecture -> (a target of it, [(field, families that share one value; none for a field that is one number)])
PLAN: dict[str, tuple[str, list[tuple[str, tuple[str, ...]]]]] = {
    "hopper": (
        "h200",
        [
            ("gemm", ("bf16", "fp16")),
            ("gemm", ("fp8_tensor", "fp8_delayed", "fp8_row")),
            ("cast", ("fp8_tensor", "fp8_row", "int8")),  # no row tells their casts apart: all compiled by Inductor
            ("cast", ("fp8_delayed",)),
            ("cast", ("fp8_block",)),
            ("compiled_casts", ()),
            ("quantise_us", ("fp8_tensor", "fp8_row", "int8")),
            ("epilogue", ("fp8_row",)),
        ],
    ),
    "blackwell": (
        "b300",
        [
            ("gemm", ("bf16", "fp16")),
            ("gemm", ("fp8_tensor", "fp8_delayed", "fp8_row")),
            ("gemm", ("mxfp8",)),
            ("gemm", ("nvfp4",)),
            ("cast", ("fp8_tensor", "fp8_row", "int8")),
            ("cast", ("fp8_delayed",)),
            ("cast", ("mxfp8", "fp8_block")),
            ("cast", ("nvfp4",)),
            ("compiled_casts", ()),
            ("quantise_us", ("fp8_tensor", "fp8_delayed", "mxfp8", "nvfp4", "fp8_row", "fp8_block", "int8")),
        ],
    ),
    "cdna3": ("mi300x", [("gemm", ("fp8_tensor", "fp8_delayed", "fp8_row"))]),
}


def loss(architecture: str, rates: Rates) -> float:
    """Squared errors of the fit rows of one architecture, in units of the goal's tolerance."""
    rows = evaluate({architecture: rates}, use="fit", architecture=architecture)
    return sum((row.error / (0.1 if row.kind == "ms" else 0.05)) ** 2 for row in rows if row.kind != "sign")


def scaled(rates: Rates, field: str, families: tuple[str, ...], factor: float) -> Rates | None:
    """One field of the rates times a factor; None where no device could have that rate."""
    if not families:
        return replace(rates, **{field: getattr(rates, field) * factor})
    values = dict(getattr(rates, field))
    values |= {family: values[family] * factor for family in families}
    if field in ("gemm", "cast") and max(values.values()) > 0.95:
        return None
    if field == "quantise_us" and min(values.values()) < 2.0:  # no kernel is free
        return None
    return replace(rates, **{field: values})


def fit(architecture: str) -> Rates:
    """Coordinate search from the current defaults."""
    name, parameters = PLAN[architecture]
    best = default_rates(target(name), library=True)
    score = loss(architecture, best)
    step = 1.25
    while step > 1.01:
        improved = False
        for field, families in parameters:
            for factor in (step, 1 / step):
                candidate = scaled(best, field, families, factor)
                found = loss(architecture, candidate) if candidate else score
                if candidate and found < score - 1e-6:
                    best, score, improved = candidate, found, True
        if not improved:
            step = step**0.5
    print(f"{architecture}: loss {score:.2f}")
    return best


def main() -> None:
    for architecture in PLAN:
        rates = fit(architecture)
        for field in ("gemm", "cast", "quantise_us", "epilogue"):
            print(f"  {field}: { {k: round(v, 3) for k, v in getattr(rates, field).items()} }")
        print(f"  compiled_casts: {rates.compiled_casts:.3f}")


if __name__ == "__main__":
    main()
