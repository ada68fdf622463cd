"""Following a run: gradient errors are measured again on the live model, and layers reassigned where it matters."""

from autoprec.applying.following.follow import Following, Look, following_of, stop_following

__all__ = ["Following", "Look", "following_of", "stop_following"]
