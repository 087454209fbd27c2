"""TAEF2 as a model of diffusers; `scripts.export` copies it, with all that it needs, into the
exported folder."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderTiny
from diffusers.configuration_utils import register_to_config

from models.autoencoders import add_global_branch


class FastlatentAutoencoder(AutoencoderTiny):
    """AutoencoderTiny with the global branches of TAEF2, without which diffusers' own class decodes
    wrong colours.

    `sizes` are the arguments of AutoencoderTiny. `branches` names the blocks that have a branch,
    each with the shape (hidden channels, channels) of its first convolution.
    """

    @register_to_config
    def __init__(self, *, sizes: dict[str, Any], branches: dict[str, list[int]]) -> None:
        super().__init__(**sizes)
        for name, (hidden, channels) in branches.items():
            add_global_branch(self.get_submodule(name), hidden, channels)
