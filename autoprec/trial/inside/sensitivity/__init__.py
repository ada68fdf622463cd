"""Gradient errors of many policies on the same weights and batch.

:mod:`.scan` forks the process once per policy; where that is not safe (CUDA, process groups), :mod:`.replay` records
one training step (:mod:`.recorded_step`) and replays it under each policy, on all ranks alike (:mod:`.ranks`).
:mod:`.gradients` compares what they return with the gradients of the script as written.
"""
