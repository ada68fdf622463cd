"""The conformance suite on every exporter of ours, read back as the target would, and on one that lies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.export import EXPORTERS, Export, Request, exporter
from autoprec.policy import policy_from_dict
from tests.conformance.exporters import (
    MODELS,
    POLICIES,
    Executed,
    ExporterSuite,
    Settings,
    check_files,
    check_operators,
    differences,
)
from tests.export.readers import read

pytestmark = pytest.mark.filterwarnings("ignore")  # third-party libraries warn on import


class Ours(ExporterSuite):
    """One exporter of ours; the reader goes by its name."""

    def read(self, done: Export, request: Request) -> Executed:
        self.found = read(done, request)
        return self.found.layers

    def settings(self, done: Export, request: Request) -> Settings:
        return self.found.settings  # of the file that read() has just read


class TestPython(Ours):
    exporter = exporter("python")


class TestTorchao(Ours):
    exporter = exporter("torchao")


class TestTransformerEngine(Ours):
    exporter = exporter("transformer-engine")


class TestAccelerate(Ours):
    exporter = exporter("accelerate")


class TestMegatron(Ours):
    exporter = exporter("megatron")


class TestDlfwInspect(Ours):
    exporter = exporter("dlfw-inspect")


class TestLightning(Ours):
    exporter = exporter("lightning")


class TestMsAmp(Ours):
    exporter = exporter("msamp")


class TestTorchtitan(Ours):
    exporter = exporter("torchtitan")


class TestTorchaoFqn(Ours):
    exporter = exporter("torchao-fqn")


class TestAutomodel(Ours):
    exporter = exporter("automodel")


def test_every_exporter_is_checked() -> None:
    checked = {cls.exporter.name for cls in Ours.__subclasses__()}
    assert checked == set(EXPORTERS)


class Liar(ExporterSuite):
    """Says bf16 everywhere, and writes a file of nothing."""

    name, summary = "liar", "says bf16 everywhere"

    @property
    def exporter(self) -> Liar:  # type: ignore[override]
        return self

    def export(self, request: Request) -> Export:
        return Export(self.name, {"x.yaml": "a: 1\n"})

    def read(self, done: Export, request: Request) -> Executed:
        return {layer: dict.fromkeys(("fprop", "dgrad", "wgrad"), "high") for layer in request.layers}


def test_the_suite_catches_an_exporter_that_lies() -> None:
    liar, rowwise = Liar(), POLICIES["rowwise but the ends"]
    with pytest.raises(AssertionError, match="the policy says fp8 row current"):
        liar.test_what_it_lists_as_lost_is_what_is_lost([Request(rowwise, MODELS["vit"])])
    with pytest.raises(AssertionError, match=r"operators.softmax: fp32 is spoken of 0 times"):
        liar.test_what_it_lists_as_lost_is_what_is_lost([Request(POLICIES["bf16"], MODELS["vit"])])


def test_a_listed_loss_excuses_its_rule_alone() -> None:
    recipes = {"fp8": {"format": "fp8"}, "bf16": {"format": "bf16"}}
    layers = [{"match": "a", "recipe": "fp8"}, {"match": "b", "recipe": "fp8"}]
    document = {"schema": "autoprec.policy/1", "recipes": recipes, "layers": layers, "default": "bf16"}
    request = Request(policy_from_dict({**document, "activations": "bf16"}), ("a", "b"))
    done = exporter("torchao-fqn").export(request)
    executed = {name: dict.fromkeys(("fprop", "dgrad", "wgrad"), "high") for name in ("a", "b")}
    assert differences(request, done, executed) == []
    only_a = replace(done, losses=tuple(loss for loss in done.losses if loss.match == "a"))
    assert {line.split()[0] for line in differences(request, only_a, executed)} == {"b"}


def test_an_operator_that_is_not_spoken_of_is_found() -> None:
    request = Request(POLICIES["bf16"], MODELS["gpt"])
    done = exporter("torchao").export(request)
    assert check_operators(request, done) == []
    silent = replace(done, kept={})
    assert len(check_operators(request, silent)) == 5


def test_broken_files_are_caught() -> None:
    assert check_files(Export("x", {"a.py": "def ("}))
    assert check_files(Export("x", {"a.json": "{"}))
    assert check_files(Export("x", {"a.yaml": ""}))
    assert check_files(Export("x", {}))
