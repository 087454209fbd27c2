"""A model of one small block, with a registered operator whose kernel has the fault that the
variable PLANT names.

The process that tries kernels imports this module to load the block, so the fault is there too.
"""

import os
import signal
import time

import torch
from torch import nn

from accel.kernels.registry import OPERATORS, Operator, register
from common.errors import UserError

CALLS = []


def definition(x):
    return x * x.sigmoid()


def kernel(x):
    """The definition with the fault of this process."""
    y = definition(x)
    fault = os.environ.get("PLANT", "")
    CALLS.append(fault)
    if fault == "wrong":
        return y * 1.01
    if fault == "unwritten":
        y = torch.empty_like(y)
        y[:-1] = definition(x[:-1])
    if fault == "changing":
        return y * (1.0 + 1e-6 * len(CALLS))
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(3600)
    if fault == "unfit":
        raise UserError("planted")
    return y


def as_launched(x):
    """Stands for a launch of the kernel, of which only the time counts."""
    if os.environ.get("PLANT") == "slow":
        time.sleep(0.05)
    return definition(x)


def unfused(x):
    time.sleep(0.005)
    return definition(x)


def backward(dy, x):
    gate = x.sigmoid()
    return dy * gate * (1.0 + x * (1.0 - gate))


register("planted(Tensor x) -> Tensor", as_launched, "planted.launch")
register("planted_backward(Tensor dy, Tensor x) -> Tensor", backward, "none.none")
OPERATORS["planted"] = Operator(definition, kernel)
OPERATORS["planted_backward"] = Operator(backward, backward)


class Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.ops.fastlatent.planted(x)

    @staticmethod
    def backward(ctx, dy):
        return torch.ops.fastlatent.planted_backward(dy, *ctx.saved_tensors)


class PlantedBlock(nn.Module):
    """Keeps the block contract; `fused_scan` chooses its activation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.fused_scan = self.fused_conv = False
        self.residual_in_fp32 = True

    def forward(self, branch, gate, residual, cond):
        if os.environ.get("PLANT") == "memory" and not self.fused_scan and len(branch) > 4:
            raise torch.OutOfMemoryError("planted")
        x = self.linear(branch + cond[:, 0].unsqueeze(1))
        x = Fused.apply(x) if self.fused_scan else unfused(x)
        return x, gate, residual + gate.unsqueeze(1) * branch


class PlantedModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PlantedBlock() for _ in range(3))

    def forward(self, samples=2):
        branch = torch.zeros(samples, 5, 16)
        cond = torch.zeros(samples, 3, 16)
        state = branch, torch.ones(samples, 16), torch.zeros_like(branch)
        for block in self.blocks:
            state = block(*state, cond)
