"""Denoisers with faults. The variable PLANT names the fault for each size of a micro-batch:
"slow:4,wrong:2"."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from torch import Tensor

from models.denoiser import Denoiser

FAULTS = {
    int(size): fault
    for fault, _, size in (w.partition(":") for w in os.environ.get("PLANT", "").split(","))
    if size
}


class Fixed(Denoiser):
    """Has a depth that no key sets."""

    def __init__(
        self,
        *,
        channels: int,
        height: int,
        width: int,
        num_classes: int,
        dim: int,
        head_dim: int,
        patch_size: int,
        mixer: Any,
        mlp_ratio: float,
        drop_path: float,
    ):
        image = {"channels": channels, "height": height, "width": width, "num_classes": num_classes}
        sizes = {
            "dim": dim,
            "depth": 3,
            "head_dim": head_dim,
            "patch_size": patch_size,
            "mlp_ratio": mlp_ratio,
        }
        super().__init__(**image, **sizes, mixer=mixer, drop_path=drop_path)


class Looking(Denoiser):
    """Reads a value, which fake tensors do not have."""

    def forward(self, x: Tensor, *others, **more) -> Tensor:
        return super().forward(x, *others, **more) * (1.0 if float(x.sum()) else 2.0)


class Planted(Denoiser):
    """Has the fault of the size of its batch."""

    def forward(self, x: Tensor, *others, **more) -> Tensor:
        fault = FAULTS.get(len(x))
        if fault == "slow":
            time.sleep(0.15)
        if fault == "memory":
            raise torch.OutOfMemoryError("planted")
        output = super().forward(x, *others, **more)
        return 1.1 * output if fault == "wrong" else output
