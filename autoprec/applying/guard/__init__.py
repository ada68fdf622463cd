"""The long-run guard: watch a training under a policy, and fall back in the policy's own order."""

from autoprec.applying.guard.fallback import FALLBACKS, fall_back
from autoprec.applying.guard.watch import Breach, Guard

__all__ = ["FALLBACKS", "Breach", "Guard", "fall_back"]
