"""What low precision does to a linear layer: quantisation, and its three GEMMs.

A linear layer is one matmul in forward and two in backward. With input ``x [M, K]``, weight ``w [N, K]`` and the
gradient of the output ``g [M, N]`` (M tokens)::

    fprop   out         [M, N] = x   @ w.T      sums over K
    dgrad   grad_input  [M, K] = g   @ w        sums over N
    wgrad   grad_weight [N, K] = g.T @ x        sums over M

Six operands, three sums. A *recipe* says how each operand is stored: E4M3 has 3 mantissa bits and reaches 448, E5M2 has
2 and reaches 57344, so values are first multiplied by a *scale* that brings the largest magnitude (*amax*) of a tensor,
a row or a block to the largest value of the format, and the product is divided by it again. ``g`` is small and wide in
range, which is why it may take E5M2; it enters two GEMMs that sum over different axes, which is why row and block
scales quantise it twice, once for each. A plan chooses a recipe for each GEMM separately, because their errors differ:
wgrad averages rounding over thousands of tokens, dgrad passes it down to every layer below.

The way of one operand: ``quantize`` (what it becomes, by recipe) uses ``scaling`` (which scale, now or from past
steps), ``rounding`` (to which values) and ``grouped`` (block, MXFP8, NVFP4); ``gemm`` multiplies two of them; ``plan``
compiles a layer's recipes into steps; ``linear`` runs the steps under autograd, and ``execution`` holds what every way
of running a layer shares. ``one_dtype``, ``einsum``, ``delayed`` and ``sharded`` are for convolutions and recurrent
layers, einsums, scales that ranks share, and weights that are cut over ranks.
"""
