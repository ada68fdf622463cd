"""Policies in files: round trips, damage of every kind, and a file that never runs code."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.errors import PolicyError
from autoprec.policy import (
    CommunicationPolicy,
    Guard,
    LayerRule,
    ModelInfo,
    OperatorPolicy,
    OptimizerPolicy,
    Policy,
    dump_yaml,
    load_policy,
    parse_policy,
    policy_from_dict,
    resolve,
    save_policy,
)
from autoprec.precision.recipes import BUILTIN_RECIPES, GEMMS

NAME = st.text(min_size=1, max_size=10).filter(lambda text: text != "keep")
PLAIN = st.none() | st.booleans() | st.integers(-1000, 1000) | st.floats(allow_nan=False, allow_infinity=False) | NAME


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Any valid policy."""
    names = draw(st.lists(st.sampled_from(sorted(BUILTIN_RECIPES)), max_size=4, unique=True))
    recipe = st.sampled_from([*names, "keep"])
    rule = st.builds(
        LayerRule,
        match=NAME.filter(lambda text: "[" not in text),  # a bracket that nothing closes is refused
        recipe=recipe,
        gemms=st.dictionaries(st.sampled_from(GEMMS), recipe, max_size=2),
        optional=st.booleans(),
    )
    fp32 = st.sampled_from(["keep", "fp32"])
    return Policy(
        recipes={name: BUILTIN_RECIPES[name] for name in names},
        layers=tuple(draw(st.lists(rule, max_size=4))),
        default=draw(recipe),
        activations=draw(st.sampled_from(["keep", "bf16"])),
        operators=OperatorPolicy(
            softmax=draw(fp32), norm=draw(fp32), attention=draw(st.sampled_from(["keep", "bf16"]))
        ),
        optimizer=OptimizerPolicy(exp_avg=draw(st.sampled_from(["fp32", "bf16"]))),
        communication=CommunicationPolicy(gradients=draw(st.sampled_from(["fp32", "bf16"]))),
        model=draw(st.none() | st.builds(lambda n: ModelInfo.model_validate({"class": n, "parameters": 3}), NAME)),
        evidence=draw(st.dictionaries(NAME, PLAIN | st.lists(PLAIN, max_size=3), max_size=3)),
        guard=draw(st.none() | st.builds(Guard, metrics=st.just(("loss",)), fallback=st.just(("all bf16",)))),
    )


@given(policies())
def test_a_policy_survives_yaml_and_json(policy: Policy) -> None:
    assert parse_policy(dump_yaml(policy.to_dict())) == policy
    assert policy_from_dict(policy.to_dict()) == policy


@pytest.mark.parametrize("suffix", [".yaml", ".json", ".yml"])
def test_saving_and_loading(tmp_path: Path, suffix: str) -> None:
    policy = parse_policy(EXAMPLE)
    path = save_policy(policy, tmp_path / f"p{suffix}")
    assert load_policy(path) == policy
    assert (path.read_text()[0] == "{") == (suffix == ".json")


EXAMPLE = """\
schema: autoprec.policy/1
recipes:
  bf16:      {format: bf16}
  fp8_rowwise:
    format: fp8
    scaling: {granularity: row, scale: current, power_of_2: true}
    operands: {input: e4m3, weight: e4m3, grad_output: e4m3}
  fp8_delayed:
    format: fp8
    scaling: {granularity: tensor, scale: delayed, margin: 0, amax_history_len: 64, amax_compute_algo: max}
    operands: {input: e4m3, weight: e4m3, grad_output: e5m2}
layers:
  - {match: "transformer.h.*.mlp.c_fc", recipe: fp8_rowwise}
  - {match: "transformer.h.*.attn.c_attn", recipe: fp8_delayed, gemms: {wgrad: bf16}}
  - {match: "lm_head", recipe: bf16}
default: keep
activations: bf16
operators: {softmax: fp32, norm: fp32, embedding: fp32, loss: fp32, output: fp32}
optimizer: {weights: fp32, exp_avg: fp32, exp_avg_sq: fp32}
communication: {gradients: fp32}
loss_scaling: none
model: {class: GPT, parameters: 124439808, fingerprint: "sha256:00"}
evidence: {target: h100, source: modelled, reference: script, speedup: 1.31, divergence: 0.0007, seeds: 4}
guard: {metrics: [loss], thresholds: {loss: 0.01}, fallback: [bf16]}
"""


