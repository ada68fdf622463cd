"""Commands that run a training script: search, inspect, estimate, sensitivity, run, check, verify, demo."""
