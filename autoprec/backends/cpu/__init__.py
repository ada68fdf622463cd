"""INT8 on CPUs, at the speed of its integer units.

oneDNN multiplies int8 matrices twice as fast as bf16 where the CPU has both, and two to six times as fast as fp32
(``torch._int_mm``). That is lost again where torch's own operators cast: each is a pass over fresh memory. So operands
are cast, and products rescaled, by the small C file beside this one, compiled once for the machine at hand.
"""
