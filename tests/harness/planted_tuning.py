"""Denoisers with faults. The variable PLANT names the fault for each size of a micro-batch:
"slow:4,wrong:2"."""

import os
import time
from functools import partialmethod

import torch

from models.denoiser import Denoiser

FAULTS = {
    int(size): fault
    for fault, _, size in (w.partition(":") for w in os.environ.get("PLANT", "").split(","))
    if size
}


class Fixed(Denoiser):
    """Has 3 blocks without a key that says so."""

    __init__ = partialmethod(Denoiser.__init__, depth=3)


class Looking(Denoiser):
    """Reads a value, which fake tensors do not have."""

    def forward(self, x, *others, **more):
        return super().forward(x, *others, **more) * (1.0 if float(x.sum()) else 2.0)


class Planted(Denoiser):
    """Has the fault of the size of its batch."""

    def forward(self, x, *others, **more):
        fault = FAULTS.get(len(x))
        if fault == "slow":
            time.sleep(0.15)
        if fault == "memory":
            raise torch.OutOfMemoryError("planted")
        output = super().forward(x, *others, **more)
        return 1.1 * output if fault == "wrong" else output
