"""Quantisation, the three GEMMs of a linear layer, low-precision optimizer state, gradient communication."""
