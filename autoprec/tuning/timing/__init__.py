"""Step times of policies that can be compared: taken beside each other, within minutes."""
