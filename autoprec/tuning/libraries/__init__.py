"""Which library multiplies the quantised layers of what a search runs."""
