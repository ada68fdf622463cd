"""What devices reach, measured: this CPU as a search begins, and GPUs in dated data."""
