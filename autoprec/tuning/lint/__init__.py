"""Findings: what is wrong with a policy, or with what a script says of precision, seen without training.

A policy is a list of globs, and a model changes under it: a layer is renamed and falls out of a glob, a hidden size
stops being a multiple of 16, a new router is taken by a rule for everything. All of that shows in one recorded step
(whose weights need no memory), in the policy's text and in the script's source. :mod:`~autoprec.tuning.lint.facts`
holds what is known; ``rules.yaml`` is a table of codes: how bad it is, the sentence, the fix;
:mod:`~autoprec.tuning.lint.rules` finds them; :mod:`~autoprec.tuning.lint.source` reads the script without running it.
``autoprec check`` takes its notes from the same table.
"""
