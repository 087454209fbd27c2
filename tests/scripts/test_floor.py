"""The floor of a training step, which needs no GPU."""

import pytest
import torch

from accel.kernels.attention.qk_rope import fused_qk_rope
from common.config.compose import compose
from scripts.bench.__main__ import main as bench
from scripts.bench.floor import SETTING, Traffic, find_floor


def test_floors_of_size_b():
    """dit_b moves 116 kB a token and block besides its products, 78 bytes a parameter, and computes
    33 TFLOP in products: 30 + 3 + 42 ms."""
    ms = [
        find_floor(compose([*SETTING, f"model={family}_b"]).cfg, "h100")[0]["floor_ms"]
        for family in ("ssd_mlp", "dit", "mamba")
    ]
    assert ms == sorted(ms)
    assert ms[1] == pytest.approx(77.0, rel=0.1)


def test_the_command_prints_a_table_and_refuses_an_unknown_card(capsys):
    bench(["floor", "model=mamba_xs"])
    printed = capsys.readouterr().out
    assert "\nadd_norm " in printed
    assert "\nmamba_xs " in printed
    with pytest.raises(ValueError, match=r"card=h20: .* choose one of h100, h200"):
        bench(["floor", "card=h20"])


def test_values_are_not_read_to_rotate_queries_and_keys():
    qkv = torch.ones(2, 6, 3, 4, 8, requires_grad=True)
    with Traffic() as traffic:
        q, k, v = fused_qk_rope(qkv, *torch.ones(2, 8), None)
        (q + k + v).sum().backward()
    # Queries, keys and values have 1,536 bytes each, both weights 64. Forward, the kernel reads two
    # and writes two; backward, it reads three gradients and two inputs, and writes three gradients.
    assert traffic.bytes["qk_rope"] == 4 * 1536 + 64
    assert traffic.bytes["qk_rope_backward"] == 8 * 1536 + 2 * 64
