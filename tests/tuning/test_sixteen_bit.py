from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoprec.cli.progress import TerminalProgress
from autoprec.errors import ScriptError
from autoprec.policy import Policy, load_policy
from autoprec.policy.space import load_space
from autoprec.precision.recipes import GEMMS
from autoprec.reports.html import html_report
from autoprec.trial.command import ScriptCommand
from autoprec.trial.protocol import HostInfo
from autoprec.tuning.engine import Search
from autoprec.tuning.events import Listeners
from autoprec.tuning.sixteen_bit import (
    NAMES,
    first_presets,
    over_sixteen_bit,
    runs_in_sixteen_bit,
    sixteen_bit_space,
    slow_sixteen_bit,
    written_in,
)
from autoprec.tuning.study.run import Run, headline
from tests.simulated import SimulatedRunner, simulated_graph
from tests.tuning.test_engine import engine, here, mine, options, plain_search, script, search, trained  # noqa: F401


def in_dtype(dtype: str, **shape: int) -> object:
    graph = simulated_graph(2, **shape)
    return replace(graph, layers=tuple(replace(layer, dtype=dtype) for layer in graph.layers))


def test_a_script_is_in_sixteen_bit_when_most_of_its_flops_are() -> None:
    assert not runs_in_sixteen_bit(in_dtype("float32"))  # type: ignore[arg-type]
    assert runs_in_sixteen_bit(in_dtype("torch.bfloat16"))  # type: ignore[arg-type]
    graph = simulated_graph(2)
    *rest, head = graph.layers
    mixed = replace(graph, layers=(*(replace(layer, dtype="float16") for layer in rest), head))
    assert runs_in_sixteen_bit(mixed)
    assert not runs_in_sixteen_bit(replace(graph, layers=(*rest, replace(head, dtype="bfloat16"))))


@pytest.mark.parametrize(
    ("dtype", "size", "written"), [("bfloat16", 4, "bf16 autocast"), ("bfloat16", 2, "bf16"), ("float32", 4, "fp32")]
)
def test_autocast_is_known_by_parameters_wider_than_products(dtype: str, size: int, written: str) -> None:
    graph = in_dtype(dtype)
    memory = {"parameters": size * graph.model["parameters"]}  # type: ignore[attr-defined]
    assert written_in(replace(graph, memory=memory)) == written  # type: ignore[type-var]


def test_a_script_that_is_slow_because_it_is_in_sixteen_bit_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoprec.tuning.sixteen_bit.cpu_bf16_units", lambda: ())
    assert "and this CPU has no bf16 instructions" in slow_sixteen_bit(in_dtype("bfloat16"))  # type: ignore[arg-type]
    assert slow_sixteen_bit(in_dtype("float32")) == ""  # type: ignore[arg-type]
    for units in (("AVX512_BF16",), None):
        monkeypatch.setattr("autoprec.tuning.sixteen_bit.cpu_bf16_units", lambda units=units: units)
        assert slow_sixteen_bit(in_dtype("bfloat16")) == ""  # type: ignore[arg-type]


def test_the_sixteen_bit_run_is_the_first_preset() -> None:
    found = first_presets([("script", {}), ("all fp8", {}), ("all bf16", {}), ("bf16 autocast", {})])
    assert [name for name, _ in found] == ["bf16 autocast", "all bf16", "script", "all fp8"]


def test_a_gain_is_told_against_the_sixteen_bit_run_where_it_is_known() -> None:
    assert over_sixteen_bit({"speedup": 9.0}, 7.5) == {"speedup_over_16bit": pytest.approx(1.2)}
    assert over_sixteen_bit({"speedup": 9.0}, None) == {}
    assert headline({"speedup": 9.0, "speedup_over_16bit": 1.2}) == "1.20x over 16-bit"
    assert headline({"speedup": 9.0}) == "9.00x over the script"


def test_the_restricted_space_has_no_quantised_choice() -> None:
    space = sixteen_bit_space(load_space("hopper-fp8"))
    named = {choice.name for rule in space.choices for choice in rule.choices}
    assert named == {"bf16"}
    assert not space.parameters


def test_on_a_gpu_the_headline_is_the_gain_over_sixteen_bit() -> None:
    _, made, result, folder = plain_search()
    plain = next(row for row in result.presets if row["name"] in NAMES)
    assert plain["speedup_over_16bit"] == pytest.approx(1.0)
    assert result.best["speedup_over_16bit"] == pytest.approx(result.best["speedup"] / plain["speedup"], rel=1e-6)
    evidence = load_policy(folder / result.policy).evidence
    assert evidence["speedup_over_16bit"] == pytest.approx(result.best["speedup_over_16bit"], rel=1e-3)
    assert f"{result.best['speedup_over_16bit']:.2f}x over 16-bit" in result.reason
    first = next(record for record in made.records if record.kind in ("preset", "search"))
    assert first.name in NAMES


def test_a_sixteen_bit_run_that_the_space_has_another_name_for_is_told_against_as_well(here: Path) -> None:  # noqa: F811
    """Nine times as fast as an fp32 script was the headline."""
    text = load_space("hopper-fp8").model_dump_json(by_alias=True, exclude_none=True)
    space = json.loads(text) | {"presets": [{"name": "ours", "choice": "bf16"}]}
    (here / "space.json").write_text(json.dumps(space))
    made, result = search(script(), options(trials=3, space="space.json"))
    first = next(record for record in made.records if record.kind in ("preset", "search"))
    assert first.name == "ours (all bf16)"
    assert result.best["speedup_over_16bit"] < result.best["speedup"]


