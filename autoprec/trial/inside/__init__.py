"""trial/inside."""
