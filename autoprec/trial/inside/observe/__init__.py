"""trial/inside/observe."""