def test_the_emitted_text_is_one_a_person_would_write() -> None:
    text = dump_yaml(parse_policy(EXAMPLE).to_dict())
    assert "  bf16: {format: bf16}\n" in text
    assert "- {match: transformer.h.*.mlp.c_fc, recipe: fp8_rowwise}\n" in text
    assert "operands: {input: e4m3, weight: e4m3, grad_output: e5m2}\n" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "&" not in text, "no YAML anchors: the loader refuses them"


def test_a_file_cut_anywhere_is_valid_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    whole = EXAMPLE.encode()
    outcomes = {"valid": 0, "refused": 0}
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        try:
            load_policy(path)
            outcomes["valid"] += 1
        except PolicyError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > outcomes["valid"]


def test_a_flipped_bit_is_valid_or_refused_and_never_a_crash(tmp_path: Path) -> None:
    path, chance = tmp_path / "p.yaml", random.Random(0)
    refused = 0
    for _ in range(300):
        raw = bytearray(EXAMPLE.encode())
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(raw)
        try:
            load_policy(path)
        except PolicyError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch pwned']",
        "schema: autoprec.policy/1\nevidence: !!python/name:os.system ''",
        "schema: autoprec.policy/1\nevidence: {a: &a [1], b: *a}",
        "schema: autoprec.policy/1\nevidence: {a: .inf}",
        "schema: autoprec.policy/1\nschema: autoprec.policy/1",
        "[]",
        "schema: 1",
    ],
)
def test_hostile_policies(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError) as caught:
        parse_policy(text, where="evil.yaml")
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_missing_policy_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"nowhere\.yaml: no such file"):
        load_policy(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("default: bf16", "add this block: recipes: {bf16: {format: bf16}}"),
        (
            "default: bf16\nlayers: [{match: a, recipe: fp16, gemms: {wgrad: mine}}]",
            "add this block: recipes: {bf16: {format: bf16}, fp16: {format: fp16}}",
        ),
        ("recipes: {a: {format: fp32}}\ndefault: bf16", "add under recipes: bf16: {format: bf16}"),
        ("recipes: {mine: {format: fp32}}\ndefault: mines", "did you mean 'mine'?"),
        (
            "default: fp8_rowise",
            "'fp8_rowwise'? Then add this block: recipes: {fp8_rowwise: {format: fp8, scaling: {granularity: row,",
        ),
        ("recipes: {a: {format: fp32}}\ndefault: zzzzzz", "define it, or use one of a, keep"),
    ],
)
def test_a_recipe_that_is_not_defined_shows_the_line_to_add(text: str, fix: str) -> None:
    with pytest.raises(PolicyError, match="is not defined under recipes") as caught:
        parse_policy(f"schema: autoprec.policy/1\n{text}\n")
    assert fix in caught.value.fix


@pytest.mark.parametrize("name", BUILTIN_RECIPES)
def test_the_block_of_every_builtin_recipe_is_valid_as_it_is_shown(name: str) -> None:
    text = f"schema: autoprec.policy/1\ndefault: {name}\n"
    with pytest.raises(PolicyError) as caught:
        parse_policy(text)
    assert parse_policy(text + caught.value.fix.split("this block: ")[1]).recipes[name] == BUILTIN_RECIPES[name]


def test_names_of_thousands_of_characters_are_written_and_read(tmp_path: Path) -> None:
    name = "block." * 500 + "fc"
    rules = {"recipes": {"bf16": {"format": "bf16"}}, "layers": [{"match": name, "recipe": "bf16"}]}
    policy = policy_from_dict({"schema": "autoprec.policy/1", **rules})
    assert load_policy(save_policy(policy, tmp_path / "policy.yaml")) == policy
    assert not resolve(policy, [name])[name].keeps


@pytest.mark.parametrize(("schema", "upgrade"), [("autoprec.policy/2", True), ("autoprec.space/1", False)])
def test_a_policy_of_a_later_version_asks_for_an_upgrade(schema: str, upgrade: bool) -> None:
    with pytest.raises(PolicyError) as caught:
        policy_from_dict({"schema": schema})
    assert ("upgrade autoprec" in str(caught.value.fix)) == upgrade
