"""tuning/decide/sampler."""
