"""Seeded faults are found with their code and layer, and what is right is left alone."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoprec.graph.report import GraphReport, Layer
from autoprec.policy import parse_policy
from autoprec.precision.hardware import target
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.tuning.lint import rules
from autoprec.tuning.lint.facts import Facts, Setting
from autoprec.tuning.lint.judged import CODES
from autoprec.tuning.lint.rules import RULES, Finding, findings, other_instructions
from autoprec.tuning.lint.source import settings_of
from benchmarks.cost.decoder import PRESETS, decoder_report

GPT = decoder_report(PRESETS["gpt2"], batch=1, seq=1024)
#: What the policy under test may name.
_RECIPES = ("fp32", "bf16", "fp16", "fp8_rowwise", "fp8_tensorwise", "mxfp8", "nvfp4", "int8_tensor", "int8")


def layer(name: str, *, inp: int = 768, out: int = 768, flags: tuple[str, ...] = (), **more: Any) -> Layer:
    like = GPT.layers[0]
    gemms = tuple(replace(gemm, k=inp, n=out) for gemm in like.gemms[:1])
    return replace(like, name=name, weight=f"{name}.weight", group=name, gemms=gemms, flags=flags, **more)


def model_of(*layers: Layer) -> GraphReport:
    return replace(GPT, layers=layers, groups={one.name: (one.name,) for one in layers})


BLOCKS = [f"blocks.{i}.{part}" for i in range(4) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
PLAIN = model_of(*map(layer, BLOCKS), layer("lm_head", out=50304, flags=("head",)))
WIDE = model_of(*(layer(name, inp=1000) for name in BLOCKS), layer("lm_head", inp=1000, out=50304, flags=("head",)))
MIXTURE = model_of(
    layer("blocks.0.moe.router", out=64, flags=("router",), tunable=False, reason="chooses the experts", dtype="fp32"),
    layer("blocks.0.moe.experts.0.up"),
    layer("blocks.1.moe.gate", out=64, flags=("router",), dtype="fp32"),
    layer("blocks.1.moe.experts.0.up"),
    layer("lm_head", flags=("head",)),
)
HEADLESS = model_of(
    *map(layer, BLOCKS), layer("head", flags=("head",), tunable=False, reason="its weight is used outside a linear")
)


def facts(
    *lines: str,
    report: GraphReport = PLAIN,
    on: str = "h100",
    source: str = "",
    folder: Path | None = None,
    **more: Any,
) -> Facts:
    """Facts of a policy with these lines of ``layers:`` (or keys of the whole, after ``/``), and of a source."""
    given = [line for line in lines if not line.startswith("/")]
    keys = [line[1:] for line in lines if line.startswith("/")]
    recipes = "".join(f"  {name}: {BUILTIN_RECIPES[name].to_dict()}\n" for name in _RECIPES if name in BUILTIN_RECIPES)
    text = f"schema: autoprec.policy/1\nrecipes:\n{recipes}"
    text += "layers:\n" + "".join(f"  - {{{line}}}\n" for line in given) if given else ""
    text += "".join(f"{key}\n" for key in keys)
    settings: list[Setting] = []
    if source and folder is not None:
        (folder / "train.py").write_text(textwrap.dedent(source))
        settings = settings_of(["train.py"], folder)
    policy = parse_policy(text) if lines else None
    targets = [target(on)]
    return Facts(policy, "policy.yaml", text, report, settings, targets, **more)


def only(found: list[Finding], code: str) -> list[Finding]:
    return [one for one in found if one.code == code]


_SEEN = "/model: {class: GPT, parameters: 7, layers: ['blocks.0-3.attn.qkv', 'blocks.0-3.attn.proj', 'lm_head']}"
_ALL8 = "match: '*', recipe: fp8_rowwise"
_IN8 = "match: 'blocks.*', recipe: fp8_rowwise"
_AUTOCAST = "import torch\nwith torch.autocast('cuda', dtype=torch.{}):\n    pass\n"
#: code -> what is in its layers or its message, lines of the policy, and what else facts() takes.
SEEDED: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
    ("rule-unmatched", "c_fc", ("match: 'blocks.*.c_fc', recipe: fp8_rowwise",), {}),
    ("rule-unmatched", "output", (_IN8, "match: output, recipe: bf16"), {}),
    ("rule-unmatched", "blocks.12", ("match: 'blocks.12.*', recipe: bf16",), {}),
    ("rule-unmatched", "transformer.h", ("match: 'transformer.h.*', recipe: bf16",), {}),
    ("rule-unmatched", "blocks.9", ("/rollout: {layers: [{match: 'blocks.9.*', recipe: bf16}]}",), {}),
    ("rule-shadowed", "lm_head", ("match: '*', recipe: bf16", "match: lm_head, recipe: keep"), {}),
    ("rule-shadowed", "blocks.0.mlp", (_IN8, "match: 'blocks.0.mlp.*', recipe: bf16"), {}),
    ("layer-out-of-reach", "head", ("match: head, recipe: bf16",), {"report": HEADLESS}),
    ("layer-out-of-reach", "router", ("match: '*router', recipe: bf16",), {"report": MIXTURE}),
    ("layer-unnamed", "mlp.fc1", ("match: '*attn*', recipe: fp8_rowwise", _SEEN), {}),
    ("layer-unnamed", "mlp.fc2", ("match: '*attn*', recipe: bf16", _SEEN), {}),
    ("layer-unseen", "mlp.fc1", (_ALL8, _SEEN), {}),
    ("layer-unseen", "mlp.fc2", ("/default: bf16", _SEEN), {}),
    ("model-changed", "7 parameters", (_IN8, "/model: {class: GPT, parameters: 7, fingerprint: 'sha256:1'}"), {}),
    ("router-low-precision", "moe.router", (_ALL8,), {"report": MIXTURE}),
    ("router-low-precision", "moe.gate", ("/default: bf16",), {"report": MIXTURE}),
    ("head-low-precision", "lm_head", (_ALL8,), {}),
    ("head-low-precision", "lm_head", ("/default: nvfp4",), {"on": "b200"}),
    ("head-int8-tensor", "lm_head", ("/default: int8_tensor",), {}),
    ("head-int8-tensor", "lm_head", ("match: lm_head, recipe: int8_tensor",), {}),
    ("edge-block-fp4", "blocks.0", ("match: 'blocks.*', recipe: nvfp4",), {"on": "b200"}),
    ("edge-block-fp4", "blocks.3", ("match: 'blocks.3.*', recipe: nvfp4",), {"on": "b200"}),
    ("target-refuses", "blocks.{0-3}.mlp.fc1", (_IN8,), {"report": WIDE}),
    ("target-refuses", "multiple of 32", ("match: 'blocks.*', recipe: mxfp8",), {"report": WIDE, "on": "b200"}),
    ("target-refuses", "A100", (_IN8,), {"on": "a100"}),
    ("target-refuses", "H100", ("match: 'blocks.*', recipe: nvfp4",), {}),
    ("target-refuses", "H100", ("match: 'blocks.*', recipe: mxfp8",), {}),
    ("other-target", "not for h200", (_IN8, "/evidence: {target: b200}"), {"on": "h200"}),
    ("autocast-contradicts", "fp16", (_IN8, "/activations: bf16"), {"source": _AUTOCAST.format("float16")}),
    (
        "autocast-contradicts",
        "bf16",
        (),
        {"source": _AUTOCAST.format("bfloat16") + "Accelerator(mixed_precision='fp16')"},
    ),
    (
        "converted-twice",
        "convert_to_float8_training",
        (_IN8,),
        {"source": "from torchao.float8 import convert_to_float8_training\nconvert_to_float8_training(model)\n"},
    ),
    ("converted-twice", "fp8_autocast", (_IN8,), {"source": "with te.fp8_autocast(enabled=True):\n    pass\n"}),
    ("weights-cast", "bf16", (_IN8,), {"source": "model = Net().bfloat16()\n"}),
    ("weights-cast", "fp16", (_IN8,), {"source": "model.half()\n"}),
    ("fp16-unscaled", "the policy", ("/activations: fp16",), {}),
    ("fp16-unscaled", "the policy", ("match: 'blocks.*', recipe: fp16",), {}),
    ("fp16-unscaled", "autocast", (), {"source": _AUTOCAST.format("float16")}),
    ("tf32-off", "", (_IN8,), {"source": "torch.backends.cuda.matmul.allow_tf32 = False\n"}),
    ("tf32-off", "", (_IN8,), {"source": "torch.set_float32_matmul_precision('highest')\n"}),
    ("recompiles", "phases", (_IN8, "/execution: compile", "/phases: [{from: 0.8, default: bf16}]"), {}),
    ("silence-unknown", "head-low-precision", (_IN8, "/silenced: [{code: head-lowprecision, reason: x}]"), {}),
]


@pytest.mark.parametrize(
    ("code", "what", "lines", "more"), SEEDED, ids=[f"{c}-{i}" for i, (c, *_) in enumerate(SEEDED)]
)
def test_a_seeded_fault_is_found(
    code: str, what: str, lines: tuple[str, ...], more: dict[str, Any], tmp_path: Path
) -> None:
    found = only(findings(facts(*lines, folder=tmp_path, **more)), code)
    assert found
    assert any(what in f"{one.layers} {one.message} {one.data.get('what', '')}" for one in found)
    assert all(one.fix and one.severity in rules.SEVERITIES and "{" not in one.fix for one in found)


def test_seeds_are_forty_of_twelve_kinds_and_every_rule_has_a_finder_and_a_test() -> None:
    kinds = {code for code, *_ in SEEDED}
    assert len(SEEDED) >= 40
    assert len(kinds) >= 12
    assert RULES.keys() == rules._FINDERS.keys()
    # tokens-padded and other-instructions are below; what one step shows is in tests/trial/inside/judging
    assert RULES.keys() - kinds - set(CODES) == {"tokens-padded", "other-instructions"}


RIGHT: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    ((_IN8, "match: lm_head, recipe: bf16"), {}),
    (("match: lm_head, recipe: keep", "match: '*', recipe: fp8_rowwise"), {}),
    (
        ("match: '*router', recipe: keep", "match: '*gate', recipe: keep", "match: '*experts*', recipe: bf16"),
        {"report": MIXTURE},
    ),
    (("match: 'blocks.[12].*', recipe: nvfp4",), {"on": "b200"}),
    (("match: 'blocks.*', recipe: bf16", "/activations: bf16"), {"source": _AUTOCAST.format("bfloat16")}),
    ((), {"source": _AUTOCAST.format("float16") + "scaler = torch.amp.GradScaler()\n"}),
    ((), {"source": "m = torch.compile(m)\nre.compile('x')\n"}),
    (("/activations: fp16", "/loss_scaling: dynamic"), {}),
    (("/default: int8",), {"on": "cpu"}),
]


@pytest.mark.parametrize(("lines", "more"), RIGHT)
def test_what_is_right_has_no_finding(lines: tuple[str, ...], more: dict[str, Any], tmp_path: Path) -> None:
    found = findings(facts(*lines, folder=tmp_path, **more))
    assert [one for one in found if one.severity != "note" and one.code != "head-low-precision"] == []


def test_a_finding_is_placed_at_the_rule_or_where_the_layer_is_defined() -> None:
    here = facts(_IN8, "match: 'missing', recipe: bf16")
    (missing,) = only(findings(here), "rule-unmatched")
    line = int(missing.place.rpartition(":")[2])
    assert "missing" in here.text.splitlines()[line - 1]
    assert missing.to_json() | {"file": "policy.yaml", "line": line} == missing.to_json()
    defined = model_of(
        layer("blocks.0.fc", where="model.py:12"), layer("lm_head", flags=("head",), where="model.py:40")
    )
    (head,) = only(findings(facts(_ALL8, report=defined)), "head-low-precision")
    assert head.place == "model.py:40"


def test_a_router_is_lowered_by_fewer_bits_than_the_script_s_and_the_gate_of_a_shared_expert_chooses_nothing() -> None:
    half = model_of(*(replace(one, dtype="bf16") for one in MIXTURE.layers))
    fp32 = model_of(*MIXTURE.layers, layer("blocks.1.moe.shared_expert_gate", out=8, dtype="fp32"))
    narrow = model_of(*(replace(one, tunable=False, reason="too narrow") for one in MIXTURE.layers))
    assert only(findings(facts("/default: bf16", report=half)), "router-low-precision") == []
    assert only(findings(facts("/default: bf16", report=narrow)), "router-low-precision") == []
    assert only(findings(facts(_ALL8, report=half)), "router-low-precision")
    found = only(findings(facts("/default: bf16", report=fp32)), "router-low-precision")
    assert [name for one in found for name in one.layers] == ["blocks.0.moe.router", "blocks.1.moe.gate"]
    assert only(findings(facts("/default: fp32", report=fp32)), "router-low-precision") == []


def test_tokens_that_are_padded_are_one_note() -> None:
    odd = model_of(*(replace(one, gemms=tuple(replace(g, m=300) for g in one.gemms)) for one in PLAIN.layers))
    (note,) = only(findings(facts(_IN8, report=odd)), "tokens-padded")
    assert (note.data["tokens"], len(note.layers)) == (300, len(BLOCKS))
    assert only(findings(facts(_IN8)), "tokens-padded") == []


@pytest.mark.parametrize(
    ("found_with", "here", "said"),
    [
        ("int8: AVX512_VNNI; bf16: none", "int8: none; bf16: none", True),
        ("int8: none; bf16: none", "int8: none; bf16: none", False),
        ("", "int8: none; bf16: none", False),
        ("int8: none; bf16: none", "", False),
    ],
)
def test_a_policy_from_a_cpu_with_other_instructions_is_said(found_with: str, here: str, said: bool) -> None:
    policy = facts(f"/evidence: {{instructions: '{found_with}'}}").policy
    assert policy is not None
    assert bool(list(other_instructions(policy, here))) == said


def test_what_the_policy_silences_is_not_found_and_the_file_keeps_why() -> None:
    silenced = "/silenced: [{code: head-low-precision, reason: measured by hand, layers: 'lm_*'}]"
    here = facts(_ALL8, silenced)
    assert only(findings(here), "head-low-precision") == []
    assert here.policy is not None
    assert here.policy.to_dict()["silenced"][0]["reason"] == "measured by hand"
    other = facts(_ALL8, silenced.replace("lm_*", "blocks.*"))
    assert len(only(findings(other), "head-low-precision")) == 1


def test_a_searched_head_is_not_a_finding() -> None:
    seen = "/model: {class: GPT, parameters: 7, layers: ['blocks.0-3.attn.qkv', 'blocks.0-3.mlp.fc1', 'lm_head']}"
    assert only(findings(facts(_ALL8, seen, "/evidence: {seeds: 4}")), "head-low-precision") == []


def test_without_a_step_only_text_and_source_are_judged(tmp_path: Path) -> None:
    found = findings(Facts(facts(_IN8).policy, "policy.yaml", "schema: autoprec.policy/1", None, [], [target("h100")]))
    assert found == []


def test_the_examples_as_they_are_have_no_error() -> None:
    root = Path(__file__).resolve().parents[3] / "examples"
    for path in root.glob("*.py"):
        ast.parse(path.read_text())
        bad = findings(Facts(report=GPT, settings=settings_of([path.name], root), targets=[target("h100")]))
        assert [one for one in bad if one.severity == "error"] == [], path
