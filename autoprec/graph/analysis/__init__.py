"""From a list of operator calls to layers, classes and groups: every step a pure function of the record.

``linking`` finds the parameter behind each tensor and the forward GEMM behind each backward one, ``patterns`` the norms
and softmaxes that are written out, ``layers`` what a policy can name, ``groups`` what must move together;
``interpret`` puts them in order.
"""
