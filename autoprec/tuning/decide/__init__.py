"""tuning/decide."""
