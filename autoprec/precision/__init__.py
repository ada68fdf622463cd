"""Number formats, recipes and devices as frozen data: no torch, no decision, each figure with its source.

A *format* is how one value is stored (e4m3: 4 exponent bits, 3 mantissa bits, 448 at most). A *recipe* is how a GEMM
uses one: the format of each operand, and which values share a scale (granularity), taken from this step's amax or an
earlier one's (delayed). A *target* is what a device multiplies, and how fast at best.
"""
