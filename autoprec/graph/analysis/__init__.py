"""graph/analysis."""
