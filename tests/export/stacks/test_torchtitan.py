"""torchtitan: substrings that skip the right layers, and one recipe per run."""

from __future__ import annotations

from autoprec.export import Request, export, exporter
from autoprec.export.stacks.torchtitan import skip_list
from autoprec.testing.exporters import MODELS, POLICIES
from tests.export.readers import load_source


def test_torchtitan_substrings_do_not_catch_their_neighbours() -> None:
    layers = [f"layers.{i}.w" for i in range(12)]
    skip, stuck = skip_list(["layers.1.w"], [name for name in layers if name != "layers.1.w"])
    assert stuck == []
    assert [name for name in layers if any(part in name for part in skip)] == ["layers.1.w"]


def test_torchtitan_says_what_no_substring_separates() -> None:
    assert skip_list(["w"], ["w1"]) == ([], ["w"])


def test_torchtitan_without_layer_names_loses_the_rules() -> None:
    done = export(POLICIES["rowwise but the ends"], "torchtitan", allow_lossy=True)
    assert any("pass --layers" in line for line in done.lossy)


def test_the_converter_is_configured_with_the_main_recipe() -> None:
    done = exporter("torchtitan").export(Request(POLICIES["rowwise but the ends"], MODELS["llama"]))
    source = done.files["precision_torchtitan.py"]
    assert 'recipe_name="rowwise"' in source
    assert 'filter_fqns=["lm_head"]' in source
    assert [loss.what for loss in done.losses if loss.match] == []


def test_without_fp8_there_is_nothing_to_convert() -> None:
    done = exporter("torchtitan").export(Request(POLICIES["bf16"], MODELS["llama"]))
    assert load_source(done.files["precision_torchtitan.py"], "precision_torchtitan").converters() == []
