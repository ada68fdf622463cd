"""tuning/phases."""
