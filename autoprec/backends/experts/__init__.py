"""Grouped GEMMs of experts in 3-D weights: FP8 with row scales on Hopper, MXFP8 on Blackwell."""

from autoprec.backends.experts.products import GroupedProducts

__all__ = ["GroupedProducts"]
