"""The class swap: everything of a module but its forward stays."""

from __future__ import annotations

import copy
import copyreg
import gc
import io
import pickle
import pickletools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from autoprec import Policy
from autoprec.applying import swap
from autoprec.applying.policy import remove_policy
from autoprec.applying.swap import execution_of, root_of, swapped_base
from autoprec.precision.recipes import BUILTIN_RECIPES


def bf16(**more: object) -> Policy:
    return Policy.model_validate({"recipes": {"b": BUILTIN_RECIPES["bf16"]}, "default": "b", **more})


class Tagged(nn.Linear):
    tag = "mine"

    def extra_repr(self) -> str:
        return "tagged"


def test_subclasses_keep_attributes_methods_and_repr() -> None:
    model = nn.Sequential(Tagged(8, 8))
    bf16().apply(model)
    assert isinstance(model[0], Tagged)
    assert type(model[0]).__name__ == "Tagged"
    assert (model[0].tag, swapped_base(model[0])) == ("mine", Tagged)
    assert repr(model[0]) == "Tagged(tagged, precision=(bf16))"
    remove_policy(model)
    assert repr(model[0]) == "Tagged(tagged)"
    assert type(model[0]) is Tagged


def test_parametrised_weights_are_computed_anew_in_each_forward() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)))
    policy = bf16()
    policy.apply(model)
    x = torch.randn(4, 8)
    before = model(x)
    with torch.no_grad():
        model[0].parametrizations.weight.original0.mul_(2)
    after = model(x)
    assert torch.allclose(after - model[0].bias, 2 * (before - model[0].bias), atol=0.1)
    after.sum().backward()
    assert policy.audit(model).ok


def test_a_root_that_is_itself_a_layer() -> None:
    model = nn.Linear(8, 8)
    policy = bf16(activations="bf16")
    policy.apply(model)
    x = torch.randn(4, 8, requires_grad=True)
    out = model(x)
    assert out.dtype is torch.float32
    out.sum().backward()
    assert policy.audit(model).ok
    remove_policy(model)
    assert type(model) is nn.Linear
    assert execution_of(model) is None
    assert root_of(model) is None


def test_a_forward_replaced_on_the_root_instance_is_wrapped_and_given_back() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    original = model.forward

    def replaced(x: torch.Tensor) -> torch.Tensor:
        return original(x) + 1

    model.forward = replaced
    policy = bf16(activations="bf16")
    policy.apply(model)
    model(torch.randn(4, 8)).sum().backward()
    assert policy.audit(model).operators["activations"]["executed"] == "bf16"
    remove_policy(model)
    assert model.forward is replaced


def test_an_optimizer_built_before_or_after_trains_the_same_parameters() -> None:
    results = []
    for before in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters()) if before else None
        bf16(activations="bf16").apply(model)
        optimizer = optimizer or torch.optim.AdamW(model.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)


def test_a_pickle_says_that_it_leaves_the_policy_out_and_only_then() -> None:
    policy = bf16()
    for whole in (True, False):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        policy.apply(model)
        with pytest.warns(UserWarning, match=r"pickled without its policy.*policy\.apply\(model\) again") as said:
            loaded = pickle.loads(pickle.dumps(model if whole else model[0]))
        assert len(said) == 1  # not once a layer
        assert execution_of(loaded) is root_of(loaded) is None
    copy.deepcopy(model)
    policy.remove(model)
    pickle.dumps(model)


def test_a_pickle_is_read_with_weights_only_where_its_classes_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    bf16().apply(model)
    with pytest.warns(UserWarning, match="copyreg._reconstructor and object among the safe globals"):
        torch.save(model, tmp_path / "model.pt")
    found = torch.serialization.get_unsafe_globals_in_checkpoint(str(tmp_path / "model.pt"))
    assert not [name for name in found if "autoprec" in name]
    classes = [nn.Sequential, nn.Linear]
    with torch.serialization.safe_globals(classes):  # the process that saved it: as for a model without a policy
        assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=True)[0].weight, model[0].weight)
    torch.serialization.clear_safe_globals()
    with torch.serialization.safe_globals([*classes, copyreg._reconstructor, object]):  # type: ignore[attr-defined]
        loaded = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(loaded[0].weight, model[0].weight)


class Counted(nn.Sequential):
    """Says itself what of it is pickled."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "saved": True}


def test_a_pickle_names_nothing_of_autoprec() -> None:
    model = Counted(nn.Linear(8, 8), Tagged(8, 8))
    model[0].forward = model[0].forward  # as accelerate stores one on the instance
    bf16(activations="bf16").apply(model)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pickle.dump(model, stream)
    names = {str(arg) for _, arg, _ in pickletools.genops(stream.getvalue()) if isinstance(arg, str)}
    assert "Tagged" in names
    assert not [name for name in names if "autoprec" in name.lower()]
    loaded = pickle.loads(stream.getvalue())
    assert (type(loaded), type(loaded[1]), loaded.saved) == (Counted, Tagged, True)
    assert loaded(torch.ones(1, 8)).dtype is torch.float32


def test_classes_live_no_longer_than_the_models_that_have_them() -> None:
    def once() -> None:
        class Local(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = Tagged(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.inner(x)  # type: ignore[no-any-return]

        model = Local()
        bf16(activations="bf16").apply(model)
        assert type(model).__qualname__ == Local.__qualname__

    gc.collect()
    before = len(swap._CLASSES)
    for _ in range(5):
        once()
    gc.collect()
    assert len(swap._CLASSES) <= before


@pytest.mark.parametrize("name", ["bf16", "fp8_rowwise"])
def test_a_parametrisation_may_be_removed_under_a_policy(name: str) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    policy = Policy.model_validate({"recipes": {"r": BUILTIN_RECIPES[name]}, "default": "r"})
    policy.apply(model)
    x = torch.randn(4, 8)
    before = model(x)
    torch.nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert list(model[0]._parameters) == ["bias", "weight"]
    policy.apply(model)
    assert torch.equal(model(x), before)
    policy.remove(model)
    assert type(model[0]) is nn.Linear


class Extractor(torch.fx.GraphModule):
    """Exchanges its graph in ``train()`` and ``eval()``, as what torchvision's ``create_feature_extractor`` makes."""

    def __init__(self, root: nn.Module, training: Any, evaluating: Any) -> None:
        super().__init__(root, training)
        self.graphs = {True: training, False: evaluating}

    def train(self, mode: bool = True) -> Any:
        if mode != self.training:
            self.graph = self.graphs[mode]
        return super().train(mode)


@pytest.mark.parametrize("activations", ["keep", "bf16"])
def test_a_graph_module_is_recompiled_under_a_policy(activations: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * 2 if self.training else self.fc(x)

    plain = Net()
    made = Extractor(plain, torch.fx.Tracer().trace(plain.train()), torch.fx.Tracer().trace(plain.eval()))
    policy = Policy.model_validate(
        {"activations": activations, "default": "int8", "recipes": {"int8": {"format": "int8"}}}
    )
    own, x = type(made), torch.randn(8, 16)
    policy.apply(made)
    policy.apply(plain)  # of the same layer
    trained = made.train()(x)
    assert torch.equal(made.eval()(x) * 2, trained)
    copied = copy.deepcopy(made)
    assert torch.equal(copied.train()(x), trained)
    assert torch.equal(made(x) * 2, trained)  # whose code is not that of its copy
    policy.remove(made)
    assert type(made) is own
    assert torch.equal(made.train()(x), plain.fc(x) * 2)
