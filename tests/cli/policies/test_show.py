"""``autoprec show``."""

import json
from pathlib import Path

import pytest

from autoprec.cli.policies.show import _value
from autoprec.graph.report import GemmCall, GraphReport, Layer
from autoprec.policy import LayerRule, Policy, load_policy, parse_policy, save_policy
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.cli.helpers import autoprec


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    gemms = (GemmCall("fprop", 64, 32, 128), GemmCall("wgrad", 128, 64, 32))

    def layer(name: str, tunable: bool = True) -> Layer:
        flops = {gemm.role: gemm.flops for gemm in gemms}
        reason = "a GEMM with a weight" if tunable else "a router"
        return Layer(name, "Linear", "linear", f"{name}.weight", name, gemms, 4096, tunable, reason, flops=flops)

    layers = (layer("blocks.0.fc"), layer("blocks.1.fc"), layer("blocks.1.router", tunable=False), layer("out"))
    total = sum(item.total_flops for item in layers)
    model = {"class": "GPT", "parameters": 1, "fingerprint": ""}
    report = GraphReport(model, layers, (), {}, total, 0.75)
    path = tmp_path / "step.json"
    path.write_text(json.dumps(report.to_json()), encoding="utf-8")
    return path


def test_rules_settings_evidence_and_guard_are_shown(policy_file: Path) -> None:
    found = autoprec("show", policy_file)
    assert found.code == 0
    text = squeezed(found.out)
    assert "for GPT, 3,307,008 parameters" in text
    assert "blocks.*.fc fp8 fp8 row e4m3/e4m3/e4m3 fp8 row e4m3/e4m3/e4m3 bf16" in text
    assert "head (optional) keep keep keep keep" in text
    assert "every other layer bf16 bf16 bf16 bf16" in text
    assert "speedup 1.91x" in text
    assert "divergence 0.071%" in text
    assert "memory_bytes 49.6 MiB" in text
    assert "loss_gap 0.01" in text
    assert "1 all bf16 2 script" in text
    policy_file.write_text(policy_file.read_text(encoding="utf-8") + "execution: compile\n", encoding="utf-8")
    assert "execution: compile" in squeezed(autoprec("show", policy_file).out)


def test_a_lean_policy_is_short_and_runs_the_same(tmp_path: Path) -> None:
    """One of two rules was 147 lines in a repository, most of them reasons."""
    rules = tuple(LayerRule(match=match, recipe="fp8_rowwise") for match in ("blocks.*.fc", "blocks.*.qkv"))
    why = {f"blocks.{index}": "because " * 40 for index in range(30)}
    evidence = {"speedup": 1.5, "divergence": 0.001, "backends": {"fp8_rowwise": "torchao"}, "why": why, "seeds": 4}
    recipes = {"fp8_rowwise": BUILTIN_RECIPES["fp8_rowwise"]}
    whole = Policy(recipes=recipes, layers=rules, activations="bf16", evidence=evidence)
    found = autoprec("show", "--lean", save_policy(whole, tmp_path / "policy.yaml"))
    lean = parse_policy(found.out)
    assert len(found.out.splitlines()) < 20
    assert found.out.startswith("# checksum")
    assert lean == whole.model_copy(update={"evidence": {key: evidence[key] for key in evidence if key != "why"}})


def test_shares_are_told_in_percent_all_of_them() -> None:
    """The divergence was, its limit and the gradient error beside it were not."""
    assert _value("max_divergence", 0.0025) == "0.25%"
    assert _value("gradient_error", 0.0006952) == "0.06952%"
    assert _value("gain_over_preset", -0.28) == "-28%"


def test_why_has_a_section_of_its_own(policy_file: Path) -> None:
    text = policy_file.read_text(encoding="utf-8")
    told = "seeds: 4, why: {blocks.*.fc: 'fp8: saves 2 ms'}}"
    policy_file.write_text(text.replace("seeds: 4}", told), encoding="utf-8")
    shown = squeezed(autoprec("show", policy_file).out)
    assert "why blocks.*.fc fp8: saves 2 ms" in shown
    assert "why" not in squeezed(shown.split("evidence")[1].split("why blocks")[0])


def test_who_ran_the_gemms_is_said_with_its_reason(policy_file: Path) -> None:
    reason = "torchao: 1.12x native at fp8_rowwise, measured"
    run_by = f"evidence: {{backends: {{fp8_rowwise: {{backend: torchao, reason: '{reason}'}}}}, "
    policy_file.write_text(policy_file.read_text().replace("evidence: {", run_by))
    found = squeezed(autoprec("show", policy_file).out)
    assert f"backends that run the GEMMs, where they are installed fp8_rowwise {reason}" in found


def test_a_graph_turns_rules_into_layers(policy_file: Path, graph_file: Path) -> None:
    found = autoprec("show", policy_file, graph_file)
    assert found.code == 0
    text = squeezed(found.out)
    assert "blocks.0.fc 25.0% blocks.*.fc fp8 row e4m3/e4m3/e4m3" in text
    assert "blocks.1.router 25.0% not tunable a router" in text
    assert "out 25.0% default bf16 bf16 bf16" in text


