"""Is the script's own precision sound: one real step, each 16-bit operator beside itself in FP32, and what is kept.

:mod:`.shadow` runs operators twice, :mod:`.held` looks at what outlives a step, :mod:`.forward` and :mod:`.loop` say
what was seen, :mod:`.judge` is the course of it in a process that trains.
"""
