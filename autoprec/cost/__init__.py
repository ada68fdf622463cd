"""What a training step costs on a target: time, memory, and the verdict before a search.

The model is a roofline, one operator at a time: a GEMM takes the longer of its multiplications at the rate the device
reaches for that format and of its bytes at the memory bandwidth, plus a launch. Eight bits halve both terms, but every
operand must be cast first, which only moves memory: a pass for the amax, one to write the codes, another where the
GEMM wants a transposed copy. So a layer gains where it is large enough for the halved GEMM to repay the casts, and a
policy gains on a model by the share of its step that lies in such layers. Launches and attention stay what they were.
"""

from autoprec.cost.estimate import StepEstimate
from autoprec.cost.model import CostModel
from autoprec.cost.scale import CostScale
from autoprec.cost.verdict import Verdict, judge

__all__ = ["CostModel", "CostScale", "StepEstimate", "Verdict", "judge"]
