"""Time and memory of a training step on a target: roofline, calibrated by measurements."""
