"""How a training loop is watched without changing it: steps, losses, times, memory, and which model is trained."""
