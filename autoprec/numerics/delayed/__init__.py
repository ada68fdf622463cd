"""Delayed scales over a run: when a step is over, over which ranks, and what a repeated forward uses."""
