"""What to try next, and which policy to adopt: pure functions of what was measured.

Nothing here runs a trial, imports torch, starts a process or touches a file, so every decision can be replayed and
tested on numbers alone. The way through: :mod:`.problem` (what may be decided), :mod:`.scan` and :mod:`.table` (the
gradient error of each layer), :mod:`autoprec.policy.solver` (the fastest policy within an error budget),
:mod:`.sampler` (which policy to try next), :mod:`.metrics` (what a trial is judged by), :mod:`.shortlist` (what is
measured again), :mod:`.decision` (what is adopted), :mod:`.explain` and :mod:`.reasons` (why).
"""
