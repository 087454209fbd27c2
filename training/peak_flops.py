"""Peak rates of accelerators, for model FLOPs utilisation (MFU)."""

from __future__ import annotations

import re

import torch

# Dense (no sparsity) 16-bit tensor-core rates in FLOP/s, from the vendors' data sheets.
PEAK_16_BIT = {
    "H200": 989e12,  # https://www.nvidia.com/en-us/data-center/h200/
    "H100 PCIe": 756e12,  # https://www.nvidia.com/en-us/data-center/h100/
    "H100": 989e12,
    "A100": 312e12,  # https://www.nvidia.com/en-us/data-center/a100/
    "A40": 149.7e12,  # https://www.nvidia.com/en-us/data-center/a40/
    "L40S": 362e12,  # https://www.nvidia.com/en-us/data-center/l40s/
    "A10": 125e12,  # https://www.nvidia.com/en-us/data-center/products/a10-gpu/
    "RTX 4090": 165.2e12,  # NVIDIA Ada GPU architecture white paper, bf16 with fp32 accumulation
    "RTX 3090": 71e12,  # NVIDIA Ampere GA102 white paper, bf16 with fp32 accumulation
}


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of `device` for 16-bit products; None where it is not known or products are not in 16 bits."""
    if device.type != "cuda" or precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(device)
    if "Laptop" in name or "NVL" in name:  # lower rates than the boards of the same name
        return None
    return next((peak for part, peak in PEAK_16_BIT.items() if re.search(rf"\b{part}\b", name)), None)
