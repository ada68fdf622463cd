"""``autoprec check``: asked against executed, of a real script."""

import shlex
from pathlib import Path

import pytest
import torch
from torch import nn

from autoprec.cli.scripts import check
from autoprec.cli.scripts.check import _refusal, _with_recording
from autoprec.errors import AuditError, NothingAcceptableError, PolicyMismatchError
from autoprec.graph.recorder import record_step
from autoprec.precision.recipes import by_recipe
from autoprec.trial.protocol import TrialResult
from tests.cli.helpers import autoprec

pytestmark = pytest.mark.usefixtures("warm")

SCRIPT = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    loss = model(torch.randn(16, 16)).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
POLICY = """\
schema: autoprec.policy/1
recipes: {bf16: {format: bf16}, fp8: {format: fp8}}
layers:
  - {match: "0", recipe: fp8, gemms: {wgrad: bf16}}
default: bf16
phases:
  - {from: 0.85, layers: [{match: "0", recipe: keep}]}
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY, encoding="utf-8")
    return path


@pytest.mark.slow
def test_what_is_asked_is_executed(script: Path, policy: Path) -> None:
    found = autoprec("check", "--policy", policy, "--json", script)
    assert found.code == 0, found.err
    document = found.json()
    assert document["ok"] is True
    rows = {row["name"]: row for row in document["layers"]}
    assert list(rows) == ["0", "2"]
    assert rows["0"]["requested"]["wgrad"] == rows["0"]["executed"]["wgrad"] == "bf16"
    assert rows["0"]["executed"]["fprop"].startswith("fp8 tensor")
    assert set(rows["2"]["executed"].values()) == {"bf16"}
    assert not [name for name in document["operators"] if "weight_decay" in name], "the policy asks for none"
    assert "SGD has no weight decay" in document["notes"][0]
    (phase,) = document["phases"]
    assert (phase["from"], phase["ok"]) == (0.85, True)
    rows = {row["name"]: set(row["executed"].values()) for row in phase["layers"]}
    assert rows == {"0": {"fp32"}, "2": {"bf16"}}


@pytest.mark.slow
def test_a_policy_for_another_model_is_exit_1_and_names_the_nearest_layer(script: Path, policy: Path) -> None:
    policy.write_text(POLICY.replace('"0"', '"encoder.0"'), encoding="utf-8")
    found = autoprec("check", "--policy", policy, script)
    assert found.code == 1
    assert "'encoder.0'" in found.err
    assert "match no tunable layer" in found.err
    assert found.err.count("fix:") == 1


def test_a_mismatch_is_exit_1_and_lists_the_layers(monkeypatch: pytest.MonkeyPatch, policy: Path) -> None:
    asked, ran = (
        {"fprop": "bf16", "dgrad": "bf16", "wgrad": "bf16"},
        {"fprop": "keep", "dgrad": "bf16", "wgrad": "bf16"},
    )
    rows = [{"name": "head", "requested": asked, "executed": ran, "ok": False, "reason": "fprop ran as keep"}]
    operators = {"softmax": {"requested": "fp32", "executed": "bf16", "ok": False, "reason": "autocast reached it"}}
    monkeypatch.setattr(
        "autoprec.cli.scripts.check._audited", lambda *_: ({"ok": False, "layers": rows, "operators": operators}, None)
    )
    found = autoprec("check", "--policy", policy, "train.py")
    assert found.code == 1
    assert "executed differs from requested in 2 places: head, softmax" in found.err
    text = " ".join(found.out.split())
    assert "head bf16 keep (fprop), bf16 (dgrad, wgrad) NO fprop ran as keep" in text
    assert "softmax fp32 bf16 NO autocast reached it" in text


@pytest.mark.parametrize("arguments", [(), ("--lr", "1e-3"), ("--name", "two words")])
def test_what_a_policy_executed_is_not_whether_the_script_is_sound(
    monkeypatch: pytest.MonkeyPatch, policy: Path, arguments: tuple[str, ...]
) -> None:
    row = {"name": "head", "requested": {"fprop": "bf16"}, "executed": {"fprop": "bf16"}, "ok": True, "reason": ""}
    monkeypatch.setattr(
        "autoprec.cli.scripts.check._audited", lambda *_: ({"ok": True, "layers": [row], "operators": {}}, None)
    )
    found = autoprec("check", "--policy", policy, "train.py", *arguments)
    assert found.code == 0
    command = shlex.join(["train.py", *arguments])
    said = f"the script's own precision was not judged: `autoprec check {command}` does that"
    assert found.out.splitlines()[-1] == said
    assert "not judged" not in autoprec("check", "--policy", policy, "--json", "train.py").out


def test_what_a_recorded_step_shows_counts_in_the_documents_ok() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.RMSNorm(32)).to(torch.bfloat16)
    report = record_step(model, lambda: model(torch.randn(4, 16).bfloat16()).float().sum().backward())
    audit = {"ok": True, "layers": [], "operators": {"norm": {"requested": "fp32", "executed": "fp32", "ok": True}}}
    found = _with_recording(audit, report, {"schema": "autoprec.policy/1"})
    assert not found["operators"]["norm"]["ok"]
    assert found["ok"] is False


@pytest.mark.parametrize(
    ("reason", "tail", "fix"),
    [
        (str(PolicyMismatchError("no layer", fix="correct the glob")), "", "correct the glob"),
        ("no layer", "Traceback", "run the script under it with `autoprec run` to see more"),
        ("no layer", "", "run the script under it with `autoprec run` to see more"),
    ],
)
def test_a_refusal_has_one_fix(reason: str, tail: str, fix: str) -> None:
    error = _refusal(TrialResult("mismatch", reason, tail=tail), "train.py")
    assert isinstance(error, PolicyMismatchError)
    shown = f"no layer\n{tail}" if tail else "no layer"
    assert str(error) == f"train.py: the policy could not be checked: {shown}\n  fix: {fix}"


def test_a_script_that_fails_under_the_policy_is_shown_and_the_fix_says_what_to_change() -> None:
    tail = "Traceback\nRuntimeError: Index put requires the source and destination dtypes match"
    error = _refusal(TrialResult("crashed", "RuntimeError", tail=tail), "train.py")
    assert tail in error.what
    assert "x.to(y.dtype)" in error.fix
    assert "Traceback" not in error.fix


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"wgrad": "a", "fprop": "a", "dgrad": "a"}, "a"),
        ({"wgrad": "b", "fprop": "a", "dgrad": "a"}, "a (fprop, dgrad), b (wgrad)"),
        ({}, "-"),
    ],
)
def test_gemms_that_share_a_recipe_are_printed_together(values: dict[str, str], text: str) -> None:
    assert by_recipe(values) == text


def test_a_script_with_fewer_steps_than_asked_for_is_told_how_many_it_has() -> None:
    short = TrialResult("too_short", "the script ended after 2 of 500 steps", losses=(2.0, 1.9), tail="step 0 loss 2.0")
    error = _refusal(short, "train.py")
    assert isinstance(error, NothingAcceptableError)
    assert error.fix == "ask for less: --steps 2"


def test_int8_with_one_scale_a_tensor_in_the_head_is_noted(script: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    recipe = "{format: int8, scaling: {granularity: tensor, scale: current}}"
    policy.write_text(f"schema: autoprec.policy/1\nrecipes: {{eight: {recipe}}}\ndefault: eight\n")
    found = autoprec("check", "--policy", policy, "--json", script)
    assert found.code == 0, found.err
    assert [note for note in found.json()["notes"] if "2 ended worse" in note]


@pytest.mark.slow
def test_layers_that_the_search_has_not_seen_are_noted_and_strict_refuses_them(script: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    model = "{class: Sequential, parameters: 7, fingerprint: other, layers: ['0']}"
    policy.write_text(
        f"schema: autoprec.policy/1\nrecipes: {{bf16: {{format: bf16}}}}\ndefault: bf16\nmodel: {model}\n"
        "evidence: {instructions: of another machine}\n"
    )
    found = autoprec("check", "--policy", policy, "--json", "--strict", script)
    assert (found.code, found.json()["ok"]) == (1, True), found.err
    evidence, layers, instructions = found.json()["notes"][-3:]
    assert "of another machine" in instructions
    assert "found on Sequential (7 parameters), this is Sequential (1,072 parameters): its evidence" in evidence
    assert "has not seen 2," in layers
    assert "without --strict notes are only printed" in found.err


#: What a wrong kernel of the layer's own machine would do to one GEMM: fprop of the second layer, K = 32.
FAULT = """
from autoprec.backends.cpu import int8
from autoprec.numerics import plan
def wrong(a, b, step, dtype, real=plan.multiply_emulated):
    out = real(a, b, step, dtype)
    return out if (a.columns, step.axes) != (32, (1, 1)) else out.roll(1, 0)
