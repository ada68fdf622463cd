"""trial/driver."""
