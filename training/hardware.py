"""What GPUs can do, from the vendors' data sheets: dense 16-bit products (no sparsity), memory,
links.

Sources: nvidia.com/en-us/data-center/{h200,h100,a100,l40s,a40}, .../products/a10-gpu; for the RTX
4090 and 3090 the white papers of the Ada and Ampere architectures, with fp32 accumulation. GiB as
drivers report them, rounded down. Links between GPUs as collectives reach them: for Hopper the
table in torch/_inductor/comm_analysis.py (PyTorch 2.13); for A100 its data sheet's NVLink, 300 GB/s
a direction, at the share of 450 that Hopper reaches, and InfiniBand of 200 Gb/s; for cards without
NVLink PCIe, by rule of thumb.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

import torch

GIB = 2**30


class Card(NamedTuple):
    """One kind of GPU."""

    name: str
    """As the driver calls it, or a part of that."""
    half: float
    """FLOP/s of 16-bit products."""
    memory: float
    """Bytes."""
    intra: float
    """Bytes a second to a GPU of the same machine, one direction."""
    inter: float
    """Bytes a second to another machine."""


CARDS = {
    "h200": Card("H200", 989e12, 139 * GIB, 370e9, 50e9),
    "h100": Card("H100", 989e12, 79 * GIB, 370e9, 50e9),
    "h100_pcie": Card("H100 PCIe", 756e12, 79 * GIB, 50e9, 25e9),
    "a100": Card("A100", 312e12, 79 * GIB, 247e9, 25e9),
    "a100_40": Card("A100-SXM4-40GB", 312e12, 39 * GIB, 247e9, 25e9),
    "a100_pcie": Card("A100 80GB PCIe", 312e12, 79 * GIB, 25e9, 12e9),
    "a100_pcie_40": Card("A100-PCIE-40GB", 312e12, 39 * GIB, 25e9, 12e9),
    "l40s": Card("L40S", 362e12, 44 * GIB, 25e9, 12e9),
    "a40": Card("A40", 149.7e12, 44 * GIB, 25e9, 12e9),
    "a10": Card("A10", 125e12, 22 * GIB, 25e9, 12e9),
    "rtx4090": Card("RTX 4090", 165.2e12, 23 * GIB, 25e9, 12e9),
    "rtx3090": Card("RTX 3090", 71e12, 23 * GIB, 12e9, 12e9),
}


def card_called(name: str) -> Card | None:
    """The card of a driver's name, such as "NVIDIA H100 80GB HBM3"; None where its rates are not
    known."""
    # other rates than the boards of the same name
    if re.search(r"Laptop|NVL|MIG|\b(Ti|D)\b", name):
        return None
    fitting = [card for card in CARDS.values() if re.search(rf"\b{card.name}\b", name)]
    return max(fitting, key=lambda card: len(card.name), default=None)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of `device` for 16-bit products; None where it is not known or products are not
    in 16 bits.

    With fp8 some products run at one peak and the rest at another, so a share of either would
    mislead.
    """
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    card = card_called(torch.cuda.get_device_name(device))
    return card.half if card else None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def memory_of(device: torch.device) -> int:
    """Bytes of the GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
