"""What a training step costs on a target: time, memory, the verdict before a search, and calibration."""

from autoprec.cost.model import CostModel, StepEstimate
from autoprec.cost.scale import CostScale
from autoprec.cost.verdict import Verdict

__all__ = ["CostModel", "CostScale", "StepEstimate", "Verdict"]
