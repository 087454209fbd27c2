"""An adapter under the fused kernels: they compute between the adapted layers, and pass gradients
to all of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from accel.trial import switch
from models.adapters import Lora, attach, find_trained_parameters
from tests.harness.operators import assert_near
from tests.harness.steps import tiny_training


@pytest.mark.parametrize("family", ["ssd_mlp", pytest.param("zigzag", marks=pytest.mark.slow)])
def test_fused_kernels_pass_every_factor_its_gradient(family):
    found = []
    for keys in ((), ("fused_add_norm", "fused_conv", "fused_scan")):
        model = tiny_training(family, "model.depth=1").model
        for key in keys:
            switch(model, key, True)
        torch.manual_seed(0)
        attach(model, Lora(rank=2))
        for name, parameter in find_trained_parameters(model).items():
            if name.endswith("lora_B"):
                nn.init.normal_(parameter, std=0.05)
        x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
        model(x, torch.full((2,), 0.5), torch.zeros(2, dtype=torch.int64)).square().sum().backward()
        found.append({name: p.grad for name, p in find_trained_parameters(model).items()})
    plain, fused = found
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0.0
        assert_near(fused[name], gradient, factor=10.0)
