"""A policy as a table: what each rule runs, GEMM by GEMM, and what is around the layers."""

from __future__ import annotations

from autoprec import Policy
from autoprec.policy import policy_from_dict
from autoprec.policy.table import policy_table

DOCUMENT = {
    "schema": "autoprec.policy/1",
    "recipes": {"bf16": {"format": "bf16"}, "fp8": {"format": "fp8", "scaling": {"granularity": "row"}}},
    "layers": [{"match": "*.fc", "recipe": "fp8", "gemms": {"wgrad": "bf16"}, "optional": True}],
    "default": "bf16",
    "activations": "bf16",
    "optimizer": {"exp_avg": "bf16"},
    "model": {"class": "GPT", "parameters": 1234567},
    "evidence": {"speedup": 2.0, "speedup_over_16bit": 1.25, "divergence": 0.0007, "source": "modelled"},
}


def test_rules_and_what_is_around_them() -> None:
    table = policy_table(policy_from_dict(DOCUMENT))
    assert table.title == "policy for GPT, 1,234,567 parameters"
    assert [row[:2] for row in table.rows] == [("*.fc (optional)", "fp8"), ("every other layer", "bf16")]
    assert table.rows[0][4] == "bf16"
    assert table.notes == (
        "activations: bf16",
        "optimizer: exp_avg bf16",
        "evidence (modelled): speedup over 16bit 1.25x, speedup 2.00x, divergence 0.070%",
    )


def test_without_a_rule_no_layer_is_another() -> None:
    (row,) = policy_table(policy_from_dict(DOCUMENT | {"layers": []})).rows
    assert row[:2] == ("every layer", "bf16")


def test_phases_are_not_left_out() -> None:
    later = [
        {"from": 0.85, "layers": [{"match": "*", "recipe": "bf16", "optional": True}], "loss_scaling": "none"},
        {"from": 0.9, "optimizer": {"exp_avg": "fp32"}},
    ]
    document = DOCUMENT | {"phases": later}
    notes = policy_table(policy_from_dict(document)).notes
    assert "from 85 % of the run on: layers * bf16; loss scaling none" in notes
    assert "from 90 % of the run on: optimizer as by default" in notes


def test_a_shrunk_embedding_gradient_is_told() -> None:
    document = DOCUMENT | {"embedding_gradient": 0.1, "phases": [{"from": 200, "embedding_gradient": 1.0}]}
    notes = policy_table(policy_from_dict(document)).notes
    assert "embedding gradient: 0.1" in notes
    assert "from step 200 on: embedding gradient 1.0" in notes
    assert not any("embedding" in note for note in policy_table(policy_from_dict(DOCUMENT)).notes)


def test_a_policy_prints_as_its_table_and_represents_itself_in_a_line() -> None:
    policy = policy_from_dict(DOCUMENT, cls=Policy)
    assert str(policy) == policy_table(policy).text()
    assert repr(policy).count("\n") == 0
    assert policy._repr_html_().count("<tr>") == 3


def test_the_copy_that_generates_is_not_left_out() -> None:
    section = {"layers": [{"match": "head", "recipe": "bf16"}], "activations": "fp16"}
    notes = policy_table(policy_from_dict(DOCUMENT | {"rollout": section})).notes
    assert "rollout: head bf16; activations fp16" in notes
    assert "rollout: as the script wrote it" in policy_table(policy_from_dict(DOCUMENT | {"rollout": {}})).notes
