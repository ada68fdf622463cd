"""Run a training script that knows nothing of AutoPrec, under hooks, and measure it."""
