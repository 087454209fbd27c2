"""Measures how well samples fit their texts: the CLIP score.

Letters: B samples, C channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from common.errors import UserError
from evaluation.features import resize_and_normalise
from models.images import to_uint8
from models.text_encoders import open_transformers
from training.drawing import Conditions

STATISTICS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""Mean and std per colour with which CLIP was trained (Radford et al. 2021)."""


class ClipScore:
    """Computes 100 times the cosine between a sample and its text in the space of a CLIP model
    (Hessel et al. 2021, https://arxiv.org/abs/2104.08718, without their factor 2.5).

    `path` is a folder or hub id with a model that transformers saved as safetensors, `conditions`
    are those of the samples, and `decode` turns latents into images. Raises UserError if the
    samples have no texts, or if the model cannot be opened.
    """

    def __init__(
        self, path: str, conditions: Conditions, decode: Callable[[Tensor], Tensor]
    ) -> None:
        if conditions.table is None:
            raise UserError(f"clip={path} is for a model of texts; leave it out.")
        self.texts = conditions.names
        self.decode = decode
        self.network, self.tokenizer, _, self.sha256 = open_transformers(
            "clip", path, kind="CLIPModel"
        )

    @torch.no_grad()
    def __call__(
        self, numbers: Int[Tensor, "B"], latents: Float[Tensor, "B C H W"]
    ) -> Float[Tensor, "B"]:
        """Returns the score of each sample; `numbers` are those of its texts."""
        network = self.network.to(latents.device)
        side = network.config.vision_config.image_size
        texts = [self.texts[number] for number in numbers.tolist()]
        images = torch.from_numpy(to_uint8(self.decode(latents)))
        x = resize_and_normalise(images.to(latents.device), side, STATISTICS)
        words = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        output = network(pixel_values=x, **words.to(x.device))
        return 100.0 * F.cosine_similarity(output.image_embeds, output.text_embeds)
