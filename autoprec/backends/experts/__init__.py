"""Grouped GEMMs of experts in 3-D weights: FP8 with row scales on Hopper, MXFP8 on Blackwell."""
