"""Where trials run: hosts of this machine, one slot per GPU, or the actors of a Ray cluster."""
