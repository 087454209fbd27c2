"""Tiny denoisers of every family, and inputs for them."""

from functools import partial

import torch

from models.denoiser import Denoiser
from models.mixers.attention import Attention
from models.mixers.bidirectional_ssd import BidirectionalSSD
from models.mixers.convolution import Convolution
from models.mixers.selective_scan import SelectiveScan
from models.mixers.zigzag_ssd import ZigzagSSD

LATENTS = {"channels": 4, "height": 32, "width": 32, "num_classes": 1000}
"""Sizes of ImageNet's latents at 256 pixels."""
FAMILIES = {
    "mamba": {"mixer": partial(BidirectionalSSD, expand=2, state_dim=16, columns=True)},
    "ssd_mlp": {"mixer": partial(BidirectionalSSD, expand=1, state_dim=16), "mlp_ratio": 8 / 3},
    "dit": {"mixer": Attention, "mlp_ratio": 8 / 3},
    "zigzag": {"mixer": partial(ZigzagSSD, expand=2, state_dim=16)},
    "mamba1": {"mixer": partial(SelectiveScan, state_dim=8)},
    "conv": {"mixer": Convolution, "mlp_ratio": 8 / 3},
    "hybrid": {
        "mixer": partial(BidirectionalSSD, expand=1, state_dim=16, columns=True),
        "mlp_ratio": 8 / 3,
        "attention": Attention,
        "attention_every": 2,
    },
    "dit_plain": {"mixer": partial(Attention, qk_norm=False), "mlp_ratio": 8 / 3},
    "dit_windows": {"mixer": partial(Attention, window=2), "mlp_ratio": 8 / 3},
}
"""Family -> what tells it from the others."""
SIZES = {
    "channels": 4,
    "height": 8,
    "width": 8,
    "num_classes": 3,
    "dim": 64,
    "depth": 2,
    "head_dim": 32,
    "patch_size": 2,
}


def make_denoiser(family, **changes):
    """An initialised tiny denoiser, always with the same weights; `changes` replace arguments."""
    torch.manual_seed(0)
    return Denoiser(**SIZES | FAMILIES[family] | changes)


def fill_zero_layers(model):
    """Draws the modulations and the head, which start at zero, so that every part matters."""
    internal = [] if model.internal is None else model.internal.children()
    for layer in (model.modulation, model.head, *internal):
        # drawn in fp32, so that the draws are the same whatever dtype holds them
        weight = torch.nn.init.normal_(torch.empty_like(layer.weight, dtype=torch.float32), std=0.2)
        with torch.no_grad():
            layer.weight.copy_(weight)
    return model


def assert_every_parameter_matters(model, output):
    """Runs the backward pass from an output, after which no gradient may be absent or zero."""
    output.square().sum().backward()
    dead = [n for n, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    assert dead == []


def make_inputs(model, batch=2):
    """Latents, times and labels for a denoiser, always the same."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = model.grid
    side = model.patch_size
    x = torch.randn(batch, model.channels, rows * side, columns * side, generator=generator)
    labels = torch.arange(batch) % (model.num_classes + 1)
    return x, torch.rand(batch, generator=generator), labels
