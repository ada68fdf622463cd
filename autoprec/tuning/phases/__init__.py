"""The phases of a search, in the order they run: reference, sensitivity, trials, finalists, answer.

Each runs trials and writes records; what follows from the records is decided in :mod:`autoprec.tuning.decide`.
"""
