"""Search small, train big: a policy found on a proxy, for a model on which no trial can be afforded.

What a search learns is of two kinds. How much a layer's rounding disturbs the gradient is a matter of the layer's place
in the network, and a small model of the same design has the same places: :mod:`autoprec.graph.roles` reads them from
names (attention input, attention output, MLP input, ...; the i-th of n blocks), :mod:`.counterparts` finds for every
layer of the big model the layer of the proxy that stands where it stands, and :mod:`.law` says how errors change from
one size to the other. How much time a recipe saves is a matter of GEMM shapes, which the proxy does not have: so times
come from the cost model at the big model's own shapes. :mod:`.plan` joins the two: a rule that no longer pays is
dropped, and the knapsack of the search may spend the error that this leaves. :mod:`.spot` checks the outcome with a few
passes on the big model itself.
"""
