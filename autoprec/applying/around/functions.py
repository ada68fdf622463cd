"""Which functions of torch a policy computes in float32, which multiply, and which of them write attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Names of the functions of torch, Tensor, torch.nn.functional and torch.linalg, by operator class: the float32 list of
#: CUDA autocast (ATen/autocast_mode.h), and losses composed of it.
_NAMES = {
    "softmax": "softmax log_softmax softmin gumbel_softmax logsumexp",
    "norm": "layer_norm batch_norm group_norm instance_norm rms_norm local_response_norm normalize cosine_similarity "
    "norm vector_norm matrix_norm",
    "loss": "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div ctc_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss cosine_embedding_loss hinge_embedding_loss "
    "margin_ranking_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
    "soft_margin_loss",
    "embedding": "embedding embedding_bag",
}
#: The parts from which models write such operators by hand.
_PARTS = {
    "softmax": "exp expm1",
    "norm": "pow square rsqrt mean var std var_mean sum cumsum prod log log1p log2 log10 reciprocal acos asin "
    "cosh sinh tan erfinv cumprod dist pdist cdist renorm softplus interpolate "
    "__pow__ __rpow__ __rdiv__ __rtruediv__",
}


def _table() -> dict[Callable[..., Any], tuple[str, bool]]:
    """Return function -> (operator class, written by hand?)."""
    found: dict[Any, tuple[str, bool]] = {}
    for by_hand, table in ((False, _NAMES), (True, _PARTS)):
        for kind, names in table.items():
            for name in names.split():
                for owner in (torch, Tensor, F, torch.linalg):
                    # a trailing underscore (exp_) writes into a tensor whose dtype is what it is
                    function = getattr(owner, name, None)
                    if callable(function):
                        found.setdefault(function, (kind, by_hand))
    return found


#: What is computed in float32, by operator class.
FLOAT32_FUNCTIONS = _table()


#: What ``x ** 2``, ``2 ** x``, ``2 / x`` and ``x.norm()`` are looked up as: Dynamo does not find these methods, which
#: torch writes in Python, among the keys of a dictionary, and its guards do.
WRAPPED: dict[str, Callable[..., Any]] = {
    "pow": torch.pow,
    "__rpow__": torch.pow,
    "__rdiv__": torch.reciprocal,
    "norm": torch.norm,
}

#: What updates running statistics, which a model in 16 bits keeps in 16 bits.
RUNNING = frozenset({F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm})

#: Products that attention is written by hand with.
PAIRS = frozenset(
    {torch.matmul, torch.bmm, torch.baddbmm, torch.mm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm}
    | {Tensor.baddbmm, Tensor.mm}
)
#: What multiplies. On a CPU the FP16 versions are 20 to 100 times slower than float32, and so may be the bfloat16 ones
#: (3 to 40 times without bfloat16 units): then they are emulated.
PRODUCTS = PAIRS | {
    *(F.linear, F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention, F.bilinear),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    *(torch.addmm, torch.mv, Tensor.addmm, Tensor.mv, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
}
