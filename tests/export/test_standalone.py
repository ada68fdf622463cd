"""The plain-PyTorch module computes what the policy computes, can be taken off, and can be copied."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autoprec.applying.policy import apply_policy
from autoprec.errors import AutoPrecError
from autoprec.export import EXPORTERS, export
from autoprec.policy import Policy
from tests.export.readers import load_source
from tests.export.toys import distance, gradients, one_rule, toy_model


@pytest.mark.parametrize("rule", [{}, {"gemms": {"wgrad": "bf16"}}], ids=["uniform", "wgrad in bf16"])
@pytest.mark.parametrize(
    "name", ["bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "fp8_block", "bf16_fp32_output"]
)
def test_the_plain_module_agrees_with_apply(name: str, rule: dict[str, Any]) -> None:
    policy = one_rule(name, **rule)
    source = export(policy, "python").files["precision_policy.py"]
    module = load_source(source, "precision_policy")
    ours, theirs, plain = toy_model(), toy_model(), toy_model()
    apply_policy(policy, ours, backend="emulated")
    module.apply(theirs)
    reference = gradients(plain)
    gap, effect = distance(gradients(theirs), gradients(ours)), distance(gradients(ours), reference)
    # the two differ by where products are rounded to bf16; both lie far nearer to each other than to float32
    assert gap <= max(0.35 * effect, 1e-6)


def test_the_plain_module_can_be_taken_off_again() -> None:
    policy = one_rule("fp8_rowwise").model_copy(update={"activations": "bf16"})
    module = load_source(export(policy, "python").files["precision_policy.py"], "precision_policy")
    model, plain = toy_model(), toy_model()
    keys = list(model.state_dict())
    module.apply(model)
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], nn.Linear)
    assert model(torch.ones(2, 160)).dtype is torch.float32  # operators.output
    assert "forward" in model.__dict__
    module.remove(model)
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))


def test_a_copy_of_a_model_under_the_plain_module_trains_by_itself() -> None:
    module = load_source(export(one_rule("fp8_delayed"), "python").files["precision_policy.py"], "precision_policy")
    model = module.apply(toy_model())
    other = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(other), strict=True))


def test_the_plain_module_saturates_nothing_in_evaluation() -> None:
    module = load_source(export(one_rule("fp8_delayed"), "python").files["precision_policy.py"], "precision_policy")
    model, plain = module.apply(toy_model()), toy_model()
    gradients(model)
    with torch.no_grad():
        for one in (model, plain):
            one[0].weight.mul_(8.0)  # as a merged adapter does
        x = torch.full((2, 160), 8.0)
        expected = plain.eval()(x)
        assert (model.eval()(x) - expected).norm() < 0.1 * expected.norm()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_runs_the_plain_module_in_evaluation() -> None:
    recipe = one_rule("fp8_rowwise").recipes["fp8_rowwise"]
    rules = [{"match": "*.linear?", "recipe": "r"}]
    policy = Policy.model_validate({"recipes": {"r": recipe}, "layers": rules})
    module = load_source(export(policy, "python").files["precision_policy.py"], "precision_policy")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 32)
    padding = torch.tensor([[False] * 4 + [True]] * 3)
    with torch.no_grad():
        before = model(x, src_key_padding_mask=padding)
        module.apply(model)
        found = model(x, src_key_padding_mask=padding)
        module.remove(model)
        after = model(x, src_key_padding_mask=padding)
    module.apply(model)
    assert torch.equal(found, model(x, src_key_padding_mask=padding))
    assert not torch.allclose(found[~padding], before[~padding], atol=1e-4)
    assert torch.equal(after, before)


def test_the_plain_module_returns_fp32_sums_where_the_policy_does() -> None:
    policy = one_rule("bf16_fp32_output").model_copy(update={"activations": "bf16"})
    done = export(policy, "python")
    assert [kept for kept in done.kept if kept.endswith("bf16 -> fp32")] != []
    module = load_source(done.files["precision_policy.py"], "precision_policy")
    ours, theirs, x = toy_model(), toy_model(), torch.randn(3, 160)
    apply_policy(policy, ours)
    module.apply(theirs)
    assert torch.equal(ours(x), theirs(x))
    assert "bf16 -> fp32" in {loss.what for loss in export(policy, "megatron", allow_lossy=True).losses}


class _Weighted(nn.Module):
    """Tokens, and a bag whose factors train."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.bag, head = nn.Embedding(9, 8), nn.EmbeddingBag(9, 8, mode="sum"), nn.Linear(8, 9)
        self.factors, head.weight = nn.Parameter(torch.rand(4, 5)), self.tokens.weight
        self.add_module("0", head)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        bag = self.bag(ids, per_sample_weights=self.factors)
        return self.get_submodule("0")(torch.tanh(self.tokens(ids) + bag[:, None]))


@pytest.mark.parametrize("activations", ["keep", "bf16"])
@pytest.mark.parametrize("default", ["keep", "fp8_rowwise"])
def test_the_plain_module_shrinks_the_gradient_of_look_ups_as_the_policy_does(default: str, activations: str) -> None:
    update = {"embedding_gradient": 0.1, "activations": activations}
    policy = (Policy() if default == "keep" else one_rule(default)).model_copy(update=update)
    done = export(policy, "python", allow_lossy=True)
    assert done.kept["embedding_gradient: 0.1"] == "the exported module, inside the model's forward"
    module = load_source(done.files["precision_policy.py"], "precision_policy")
    torch.manual_seed(0)
    ours, ids = _Weighted(), torch.randint(9, (4, 5))
    theirs, plain = copy.deepcopy(ours), copy.deepcopy(ours)
    apply_policy(policy, ours, backend="emulated")
    module.apply(theirs)
    for model in (ours, theirs, plain):
        model(ids).square().sum().backward()
    near = 1e-6 if default == "keep" else 0.1  # where products are rounded to bf16 differs, see above
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert float((one.grad - other.grad).norm()) <= near * float(one.grad.norm())
    whole, shrunk = plain.bag.weight.grad, theirs.bag.weight.grad
    assert whole is not None
    assert shrunk is not None
    assert 0.05 < float(shrunk.norm() / whole.norm()) < 0.2
    module.remove(theirs)
    theirs.zero_grad()
    theirs(ids).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(theirs.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in EXPORTERS if name not in ("python", "lightning")])
def test_an_export_that_does_not_shrink_it_says_so_by_name(name: str) -> None:
    policy = one_rule("fp8_tensorwise").model_copy(update={"embedding_gradient": 0.1})
    lost = [loss for loss in export(policy, name, allow_lossy=True).losses if loss.what == "embedding_gradient: 0.1"]
    assert [loss.instead for loss in lost] == ["the whole gradient: shrink it behind the embedding, in the model"]
    with pytest.raises(AutoPrecError, match=r"embedding_gradient: 0\.1"):
        export(policy, name)
