"""applying."""
