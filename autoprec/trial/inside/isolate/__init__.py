"""trial/inside/isolate."""
