"""cost/calibrate."""
