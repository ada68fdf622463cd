"""What the report draws has a rule in its style sheet."""

from __future__ import annotations

import re
from pathlib import Path

from autoprec.graph.report import GraphReport
from autoprec.precision.recipes import BUILTIN_RECIPES
from autoprec.reports import html
from autoprec.reports.html import html_report
from autoprec.tuning.study.records import SearchResult
from autoprec.tuning.study.run import Run
from tests.reports.conftest import rehearsal

CSS = Path(html.__file__).with_name("style.css").read_text(encoding="utf-8")
#: Classes without a look of their own: kinds of rows, verdicts and numbers, for whoever restyles the page.
PLAIN = {"preset", "search", "finalist", "noise", "adopt", "tick"}


def _classes(document: str) -> set[str]:
    return {name for value in re.findall(r'class="([^"]*)"', document) for name in value.split()}


def test_every_class_of_the_page_has_a_rule(result: SearchResult, records: list[Run], graph: GraphReport) -> None:
    used = _classes(html_report(result, records, graph)) | _classes(html_report(*rehearsal(), graph))
    assert {name for name in used - PLAIN if not re.search(rf"\.{re.escape(name)}\b", CSS)} == set()


def test_every_format_of_a_recipe_has_its_colour() -> None:
    for format_ in {recipe.format for recipe in BUILTIN_RECIPES.values()}:
        assert f".f-{format_}" in CSS


def test_every_colour_variable_is_defined_for_light_and_dark() -> None:
    light, dark = re.findall(r":root\{(.*?)\}", CSS, re.S)[:2]
    used = set(re.findall(r"var\(--([a-z]+)\)", CSS)) - {"c"}  # c is a curve's own
    for theme in (light, dark):
        assert used <= set(re.findall(r"--([a-z]+):", theme))
