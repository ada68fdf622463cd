"""Rates measured on a device: whole linears, a copy and launches of a GPU, or a micro-benchmark of this CPU."""
