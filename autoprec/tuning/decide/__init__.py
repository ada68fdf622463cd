"""What to try next, and which policy to adopt: pure functions of what was measured.

Nothing here runs a trial, imports torch, starts a process or touches a file, so every decision can be replayed and
tested on numbers alone. The way through: :mod:`.problem` (what may be decided), :mod:`.scan` and :mod:`.table` (the
gradient error of each layer), :mod:`autoprec.policy.solver` (the fastest policy within an error budget),
:mod:`.sampler` (which policy to try next), :mod:`.metrics` (what a run is judged by), :mod:`.ranking` (which policy
gets another paired seed), :mod:`.decision` (what is adopted), :mod:`.sentences` (its reasons in words), :mod:`.explain`
(why each layer got its precision).
"""
