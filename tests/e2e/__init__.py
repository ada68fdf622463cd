"""Whole commands in real processes, as a user types them."""
