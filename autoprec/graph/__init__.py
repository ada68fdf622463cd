"""What operators a training step has, how sensitive each is, and which layers a policy can decide about."""
