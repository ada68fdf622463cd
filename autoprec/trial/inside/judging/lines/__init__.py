"""What single lines of a recorded step were seen to lose: positions, gathered sums, outcomes that are drawn."""