int8.int8_multiply = wrong
"""


@pytest.mark.slow
def test_a_wrong_kernel_is_named_by_numerics_with_exit_1(
    script: Path, policy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy.write_text(
        "schema: autoprec.policy/1\nrecipes: {it: {format: int8}, bf16: {format: bf16}}\ndefault: it\n"
        "layers: [{match: '0', recipe: it, gemms: {wgrad: bf16}}]\n"
    )
    clean = autoprec("check", "--policy", policy, "--numerics", "--json", script)
    assert clean.code == 0, clean.err
    numerics = clean.json()["numerics"]
    assert (numerics["ok"], numerics["findings"], numerics["not_compared"]) == (True, [], [])
    assert numerics["uncompiled"] is False
    found = {(row["layer"], row["gemm"], row["recipe"]) for row in numerics["gemms"]}
    assert found == {
        ("0", "fprop", "int8"), ("0", "wgrad", "bf16"),
        ("2", "fprop", "int8"), ("2", "dgrad", "int8"), ("2", "wgrad", "int8"),
    }  # fmt: skip
    script.write_text(FAULT + SCRIPT, encoding="utf-8")
    wrong = autoprec("check", "--policy", policy, "--numerics", "--json", script)
    assert wrong.code == 1
    document = wrong.json()
    assert document["ok"] is False
    (row,) = document["numerics"]["findings"]
    assert (row["code"], row["layer"], row["gemm"], row["m"], row["n"], row["k"]) == (
        "beyond_bound",
        "2",
        "fprop",
        16,
        16,
        32,
    )
    assert row["error"]["native"] > 1 > row["error"]["emulated"] > row["error"]["bf16"]
    with pytest.raises(AuditError, match="fprop of 2"):
        check._print_numerics(document["numerics"], policy, quiet=False)
    assert "16 x 16 x 32" in capsys.readouterr().out


def test_a_script_that_failed_under_the_policy_is_not_a_script_that_fails_by_itself() -> None:
    """Exit code 4 means that the script fails as it is written: under a policy, after a step, it does not."""
    under = _refusal(TrialResult("crashed", "boom", losses=(1.0,)), "train.py")
    assert under.exit_code == 1
    assert "the script failed under it, after 1 training step: boom" in str(under)
    assert _refusal(TrialResult("too_short", "ended", losses=(1.0,) * 5), "train.py").exit_code == 3


@pytest.mark.slow
def test_fp16_autocast_on_a_cpu_is_as_asked_although_its_products_are_emulated(script: Path, tmp_path: Path) -> None:
    policy = tmp_path / "fp16.yaml"
    policy.write_text("schema: autoprec.policy/1\nactivations: fp16\nloss_scaling: dynamic\n", encoding="utf-8")
    found = autoprec("check", "--policy", policy, "--json", script)
    assert found.code == 0, found.err
    row = found.json()["operators"]["activations"]
    assert (row["ok"], row["executed"]) == (True, "fp16")
    assert row["reason"] == "emulated: products in fp32, of operands rounded to fp16"
