"""What a calibration measured of whole linears beside what the model says without it, as a table.

    python benchmarks/gpu/linears.py [FILE]     a file of `autoprec calibrate`; default: the H100's of 2026-11-27

Forward and backward with casts, FP32 weights under bf16 autocast. Where the host takes longer to launch a linear than
the device to compute it, the time as called is the host's; the last column compares the model with the device's, where
it was measured (``device_s``), else with the time as called.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autoprec.cost.calibrate.linears import Linear, modelled  # noqa: E402
from autoprec.cost.rates import default_rates  # noqa: E402
from autoprec.precision.hardware import TARGETS  # noqa: E402

FIRST = ROOT / "benchmarks" / "results" / "2026-11-27_h100_calibration.json"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="timed linears beside modelled ones")
    parser.add_argument("file", type=Path, nargs="?", default=FIRST)
    document = json.loads(parser.parse_args().file.read_text())
    print(
        f"{document['device']}, {document['date']}, " + ", ".join(f"{k} {v}" for k, v in document["versions"].items())
    )
    print("\n| linear | recipe | by | how | us as called | device; host | error | modelled us | modelled / device |")
    print("|---|---|---|---|--:|--:|--:|--:|--:|")
    target = TARGETS[document["target"]]
    for row in map(Linear.from_json, document["linears"]):
        if not row.seconds:
            continue
        rates = default_rates(target, library=row.backend == "transformer_engine")
        said, device = modelled(target, rates, row).seconds, row.device_s or row.seconds
        apart = f"{1e6 * device:.0f}; {1e6 * row.host_s:.0f}" if row.device_s else "-"
        cells = ["x".join(map(str, row.shape)), row.recipe, row.backend, row.how, f"{1e6 * row.seconds:.0f}", apart]
        cells += [f"{row.error:.4f}", f"{1e6 * said:.0f}", f"{said / device:.2f}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
