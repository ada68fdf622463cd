"""cli/policies."""
