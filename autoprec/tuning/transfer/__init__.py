"""A policy found on a small model, for a big one on which no trial can be afforded.

How much a layer's rounding disturbs the gradient is a matter of the layer's place in the network, and a small model of
the same design has the same places: :mod:`autoprec.graph.roles` reads them from names (attention input, attention
output, MLP input, ...; the i-th of n blocks), and :mod:`.counterparts` finds for every layer of the big model the layer
of the small one that stands where it stands. How much time a recipe saves is a matter of GEMM shapes, which the small
model does not have: so times come from the cost model at the big model's own shapes, and :mod:`.plan` drops a rule that
no longer pays. :mod:`.spot` holds the outcome against the limit by a few passes on the big model itself.
"""
