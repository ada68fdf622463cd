"""Einsums as linear layers: the same numbers as torch, and equations that are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from autoprec.numerics.einsum import EinsumProduct

SIZES = {"b": 2, "t": 3, "c": 4, "d": 5, "h": 6, "e": 3}


@pytest.mark.parametrize(
    ("equation", "calls"),
    [
        ("btc,cd->btd", 1),
        ("btc,dc->btd", 1),
        ("btc,chd->bthd", 1),
        ("bthd,hdc->btc", 1),
        ("btc,cd->dbt", 1),
        ("c,cd->d", 1),
        ("ebc,ecd->ebd", 3),
        ("bec,edc->ebd", 3),
        ("b e c , e d c -> b e d", 3),
    ],
)
def test_products(equation: str, calls: int) -> None:
    torch.manual_seed(0)
    left, right = equation.replace(" ", "").split("->")[0].split(",")
    x, weight = (torch.randn(*(SIZES[c] for c in term)) for term in (left, right))
    product = EinsumProduct.parse(equation, x.ndim, weight.ndim)
    seen = []

    def linear(a, b, bias):
        seen.append(b.shape)
        return F.linear(a, b, bias)

    torch.testing.assert_close(product.run(x, weight, linear), torch.einsum(equation, x, weight))
    assert len(seen) == calls


def test_an_ellipsis_stands_for_tokens() -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    product = EinsumProduct.parse("...c,dc->...d", 3, 2)
    torch.testing.assert_close(product.run(x, weight, F.linear), torch.einsum("...c,dc->...d", x, weight))


@pytest.mark.parametrize(
    "equation",
    [
        "btc,cd->bd",  # t is summed in the input alone
        "btc,cd->bt",  # d is summed in the weight alone
        "bc,bc->bc",  # no sum
        "bc,dc",  # implicit output
        "bcc,cd->bd",  # a diagonal
        "bc,cd,de->be",  # three operands
        "bc,...c->b...",  # dimensions of the weight left open
        "bc,cd->bde",  # an index from nowhere
    ],
)
def test_what_is_no_matrix_product_is_left_alone(equation: str) -> None:
    left, _, right = equation.partition("->")[0].partition(",")
    assert EinsumProduct.parse(equation, len(left), len(right.replace("...", "xx"))) is None
