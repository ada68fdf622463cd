"""The half of a trial that runs in the user's own process, loaded at the moment the script imports torch.

The script waits at its first training step; a trial goes on from there under a policy, and reports what it measured.
"""
