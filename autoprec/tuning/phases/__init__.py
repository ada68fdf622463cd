"""The phases of a search: variants, record, reference, sensitivity; then trials, finalists and duels in turns; answer.

Each runs trials and writes records; what follows from the records is decided in :mod:`autoprec.tuning.decide`.
"""
