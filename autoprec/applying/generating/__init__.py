"""The other side of reinforcement learning: the copy of a model that generates, and what a policy says of it."""
