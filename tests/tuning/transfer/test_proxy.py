"""What a study left behind of the model that its policy was found on."""

from pathlib import Path

from autoprec.policy import Policy, policy_from_dict, save_policy
from autoprec.support.files import write_json
from autoprec.tuning.transfer.proxy import Proxy, find_study
from tests.tuning.models import gpt


def policy(*rules: tuple[str, str], default: str = "bf16") -> Policy:
    recipes = {
        "bf16": {"format": "bf16"},
        "fp8_rowwise": {"format": "fp8", "scaling": {"granularity": "row", "power_of_2": True}},
        "mxfp8": {"format": "mxfp8"},
    }
    layers = [{"match": glob, "recipe": recipe} for glob, recipe in rules]
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": layers, "default": default}
    return policy_from_dict(document | {"activations": "bf16", "evidence": {"target": "h100", "gradient_error": 0.02}})


def study(folder: Path, found: Policy) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / "graph.json", gpt().to_json())
    (folder / "study.db").touch()
    save_policy(found, folder / "policy.yaml")
    return folder


def test_rules_are_resolved_over_the_small_model() -> None:
    found = Proxy.of(policy(("*.mlp.*", "fp8_rowwise")), gpt())
    assert found.choices["h.0.mlp.c_fc"] == "fp8_rowwise"
    assert (found.rules["h.0.mlp.c_fc"], found.rules["lm_head"]) == (0, -1)
    assert found.choices["lm_head"] == "bf16"


def test_a_study_is_found_beside_its_policy_and_by_what_it_answered(tmp_path: Path) -> None:
    found = policy(("*.mlp.*", "fp8_rowwise"))
    folder = study(tmp_path / "autoprec-runs" / "small", found)
    study(tmp_path / "autoprec-runs" / "other", policy(("*", "mxfp8")))
    path = save_policy(found, tmp_path / "policy.yaml")
    assert find_study(found, folder / "policy.yaml", ()) == folder
    assert find_study(found, path, (tmp_path / "autoprec-runs",)) == folder
    assert find_study(policy(("*.attn.*", "mxfp8")), path, (tmp_path / "autoprec-runs",)) is None
