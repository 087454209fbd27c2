"""Measures how well samples fit their captions: the CLIP score.

Letters: B samples, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from common.errors import UserError
from common.files import hash_file
from common.libraries import silence_libraries
from evaluation.features import import_attribute
from models.autoencoders import find_folder
from models.images import to_uint8
from training.conditions import Conditions

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and std per colour with which CLIP was trained (Radford et al. 2021)."""


class ClipScore:
    """Computes 100 times the cosine between a sample and its caption in the space of a CLIP model
    (Hessel et al. 2021, https://arxiv.org/abs/2104.08718, without their factor 2.5).

    `path` is a folder or hub id with a model that transformers saved as safetensors, `conditions`
    are those of the samples, and `decode` turns latents into images. Raises ValueError if the
    samples have no captions, or if the model cannot be opened.
    """

    def __init__(
        self, path: str, conditions: Conditions, decode: Callable[[Tensor], Tensor]
    ) -> None:
        if conditions.captions is None:
            raise UserError(f"clip={path} is for a model of captions; leave it out.")
        self.texts = conditions.names
        self.decode = decode
        folder: Path = find_folder(
            "clip", path, ["*.json", "*.txt", "model.safetensors"], "openai/clip-vit-base-patch32."
        )
        model = import_attribute("clip", "transformers", "CLIPModel")
        tokenizer = import_attribute("clip", "transformers", "AutoTokenizer")
        options = {"local_files_only": True}
        try:
            with silence_libraries():
                self.tokenizer = tokenizer.from_pretrained(folder, **options)
                network = model.from_pretrained(folder, use_safetensors=True, **options)
        except Exception as error:  # transformers raises many kinds of errors
            raise UserError(f"clip={path} cannot be read ({error}); download it again.") from error
        self.network: Any = network.float().eval().requires_grad_(False)
        self.sha256 = hash_file(folder / "model.safetensors")

    @torch.no_grad()
    def __call__(
        self, numbers: Int[Tensor, "B"], latents: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, "B"]:
        """Returns the score of each sample; `numbers` are those of its captions."""
        network = self.network.to(latents.device)
        side = network.config.vision_config.image_size
        texts = [self.texts[number] for number in numbers.tolist()]
        images = torch.from_numpy(to_uint8(self.decode(latents)))
        x = images.to(latents.device).permute(0, 3, 1, 2).float()
        x = F.interpolate(x, (side, side), mode="bicubic", antialias=True).clamp(0.0, 255.0)
        mean, std = (x.new_tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
        words = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        output = network(pixel_values=(x / 255.0 - mean) / std, **words.to(x.device))
        return 100.0 * F.cosine_similarity(output.image_embeds, output.text_embeds)