def test_an_fp32_script_on_a_gpu_never_stays_because_nothing_beats_bf16(here: Path) -> None:  # noqa: F811
    simulated = script(device="cpu", graph=simulated_graph(2, width=512, tokens=512))
    made, result = search(simulated, options(target="h100", force=False, trials=8))
    assert result.budget["bound_speedup"] < 1.03
    assert result.verdict == "adopt"
    policy = load_policy(here / result.policy)
    assert policy.activations == "bf16" or "bf16" in policy.recipes
    assert result.best["speedup"] > 1.03
    assert result.best["speedup_over_16bit"] == pytest.approx(1.0, abs=0.02)
    assert made.setup is not None
    assert all(not recipe.scaled for record in made.records for recipe in _recipes(record.policy))


def _recipes(policy: dict[str, object]) -> list[object]:
    from autoprec.policy import policy_from_dict

    return list(policy_from_dict(policy).recipes.values()) if policy else []


def test_a_script_in_sixteen_bit_stays_without_a_run_of_the_reference(here: Path) -> None:  # noqa: F811
    simulated = script(device="cpu", graph=in_dtype("bfloat16", width=64, tokens=256))
    _, result = search(simulated, options(target="h100", force=False))
    assert result.verdict == "stay"
    assert [spec.kind for _, spec in simulated.calls] == ["record"]
    assert result.reference["sources"]["step_time_ms"] == "modelled"
    assert result.reference["speedup_over_16bit"] == 1.0
    assert trained(simulated) == []


@pytest.mark.usefixtures("mine")
def test_a_stay_moves_an_adopted_policy_aside(here: Path) -> None:  # noqa: F811
    """What --output names always holds this search's answer: who trains under it trains under no earlier one's."""
    adopted = (here / "policy.yaml").read_text()
    narrow = {"graph": in_dtype("bfloat16", width=64, tokens=256), "device": "cpu"}
    made, result = search(script(**narrow), options(study="second", target="h100", force=False))
    assert (result.verdict, result.policy) == ("stay", "policy.yaml")
    written = load_policy(here / "policy.yaml")
    assert written.evidence["verdict"] == "stay"
    assert not written.recipes
    assert (here / "policy.yaml").read_text() == (made.study_dir / "policy.yaml").read_text()
    assert (here / "policy.yaml.1").read_text() == adopted
    assert "policy.yaml.1" in made.set_aside
    for study in ("third", "fourth"):
        search(script(**narrow), options(study=study, target="h100", force=False))
    assert sorted(path.name for path in here.glob("policy.yaml*")) == ["policy.yaml", "policy.yaml.1"]


def test_a_script_that_fails_at_once_leaves_no_study(here: Path) -> None:  # noqa: F811
    class Failing(SimulatedRunner):
        def start(self) -> HostInfo:
            raise ScriptError("unrecognized arguments: --leanring-rate")

    asked = options()
    made = Search(asked, ScriptCommand.parse(asked.command), Listeners(), lambda seed, _folder: Failing(script(), seed))
    with pytest.raises(ScriptError):
        made.run()
    assert not made.study_dir.exists()


def test_where_only_16_bit_can_gain_the_answer_says_so_once_and_why(
    here: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = script(graph=simulated_graph(2, width=128, tokens=512), device="cpu")
    made = engine(small, options(force=False, target="h100", trials=4))
    progress = TerminalProgress()
    made.listener = Listeners(progress)
    result = made.run()
    progress.close()
    told = [line for line in capsys.readouterr().err.splitlines() if "too small to pay for casts" in line]
    assert len(told) == 1
    assert "what could be gained: bf16 is about" in told[0]
    assert any("only 16-bit policies are tried" in note for note in result.notes)
    assert any("--cost-scale" in note for note in result.notes)
    assert "Only 16 bit was tried: by the cost model nothing else gains more than 1.0" in result.reason
    assert "bf16 is about" not in result.reason, "what it gains was measured, and is said once"
    assert "too small to pay for casts" in result.reason


def test_a_rehearsal_for_an_h100_runs_the_defaults_of_libraries_or_says_why_not() -> None:
    """The candidates of people were bf16 alone: torchao's presets and Transformer Engine's were skipped."""
    _, made, result, _ = plain_search(target="h100")
    rows = json.loads(json.dumps(result.to_json()))["presets"]
    names = " ".join(row["name"] for row in rows if row["status"] == "ok")
    for library in ("torchao-tensorwise", "torchao-rowwise", "torchao-rowwise-gw-hp", "te-delayed", "te-current"):
        assert f"published:{library}" in names.replace(",", "").split(), library
    ran = next(record for record in made.records if record.name.startswith("published:torchao-rowwise-gw-hp"))
    (recipe,) = [one for one in load_policy_of(ran).recipes.values() if one.scaled]
    assert [recipe.of_gemm(gemm).accumulation for gemm in GEMMS] == ["fast", "full", "full"]


def load_policy_of(record: Run) -> Policy:
    return Policy.model_validate(record.policy)


def test_defaults_whose_own_filter_takes_nothing_are_rows_with_the_reason(here: Path) -> None:  # noqa: F811
    narrow = script(device="cpu", graph=simulated_graph(2, width=256, tokens=16384))
    made, result = search(narrow, options(target="h100", trials=8))
    refused = {row["name"]: row["reason"] for row in result.presets if row["status"] == "refused"}
    assert {"published:torchao-tensorwise", "published:torchao-rowwise"} == refused.keys()
    assert all("it leaves out what is not an nn.Linear, or where N or K is" in why for why in refused.values())
    table = result.table()
    assert {"published:torchao-tensorwise", "published:torchao-rowwise"} <= {cells[0] for cells in table.rows}
    assert all(f"{name}: {why}" in table.notes for name, why in refused.items())
    assert "published:torchao-tensorwise" in html_report(result, made.records, made.graph)
