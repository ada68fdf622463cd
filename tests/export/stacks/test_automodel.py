"""NeMo Automodel: which of its sections is nearest, both ways, and configurations that it would refuse."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from torch import nn

from autoprec.errors import FileError, UnknownNameError
from autoprec.export import Request, export, exporter
from autoprec.export.importers import import_policy
from autoprec.policy import Policy, policy_from_dict, resolve
from autoprec.precision.recipes import BUILTIN_RECIPES
from tests.conformance.exporters import MODELS, POLICIES

MOE = (
    *(
        f"model.layers.{block}.{leaf}"
        for block in range(2)
        for leaf in ("self_attn.q_proj", "mlp.gate", "mlp.experts.gate_and_up_projs", "mlp.shared_experts.up_proj")
    ),
    "lm_head",
)

TE_BLOCK = {"linear": "te", "experts": "te", "dispatcher": "deepep", "te_fp8": {"recipe": "block"}}


def written(policy: Policy, layers: tuple[str, ...] = MOE) -> tuple[dict[str, Any], list[str]]:
    done = exporter("automodel").export(Request(policy, layers))
    return yaml.safe_load(done.files["automodel_precision.yaml"]), [loss.what for loss in done.losses if loss.match]


@pytest.mark.parametrize(
    "sections",
    [
        {"fp8": {"enabled": True, "recipe_name": "tensorwise", "filter_fqns": ["lm_head", "experts"]}},
        {"fp8": {"enabled": True, "recipe_name": "rowwise", "filter_fqns": []}},
        {
            "model": {
                "backend": {"linear": "te", "experts": "te", "dispatcher": "deepep", "te_fp8": {"recipe": "block"}}
            }
        },
        {"model": {"backend": {"linear": "te", "experts": "torch_mm", "te_fp8": {"recipe": "mxfp8"}}}},
        {
            "model": {
                "backend": {"linear": "torch", "experts": "te", "dispatcher": "hybridep", "te_fp8": {"recipe": "mxfp8"}}
            }
        },
        {"model": {"backend": {"linear": "te", "experts": "torch_mm_mxfp8", "te_fp8": {"recipe": "current"}}}},
        {"model": {"backend": {"linear": "torch", "experts": "torch_mm_mxfp8"}}},
        {"fp8": {"enabled": False}},
    ],
)
def test_it_comes_back_as_it_went_out_and_nothing_is_lost(sections: dict[str, Any]) -> None:
    first = import_policy(sections).policy
    document, lost = written(first)
    assert lost == []
    again = import_policy(document).policy
    assert resolve(again, MOE) == resolve(first, MOE)
    assert document.get("fp8", {}).get("recipe_name") == sections.get("fp8", {}).get("recipe_name")
    backends = [one.get("model", {}).get("backend", {}) for one in (document, sections)]
    assert backends[0].get("te_fp8") == backends[1].get("te_fp8")


def test_routers_and_experts_are_not_linear_layers_of_transformer_engine() -> None:
    te = {"linear": "te", "experts": "torch_mm_mxfp8", "te_fp8": {"recipe": "block"}}
    ran = {n: p.describe() for n, p in resolve(import_policy({"model": {"backend": te}}).policy, MOE).items()}
    assert ran["model.layers.0.mlp.gate"] == "keep"
    assert ran["model.layers.0.mlp.experts.gate_and_up_projs"] == "fprop: mxfp8, dgrad: mxfp8, wgrad: keep"
    assert ran["model.layers.0.mlp.shared_experts.up_proj"] == ran["lm_head"] == "fp8 block e4m3/e4m3/e4m3"


def test_layers_that_stay_high_count_for_more_than_how_the_others_are_scaled() -> None:
    recipes = {name: BUILTIN_RECIPES[name].to_dict() for name in ("bf16", "fp8_block")}
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "default": "fp8_block", "activations": "bf16"}
    policy: Policy = policy_from_dict({**document, "layers": [{"match": "*layers.0.*", "recipe": "bf16"}]})
    done = exporter("automodel").export(Request(policy, MODELS["llama"]))
    eight = yaml.safe_load(done.files["automodel_precision.yaml"])["fp8"]
    assert (eight["recipe_name"], eight["filter_fqns"]) == ("rowwise", ["layers.0"])
    assert [(loss.match, loss.instead.split(":")[0]) for loss in done.losses if loss.match] == [
        ("*", "torchao's rowwise recipe")
    ]
    everywhere: Policy = policy_from_dict(document)
    assert written(everywhere, MODELS["llama"]) == (
        {"model": {"torch_dtype": "float32", "backend": TE_BLOCK}},
        [],
    )
    unnamed = export(POLICIES["rowwise but the ends"], "automodel", allow_lossy=True)
    assert any("pass --layers" in line for line in unnamed.lossy)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"fp8": {"enabled": True}, "model": {"backend": {"te_fp8": {"recipe": "block"}}}}, "both ask for FP8"),
        (
            {"model": {"backend": {"linear": "torch", "experts": "gmm", "te_fp8": {"recipe": "block"}}}},
            "no layer of Trans",
        ),
        ({"fp8": {"enabled": True, "filter_fqns": "lm_head"}}, "not a list of parts"),
        ({"fp8": {"enabled": True, "filter_fqns": [""]}}, "not a list of parts"),
        ({"model": {"backend": {"te_fp8": "block"}}}, "te_fp8 is not a mapping"),
    ],
)
def test_what_automodel_would_refuse_is_refused(bad: dict[str, Any], says: str) -> None:
    with pytest.raises(FileError, match=says):
        import_policy(bad)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'rowwise'"):
        import_policy({"fp8": {"enabled": True, "recipe_name": "rowise"}})
    with pytest.raises(UnknownNameError, match=r"fp8 \(what a later version has is not read\): unknown key 'scope'"):
        import_policy({"fp8": {"enabled": True, "scope": "experts"}})
    with pytest.raises(UnknownNameError, match="valid: block, current, mxfp8"):
        import_policy({"model": {"backend": {"te_fp8": {"recipe": {"_target_": "Float8CurrentScaling"}}}}})


def test_experts_without_a_dispatcher_are_what_automodel_makes_of_them() -> None:
    te = {"linear": "te", "experts": "te", "dispatcher": "torch", "te_fp8": {"recipe": "block"}}
    done = import_policy({"model": {"torch_dtype": "float32", "backend": te}})
    assert done.notes[0] == "experts: te runs as torch_mm under dispatcher: torch"
    assert [note for note in done.notes[1:] if "every rule is optional" not in note] == []
    assert resolve(done.policy, MOE)["model.layers.0.mlp.experts.gate_and_up_projs"].keeps
    notes = import_policy({"model": {"backend": te}}).notes
    assert any("torch_dtype" in note for note in notes), "weights in bf16 are not in the policy"


def tree(names: tuple[str, ...]) -> nn.Module:
    """Return a model with a linear layer by each name."""
    root = nn.Module()
    for name in names:
        owner = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.add_module(leaf, nn.Linear(32, 32))
    return root


def test_automodels_own_classes_take_what_is_written_and_convert_the_same_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs where ``pip install --no-deps nemo-automodel`` and transformers are installed (0.7.0 was)."""
    fp8 = pytest.importorskip("nemo_automodel.components.quantization.fp8", exc_type=ImportError)
    backends = pytest.importorskip("nemo_automodel.components.models.common.utils", exc_type=ImportError)
    monkeypatch.setattr(fp8, "_has_cuda_capability", lambda *_: True)  # nothing is multiplied here
    kinds = set()
    for policy in POLICIES.values():
        document, _ = written(policy)
        backend = backends.BackendConfig(**document.get("model", {}).get("backend", {}))
        if "te_fp8" in document.get("model", {}).get("backend", {}):
            assert backend.te_fp8.recipe == document["model"]["backend"]["te_fp8"]["recipe"]
        config = fp8.FP8Config(**document.get("fp8", {}))
        model = fp8.apply_fp8_to_model(tree(MOE), config)
        converted = {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}
        meant = {name for name in MOE if not any(part in name for part in config.filter_fqns)}
        assert converted == (meant if config.enabled else set())
        kinds |= document.keys()
    assert kinds >= {"fp8", "model"}
