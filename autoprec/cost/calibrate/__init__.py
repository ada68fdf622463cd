"""Rates measured on a device: a few GEMMs, casts and launches of a GPU, or a micro-benchmark of this CPU."""
