"""A denoiser with a fault, by the size of its micro-batch, planted by the variable PLANT: "slow:4,wrong:2,crash:1"."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor

from models.denoiser import Denoiser

FAULTS = {
    int(size): fault for fault, _, size in (w.partition(":") for w in os.environ.get("PLANT", "").split(",")) if size
}


class Planted(Denoiser):
    def forward(self, x: Tensor, *others: Any, **more: Any) -> Tensor:
        fault = FAULTS.get(len(x))
        if fault == "slow":
            time.sleep(0.1)
        if fault == "slower":
            time.sleep(0.3)
        if fault == "hang":
            time.sleep(3600)
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "memory":
            raise torch.OutOfMemoryError("planted")
        found = super().forward(x, *others, **more)
        return 1.1 * found if fault == "wrong" else found
