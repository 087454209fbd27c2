"""What GPUs can do, from the vendors' data sheets: dense products (no sparsity), memory, links.

Sources: nvidia.com/en-us/data-center/{h200,h100,a100,l40s,a40}, .../products/a10-gpu; for the RTX
4090 and 3090 the white papers of the Ada and Ampere architectures, with fp32 accumulation. GiB as
drivers report them, rounded down. Links between GPUs as collectives reach them: for Hopper the
table in torch/_inductor/comm_analysis.py (PyTorch 2.13); for A100 its data sheet's NVLink, 300 GB/s
a direction, at the share of 450 that Hopper reaches, and InfiniBand of 200 Gb/s; for cards without
NVLink PCIe, by rule of thumb.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from common.files import cache_folder
from common.text import as_json

GIB = 2**30


class Card(NamedTuple):
    """One kind of GPU. Rates in FLOP/s and bytes a second, `watts` at its power limit."""

    name: str
    """As the driver calls it, or a part of that."""
    fp8: float
    """Of a card without 8-bit products its 16-bit rate."""
    half: float
    tf32: float
    fp32: float
    memory: float
    """Bytes."""
    bandwidth: float
    intra: float
    """To a GPU of the same machine, one direction."""
    inter: float
    """To another machine."""
    host: float
    """To the host's memory."""
    watts: float
    measured: bool = False
    """Rates come from `doctor --measure` on this machine."""

    def rate(self, bits: int, tf32: bool) -> float:
        """FLOP/s of products whose factors have so many bits."""
        return {8: self.fp8, 16: self.half}.get(bits, self.tf32 if tf32 else self.fp32)


CARDS = {
    "h200": Card("H200", 1979e12, 989e12, 494e12, 67e12, 139 * GIB, 4.8e12, 370e9, 50e9, 50e9, 700),
    "h100": Card("H100", 1979e12, 989e12, 494e12, 67e12, 79 * GIB, 3.35e12, 370e9, 50e9, 50e9, 700),
    "h100_pcie": Card(
        "H100 PCIe", 1513e12, 756e12, 378e12, 51e12, 79 * GIB, 2.0e12, 50e9, 25e9, 50e9, 350
    ),
    "a100": Card(
        "A100", 312e12, 312e12, 156e12, 19.5e12, 79 * GIB, 2.04e12, 247e9, 25e9, 25e9, 400
    ),
    "a100_40": Card(
        "A100-SXM4-40GB",
        312e12,
        312e12,
        156e12,
        19.5e12,
        39 * GIB,
        1.555e12,
        247e9,
        25e9,
        25e9,
        400,
    ),
    "a100_pcie": Card(
        "A100 80GB PCIe", 312e12, 312e12, 156e12, 19.5e12, 79 * GIB, 1.935e12, 25e9, 12e9, 25e9, 300
    ),
    "a100_pcie_40": Card(
        "A100-PCIE-40GB", 312e12, 312e12, 156e12, 19.5e12, 39 * GIB, 1.555e12, 25e9, 12e9, 25e9, 250
    ),
    "l40s": Card("L40S", 733e12, 362e12, 183e12, 91.6e12, 44 * GIB, 864e9, 25e9, 12e9, 25e9, 350),
    "a40": Card(
        "A40", 149.7e12, 149.7e12, 74.8e12, 37.4e12, 44 * GIB, 696e9, 25e9, 12e9, 25e9, 300
    ),
    "a10": Card("A10", 125e12, 125e12, 62.5e12, 31.2e12, 22 * GIB, 600e9, 25e9, 12e9, 25e9, 150),
    "rtx4090": Card(
        "RTX 4090", 330.3e12, 165.2e12, 82.6e12, 82.6e12, 23 * GIB, 1008e9, 25e9, 12e9, 25e9, 450
    ),
    "rtx3090": Card(
        "RTX 3090", 71e12, 71e12, 35.6e12, 35.6e12, 23 * GIB, 936e9, 12e9, 12e9, 25e9, 350
    ),
}
RATES = {"fp8": "fp8_product_tflops", "half": "bf16_product_tflops", "tf32": "tf32_product_tflops"}
RATES |= {"fp32": "fp32_product_tflops"}


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


def rates_file(device: torch.device) -> Path:
    """Where `doctor --measure` keeps the rates of a device."""
    return cache_folder("rates") / f"{re.sub('[^A-Za-z0-9]+', '-', device_name(device))}.json"


def keep_rates(device: torch.device, rates: Mapping[str, float]) -> None:
    """Writes the rates that were measured of a device; OSError as the disk gives it."""
    rates_file(device).parent.mkdir(parents=True, exist_ok=True)
    rates_file(device).write_text(as_json(rates, indent=1) + "\n")


def this_card(device: torch.device, memory: float) -> Card | None:
    """The GPU of this machine at the rates that `doctor --measure` found, else at its data sheet's.

    None where neither is known, and for a CPU, whose step times cannot be told from two rates;
    `memory` in bytes.
    """
    if device.type != "cuda":
        return None
    sheet = card_called(device_name(device))
    try:
        found = {
            key: float(value) for key, value in json.loads(rates_file(device).read_text()).items()
        }
        fp32 = 1e12 * found["fp32_product_tflops"]
        bandwidth = 1e9 * found["copy_gb_s"]
        if not all(0.0 < value < math.inf for value in found.values()):
            raise ValueError
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return sheet._replace(memory=memory) if sheet else None
    rates = {field: 1e12 * found[name] if name in found else fp32 for field, name in RATES.items()}
    base = sheet or Card(
        device_name(device), fp32, fp32, fp32, fp32, memory, 0.0, 10e9, 1e9, 10e9, 0.0
    )
    return base._replace(**rates, memory=memory, bandwidth=bandwidth, measured=True)
