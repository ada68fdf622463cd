"""A policy on a live model, and off again, without replacing a module or a Parameter.

An optimizer holds the Parameters, hooks and checkpoints hold the modules, and a script may hold either in variables of
its own; so nothing is replaced. Instead a module changes its *class*: ``module.__class__`` becomes a subclass made for
the occasion, whose ``forward`` hands input, weight and bias to an *execution* kept in the module's ``__dict__``, where
neither ``state_dict`` nor ``parameters()`` looks. ``isinstance`` still holds, names stay, and taking the policy off is
setting the old class again, after which the model computes the same bits as before.

``units`` finds what a policy can decide about and names it; ``policy`` binds each to a backend (first, for all layers)
and then installs; ``swap`` changes classes. Some weights are multiplied by no module of theirs: ``raw_weights`` catches
functions that multiply by them, ``attention`` writes ``nn.MultiheadAttention`` out. Around the model's own forward,
``operators`` runs autocast and keeps softmax, norms and losses in float32. ``audit`` compares what was asked with what
ran; ``compiling`` is ``torch.compile`` as a choice; ``phases`` exchanges the policy during a run; ``guard/`` watches a
long run and falls back.
"""
