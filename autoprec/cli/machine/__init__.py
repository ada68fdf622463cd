"""cli/machine."""
