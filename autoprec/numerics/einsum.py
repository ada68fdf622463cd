"""An einsum of an input and a weight, read as a batch of linear layers.

The letters of ``"btc,chd->bthd"`` fall into four kinds: summed (c: in both operands, not in the output), features
(h, d: weight and output), tokens (b, t: input and output) and batch (in all three, such as experts). With the weight as
``[batch, features, summed]`` and the input as ``[batch, tokens, summed]`` it is one linear layer per batch entry.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EinsumProduct:
    """The letters of an equation by kind, and of its three terms."""

    x: str
    weight: str
    out: str
    batch: str
    tokens: str
    features: str
    summed: str

    @classmethod
    def parse(cls, equation: str, x_dims: int, weight_dims: int) -> EinsumProduct | None:
        """Return the product an equation of (input, weight) describes, or None when it is not a matrix product.

        Args:
            equation: of ``torch.einsum``, e.g. ``bsd,hd->bsh``.
            x_dims, weight_dims: number of dimensions of input and weight.
        """
        terms, arrow, out = equation.replace(" ", "").partition("->")
        x, comma, weight = terms.partition(",")
        if not (arrow and comma) or "," in weight or "..." in weight:
            return None
        if "..." in x:
            free = [c for c in string.ascii_letters if c not in equation]
            spelled = "".join(free[: x_dims - len(x.replace("...", ""))])
            x, out = x.replace("...", spelled), out.replace("...", spelled)
        if "." in x + out or len(x) != x_dims or len(weight) != weight_dims:
            return None
        if any(len(set(term)) != len(term) for term in (x, weight, out)) or not set(out) <= set(x + weight):
            return None
        batch = "".join(c for c in weight if c in x and c in out)
        tokens = "".join(c for c in x if c in out and c not in weight)
        features = "".join(c for c in weight if c in out and c not in x)
        summed = "".join(c for c in weight if c in x and c not in out)
        if not (features and summed) or len(batch) + len(tokens) + len(summed) != len(x):
            return None
        if len(batch) + len(features) + len(summed) != len(weight):
            return None
        return cls(x, weight, out, batch, tokens, features, summed)

    def run(self, x: Tensor, weight: Tensor, linear: Callable[[Tensor, Tensor, None], Tensor]) -> Tensor:
        """Compute the product through ``linear(input [T, K], weight [N, K], None) -> [T, N]``, once per batch entry.

        Args:
            x: the input, of as many dimensions as the equation says.
            weight: the weight, likewise.
            linear: multiplies matrices; see above.
        """
        sizes = dict(zip(self.x, x.shape, strict=True)) | dict(zip(self.weight, weight.shape, strict=True))
        shape = {kind: [sizes[c] for c in kind] for kind in (self.batch, self.tokens, self.features, self.summed)}
        batches, inner = prod(shape[self.batch]), prod(shape[self.summed])
        rows = _arranged(x, self.x, self.batch + self.tokens + self.summed).reshape(batches, -1, inner)
        columns = _arranged(weight, self.weight, self.batch + self.features + self.summed).reshape(batches, -1, inner)
        parts = [linear(a, b, None) for a, b in zip(rows.unbind(0), columns.unbind(0), strict=True)]
        made = (parts[0].unsqueeze(0) if batches == 1 else torch.stack(parts)).reshape(
            shape[self.batch] + shape[self.tokens] + shape[self.features]
        )
        return _arranged(made, self.batch + self.tokens + self.features, self.out)


def _arranged(x: Tensor, letters: str, wanted: str) -> Tensor:
    return x if letters == wanted else x.permute([letters.index(c) for c in wanted])


def reversed_terms(equation: str) -> str:
    """Return the same equation with its operands in the other order."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    return f"{','.join(reversed(terms.split(',')))}{arrow}{out}"


def is_matrix_product(arguments: tuple[object, ...]) -> bool:
    """Say whether the arguments of ``torch.einsum`` are two tensors and a product that :class:`EinsumProduct` reads."""
    if len(arguments) != 3:
        return False
    equation, first, second = arguments
    if not (isinstance(equation, str) and isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    if EinsumProduct.parse(equation, first.ndim, second.ndim) is not None:
        return True
    return EinsumProduct.parse(reversed_terms(equation), second.ndim, first.ndim) is not None
