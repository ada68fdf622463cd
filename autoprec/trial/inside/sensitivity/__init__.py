"""Gradient errors of many policies on the same weights and batch.

:mod:`.replay` records one training step (:mod:`.recorded_step`) and plays it again under each policy, on all ranks
alike (:mod:`.ranks`). :mod:`.gradients` compares what they return with the gradients of the script as written.
"""
