"""A recorded step as data: JSON in and out, FLOPs that add up."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.errors import FileError
from autoprec.graph.report import GemmCall, GraphReport, Layer, NewtonSchulz, Operator, StepProduct, load_report

GEMMS = (
    GemmCall("fprop", 64, 32, 128),
    GemmCall("wgrad", 128, 64, 32),
    GemmCall("recompute", 64, 32, 128),
)


def report() -> GraphReport:
    flops = {"fprop": GEMMS[0].flops, "wgrad": GEMMS[1].flops}
    layer = Layer("up", "Linear", "linear", "up.weight", "up", GEMMS, 4096, True, "a GEMM", ("first",), flops)
    fixed = Layer("gate", "Linear", "linear", "gate.weight", "gate", GEMMS[:1], 64, False, "a router", ("router",))
    operator = Operator(
        "mm", "up", "aten.mm", "forward", "gemm", "tunable", "why", ((64, 32), (32, 128)), ("float32",), 1, 2
    )
    model = {"class": "Net", "parameters": 3, "fingerprint": "sha256:0"}
    return GraphReport(
        model, (layer, fixed), (operator,), {"up": ("up",)}, 100, 0.5, {"samples": 8}, {"parameters": 12}, ("n",)
    )


def test_a_report_survives_json() -> None:
    assert GraphReport.from_json(json.loads(json.dumps(report().to_json()))) == report()


def test_the_normative_keys_are_there() -> None:
    document = report().to_json()
    assert document["coverage"]["tunable_flops_share"] == 0.5
    assert set(document["model"]) == {"class", "parameters", "fingerprint"}
    needed = {"name", "module", "op", "phase", "class", "precision", "reason", "shapes", "flops", "bytes"}
    assert needed <= set(document["operators"][0])
    assert {"name", "type", "group", "gemms", "flops", "tunable", "reason"} <= set(document["layers"][0])


def test_flops_count_both_factors_and_every_call() -> None:
    assert GemmCall("fprop", 2, 3, 5).flops == 2 * 2 * 3 * 5
    assert GemmCall("fprop", 2, 3, 5, calls=4, batch=2).flops == 8 * 60


def test_what_a_step_multiplies_by_its_operators_or_by_muons_shapes() -> None:
    def ran(op: str, *shapes: tuple[int, ...], dtype: str = "fp32") -> Operator:
        return Operator(op, "up", f"aten::{op}", "optimizer", "gemm", "keep", "", shapes, (dtype,) * len(shapes), 0, 0)

    large = (256, 256)
    rows = (
        ran("mm", large, large),
        ran("mm", large, large),
        ran("addmm_", (1,), large, large),
        ran("baddbmm", (1,), (3, 256, 64), (3, 64, 256), dtype="bf16"),
        ran("mul", large, large),
    )
    found = replace(report(), total_flops=10 * 256**3, updating=rows)
    assert found.step_products() == [
        StepProduct(256, 256, 256, "fp32", calls=3),
        StepProduct(256, 64, 256, "bf16", batch=3),
    ]
    assert [one.flops for one in found.step_products()] == [6 * 256**3, 6 * 256 * 64 * 256]
    whole = 10 + 6 + 1.5
    assert found.movable("bf16") == pytest.approx(6 / whole)
    assert found.movable("fp32") == pytest.approx(1.5 / whole)
    assert not StepProduct(64, 64, 64, "fp32").moves_to("bf16")
    assert not StepProduct(256, 256, 256, "fp64").moves_to("fp32")
    muon = replace(report(), newton_schulz=(NewtonSchulz(256, 512, 5, 2),))
    assert sum(one.flops for one in muon.step_products()) == muon.newton_schulz[0].flops
    assert {one.dtype for one in muon.step_products()} == {"bf16"}
    assert (report().step_products(), report().movable("bf16")) == ([], 0.0)
    assert GraphReport({}, (), (), {}, 0, 0.0).movable("bf16") == 0.0


def test_layers_are_found_by_name_and_a_first_layer_has_no_dgrad() -> None:
    found = report()
    assert found.tunable == (found.layers[0],)
    assert found.layer("up").roles() == ("fprop", "wgrad")
    assert found.layer("up").total_flops == GEMMS[0].flops + GEMMS[1].flops
    with pytest.raises(KeyError):
        found.layer("down")


def test_a_saved_step_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(report().to_json()))
    assert load_report(path) == report()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", '{"layers": 1}', '{"layers": [1], "operators": []}', '{"layers": [], "operators": [[1, 2]]}'],
)
def test_what_is_not_a_recorded_step_is_refused_with_the_command_that_makes_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(FileError, match="is not a recorded step") as found:
        load_report(path)
    assert "inspect --json" in found.value.fix
    with pytest.raises(FileError, match="no such file"):
        load_report(tmp_path / "missing")


def test_a_file_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.graph.report.MAX_GRAPH_BYTES", 1 << 16)
    with pytest.raises(FileError, match="larger than 65536 bytes"):
        load_report("/dev/zero")


def test_a_step_nested_without_a_bound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text('{"layers": ' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(FileError, match="is not a"):
        load_report(path)
