"""Initialisation that layers share."""

from torch import nn


def init_linear(layer: nn.Linear) -> None:
    """Xavier's uniform weights (Glorot & Bengio 2010), and a bias of zero where there is one."""
    nn.init.xavier_uniform_(layer.weight)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
