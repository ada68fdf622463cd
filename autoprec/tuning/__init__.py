"""The search: what is asked of trials, what follows from them, and what is kept of it.

``engine`` calls the ``phases`` in order; ``decide`` is the arithmetic on what they measured; ``study`` is what lies on
disk, ``workers`` where trials run. ``verify`` judges one policy by the same rules, ``transfer`` carries one over to a
bigger model, ``lint`` finds what is wrong with one without training.
"""
