"""Low precision after the backward pass: weights, their gradients, optimizer state, and gradients on the wire.

AdamW holds 16 bytes for each weight: the weight, its gradient and two moments, 4 each; with 8 and 16 bits they are 6.
GEMM recipes change none of that, and these formats change no GEMM, so a policy decides the two apart. It is hard
because a training step moves a weight by about a thousandth of itself: stored in BF16, whose neighbours lie 0.4 to 0.8
% apart, most steps round back to where they came from. Each remedy is a format here: a scaled FP16 weight, rounding up
or down at random so that the mean is right (stochastic), keeping what rounding lost (Kahan), or a second copy
(master). A second moment in 8 bits stalls or flushes to zero in the same way, and then divides by epsilon.

``codecs`` encode and decode; a ``tensor`` of encoded values takes the place of a parameter's content or of an
optimizer's state; ``optimizer`` patches the optimizer a script already has, ``update`` is its arithmetic, ``weights``
exchanges the parameters. ``guard`` leaves out steps that are not finite, ``loss_scaling`` is FP16's, ``communication``
is DDP's all-reduce with few bits on the wire, and ``monitors`` watch for what a short loss curve does not show.
``stepping`` changes no format, only how the step is taken.
"""
