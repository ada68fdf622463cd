"""cli/scripts."""
