"""The table of what broke once names tests that exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults.points import POINTS

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("number", POINTS)
def test_every_point_has_its_tests(number: int) -> None:
    _, tests = POINTS[number]
    assert tests
    for test in tests:
        file, _, name = test.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert name in names, test
