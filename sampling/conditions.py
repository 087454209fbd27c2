"""Functions that say what samples are drawn of: classes in turn, the classes and captions of the
data, or prompts.

Letters: B samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from common.encoded_text import EncodedText, TextEncoder
from common.errors import UserError
from data.loader import LatentLoader
from training.components import build_loader

Conditions = Callable[[Int[Tensor, "B"]], tuple[Int[Tensor, "B"], EncodedText | None]]
"""Function that maps a tensor of sample numbers to the labels of these samples and, for a model of
captions, to their captions."""


def deal_labels_in_turn(
    labels: Sequence[int], device: torch.device, text: EncodedText | None = None
) -> Conditions:
    """Returns a function that maps sample i to the label labels[i mod len(labels)], and likewise to
    a caption of `text`."""
    table = torch.tensor(labels, device=device)

    def deal(position: Tensor) -> tuple[Tensor, EncodedText | None]:
        captions = None if text is None else text.select(position % len(text.lengths))
        return table[position % len(table)], captions

    return deal


def deal_captions_in_turn(loader: LatentLoader, count: int) -> Conditions:
    """Returns a function that maps samples to the classes of the data in turn and, if the loader
    has captions, to at most `count` of these, from all parts of the set."""
    text = loader.captions and loader.captions.pick(count).to(loader.device)
    return deal_labels_in_turn(loader.spec.labels, loader.device, text)


def deal_labels_of_data(
    node: dict[str, Any], seed: int, batch_size: int, device: torch.device, level: str = "none"
) -> tuple[Conditions, list[str]]:
    """Returns a function that maps sample i to the label, and the caption, of the i-th training
    sample in the order of `seed`; and the texts of the captions, by number.

    Reads the latent set into host memory, not onto the device. `level` says what is read of the
    captions (see `LoaderArgs`).
    """
    loader = build_loader(node, seed, batch_size, torch.device("cpu"), text=level)

    def deal(position: Tensor) -> tuple[Tensor, EncodedText | None]:
        place = loader.state_dict()
        if place["samples_seen"] != int(position[0]):
            loader.load_state_dict(place | {"samples_seen": int(position[0])})
        batch = next(loader)
        return batch.labels.to(device), batch.text and batch.text.to(device)

    return deal, loader.captions.texts if loader.captions else []


def deal_held_out(
    node: dict[str, Any], device: torch.device, level: str
) -> tuple[Conditions, list[str]]:
    """Returns a function that maps sample i to the label and the first caption of held-out sample i
    mod their number; and the texts of the captions. Raises ValueError if there are none."""
    loader = build_loader(node, 0, 1, torch.device("cpu"), text=level)
    pairs = [(b.labels, b.text.numbers) for b in loader.held_out(256) if b.text is not None]
    if loader.captions is None or not pairs:
        raise UserError(
            "prompts=held_out: the data has no held-out captions; take prompts=train or a file."
        )
    table = loader.captions
    labels, numbers = map(torch.cat, zip(*pairs, strict=True))

    def deal(position: Tensor) -> tuple[Tensor, EncodedText | None]:
        rows = position.cpu() % len(labels)
        return labels[rows].to(device), table.gather(numbers[rows]).to(device)

    return deal, table.texts


def read_prompts(file: str) -> list[str]:
    """Reads a text file with a prompt on each line. Raises ValueError if it has none."""
    try:
        lines = Path(file).expanduser().read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"prompts={file} must be held_out, train, or a text file in UTF-8 with a prompt on "
            f"each line ({error})."
        ) from error
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"prompts={file} has no prompt; write one on each line.")
    return prompts


def encode_prompts(encoder: TextEncoder, prompts: Sequence[str], max_tokens: int) -> EncodedText:
    """Encodes prompts as the captions of a latent set are encoded. Prints a note for each prompt
    that is cut to `max_tokens` tokens."""
    for prompt in prompts:
        count = len(encoder.tokenize([prompt])[0])
        if count > max_tokens > 0:
            print(f"note: {prompt[:60]!r} has {count} tokens, and {max_tokens} are read")
    return encoder.encode(prompts, max_tokens)
