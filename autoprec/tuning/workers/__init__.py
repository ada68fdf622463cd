"""tuning/workers."""
