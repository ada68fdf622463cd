"""Commands that run a training script: search, inspect, estimate, run, check, verify, transfer, demo."""
