"""Whether each GEMM computes what its recipe says: a step of the script, native beside emulated."""
