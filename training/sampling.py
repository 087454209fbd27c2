"""Draws samples: from a model in training, and afterwards from a run or from a copied weights file.

Letters: N and B samples, C channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from accel.kernels.counter_noise import Purpose, counter_normal
from data.loader import LatentSpec
from models.autoencoders import Autoencoder
from models.denoiser import Denoiser
from models.images import to_uint8
from models.sampler import guided_velocity, sample
from training.checkpoint.find import weights_file
from training.config.compose import from_yaml, typed
from training.config.schema import SamplingConfig
from training.environment import pick_device
from training.pretrained import build_autoencoder, load_pretrained


def draw_latents(
    model: Callable[..., Tensor],
    spec: LatentSpec,
    labels: Int[Tensor, "B"],
    position: Int[Tensor, "B"],
    seed: int,
    sampling: SamplingConfig,
) -> Float[Tensor, "B C H W"]:
    """Latents as the autoencoder decodes them; the noise of a sample depends on `seed` and its `position` only."""
    noise = counter_normal(seed, Purpose.SAMPLE, position, (spec.channels, spec.height, spec.width))
    low, high = sampling.guidance_interval
    velocity = guided_velocity(model, labels, spec.num_classes, sampling.guidance, (low, high))
    return spec.denormalise(sample(velocity, noise, sampling.steps, sampling.solver, sampling.shift))


@dataclass(frozen=True)
class TrainedModel:
    """A trained denoiser with the autoencoder that decodes its latents."""

    model: Denoiser
    spec: LatentSpec
    autoencoder: Autoencoder
    sampling: SamplingConfig
    """How the run drew its own samples; the defaults where the weights came without their run."""
    file: Path
    device: torch.device

    def sample(
        self, labels: Sequence[int], seed: int = 0, batch_size: int = 64, **changes: Any
    ) -> UInt8[np.ndarray, "N H W 3"]:
        """Draws one image for each label. `changes` replace values of `sampling`, such as steps=50 or guidance=2.0.

        Equal arguments give equal images. ValueError for a label or a value that there is not.
        """
        if wrong := [label for label in labels if not 0 <= label < self.spec.num_classes]:
            raise ValueError(
                f"labels={list(labels)}: {wrong[0]} is no class of this run; it has 0 … {self.spec.num_classes - 1}."
            )
        if batch_size < 1 or not labels:
            raise ValueError(f"batch_size={batch_size} and the number of labels, {len(labels)}, must be at least 1.")
        sampling = typed(
            SamplingConfig, asdict(self.sampling) | changes, [f"{key}={value}" for key, value in changes.items()]
        )
        sampling.check()
        wanted, images = torch.tensor(labels, device=self.device), []
        for position in torch.arange(len(labels), device=self.device).split(batch_size):
            latents = draw_latents(self.model, self.spec, wanted[position], position, seed, sampling)
            images.append(to_uint8(self.autoencoder.decode(latents)))
        return np.concatenate(images)


def load_run(path: str | Path, encoder: str | None = None, device: str = "auto", key: str = "run_dir") -> TrainedModel:
    """Loads the averaged weights of a run folder, a checkpoint or a .safetensors file, ready to sample.

    `encoder` says where the autoencoder lies now, if it was moved; `key` is what messages call the path. ValueError if
    there are no such weights, if they are damaged, or if the autoencoder is another one.
    """
    chosen, file = pick_device(device), weights_file(str(path), key)
    model, spec = load_pretrained(file, chosen)
    config = file.parents[2] / "config.yaml" if file.parent.parent.name == "checkpoints" else None
    found = from_yaml(config.read_text()).get("sampling", {}) if config and config.is_file() else {}
    autoencoder = build_autoencoder(spec, chosen, encoder)
    return TrainedModel(model, spec, autoencoder, typed(SamplingConfig, found, []), file, chosen)