def test_json_holds_the_policy_and_the_plan_of_each_layer(policy_file: Path, graph_file: Path) -> None:
    document = autoprec("show", policy_file, graph_file, "--json").json()
    assert document["policy"] == load_policy(policy_file).to_dict()
    assert document["layers"]["blocks.1.fc"] == {
        "fprop": "fp8 row e4m3/e4m3/e4m3",
        "dgrad": "fp8 row e4m3/e4m3/e4m3",
        "wgrad": "bf16",
    }
    assert "blocks.1.router" not in document["layers"]
    assert "layers" not in autoprec("show", policy_file, "--json").json()


def test_a_policy_for_another_model_is_a_mismatch(policy_file: Path, graph_file: Path) -> None:
    policy_file.write_text(policy_file.read_text().replace("blocks.*.fc", "layers.*.fc"), encoding="utf-8")
    found = autoprec("show", policy_file, graph_file)
    assert found.code == 1
    assert "'layers.*.fc' (nearest layer: 'blocks." in found.err
    assert found.out == ""


def test_brackets_in_names_are_no_markup(policy_file: Path) -> None:
    policy_file.write_text(policy_file.read_text().replace("blocks.*.fc", "blocks.[red]x[/red]"), encoding="utf-8")
    assert "blocks.[red]x[/red]" in autoprec("show", policy_file).out


@pytest.mark.parametrize("text", ["{}", "[1]", '{"layers": 3}', "not json"])
def test_a_file_that_is_no_graph_is_refused(policy_file: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "step.json").write_text(text, encoding="utf-8")
    found = autoprec("show", policy_file, tmp_path / "step.json")
    assert found.code == 2


def test_no_colour_when_it_is_not_wanted(policy_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in autoprec("show", policy_file).out


def test_a_missing_policy_names_the_nearest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "fix: check the path" in autoprec("show", "polcy.yaml").err
    (tmp_path / "policy.yaml").touch()
    found = autoprec("show", "polcy.yaml")
    assert found.code == 2
    assert "polcy.yaml: no such file" in found.err
    assert "did you mean 'policy.yaml'?" in found.err


@pytest.mark.parametrize("name", ["speedup", "effective_speedup", "speedup_over_16bit"])
def test_every_gain_is_printed_as_one(name: str) -> None:
    assert _value(name, 1.276) == "1.28x"


def test_keys_that_look_like_markup_are_printed_as_they_are(tmp_path: Path) -> None:
    evidence = {"[bold]x[/bold]": 1, "[/red]": 2, "[link=http://x]": "[blink]a[/blink]", "notes": ["[/b]"]}
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"schema": "autoprec.policy/1", "evidence": evidence}), encoding="utf-8")
    found = autoprec("show", path)
    assert found.code == 0
    for text in (*evidence, "[blink]a[/blink]", "[/b]"):
        assert text in found.out


@pytest.mark.parametrize(("kind", "key"), [("policy", "layers"), ("space", "choices")])
def test_the_schema_describes_every_key_and_refuses_others(kind: str, key: str) -> None:
    document = autoprec("show", "--schema", kind).json()
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert key in document["properties"]
    assert "schema" in document["properties"], "keys are spelled as in files"
    assert document["additionalProperties"] is False


def test_an_unknown_kind_is_a_usage_error() -> None:
    found = autoprec("show", "--schema", "polcy")
    assert found.code == 2
    assert "policy" in found.err


def test_one_of_a_policy_and_a_schema_is_shown(policy_file: Path) -> None:
    for words in ((), (policy_file, "--schema", "policy"), (policy_file, "--schema", "space", policy_file)):
        assert autoprec("show", *words).code == 2


def other(policy_file: Path, old: str, new: str) -> Path:
    path = policy_file.with_name("other.yaml")
    path.write_text(policy_file.read_text().replace(old, new), encoding="utf-8")
    return path


def test_no_difference_is_exit_0(policy_file: Path) -> None:
    found = autoprec("show", policy_file, policy_file)
    assert (found.code, found.err) == (0, "")
    assert found.out.startswith("no difference")


def test_a_difference_is_exit_1_and_names_its_place(policy_file: Path) -> None:
    found = autoprec("show", policy_file, other(policy_file, "default: bf16", "default: keep"))
    assert (found.code, found.out) == (1, "default: bf16 -> keep\n")


def test_evidence_is_shown_and_does_not_count(policy_file: Path) -> None:
    found = autoprec("show", policy_file, other(policy_file, "seeds: 4", "seeds: 8"))
    assert found.code == 0
    assert found.out.splitlines()[1:] == ["(evidence.seeds: 4 -> 8)"]


def test_json(policy_file: Path) -> None:
    found = autoprec("show", "--json", policy_file, other(policy_file, ", gemms: {wgrad: bf16}", ""))
    assert found.code == 1
    assert found.json() == {
        "same": False,
        "differences": [
            {
                "where": "layers['blocks.*.fc']",
                "a": {"recipe": "fp8", "gemms": {"wgrad": "bf16"}},
                "b": {"recipe": "fp8"},
            }
        ],
    }


def test_a_policy_that_is_not_valid_is_exit_2_not_1(policy_file: Path) -> None:
    assert autoprec("show", policy_file, other(policy_file, "default: bf16", "default: x")).code == 2
