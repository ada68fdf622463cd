"""What is left of an operand after quantisation."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from autoprec.numerics.grouped import grouped_values
from autoprec.numerics.operand import QuantizedOperand
from autoprec.numerics.quantize import operand_values


def dequantize(operand: QuantizedOperand) -> Tensor:
    """Return what is left of the operand after quantisation, as float32 (a Hadamard transform is not undone)."""
    if operand.groups is not None and operand.scale is not None:
        # group and tensor scale are combined first, as torchao's NVFP4 tensors do
        combined = replace(operand, scale=None, groups=operand.groups.float() * operand.scale.reshape(()))
        return grouped_values(combined, torch.float32)
    values = operand_values(operand, torch.float32)
    return values if operand.scale is None else values * operand.scale
