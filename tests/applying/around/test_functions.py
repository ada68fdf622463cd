"""The tables of functions are torch's own lists."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
import torch.nn.functional as F

from autoprec.applying.around.functions import FLOAT32_FUNCTIONS, PAIRS, PRODUCTS, RUNNING


def cuda_float32_names() -> set[str]:
    """Return the names in the float32 lists by which torch tests CUDA's autocast."""
    path = Path(torch.__file__).parent / "testing" / "_internal" / "autocast_test_lists.py"
    class_ = next(
        n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == "AutocastTestLists"
    )
    found = set()
    for node in ast.walk(class_):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr in ("torch_fp32", "nn_fp32", "methods_fp32"):
            found |= {row.elts[0].value for row in node.value.elts}
    return found


def test_the_float32_list_is_that_of_cuda_autocast() -> None:
    names = cuda_float32_names()
    assert len(names) > 45
    owners = (torch, torch.Tensor, F)
    missing = {n for n in names if not any(getattr(owner, n, None) in FLOAT32_FUNCTIONS for owner in owners)}
    assert missing == {"nll_loss2d"}  # which F.nll_loss calls


def test_what_multiplies_is_in_no_float32_list() -> None:
    assert PAIRS < PRODUCTS
    assert not PRODUCTS & FLOAT32_FUNCTIONS.keys()
    assert {FLOAT32_FUNCTIONS[function][0] for function in RUNNING} == {"norm"}
