"""What a run finds out about its machine."""

import pytest
import torch

from common.environment import find_peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        # Its peak is lower than its name says.
        ("NVIDIA H100 NVL", "bf16", None),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        # A share of the 16-bit peak would mean nothing for products partly in 8 bits.
        ("NVIDIA H100 80GB HBM3", "fp8", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ],
)
def test_utilisation_is_of_a_known_peak_or_none(name, precision, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert find_peak_flops(torch.device("cuda"), precision) == peak
    assert find_peak_flops(torch.device("cpu"), precision) is None
