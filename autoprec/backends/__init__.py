"""Who runs a GEMM, and what each can run, with a reason for every no."""
