"""`model=pretrained`: the model, and the normalisation of its latents, that a weights file describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def from_file(cfg: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """The keys of a configuration that the header of `init_from` settles, `model` and `data`.

    Other keys of `model` stay, and change the file's; `data.normalisation` among `words` stays what it is. ValueError
    without such a file.
    """
    if cfg["init_from"] is None:
        raise ValueError("model=pretrained is the model of init_from, which is not set; add init_from=<weights file>.")
    from training.checkpoint.find import weights_file
    from training.pretrained import told_by  # with torch, so not at the top

    told = told_by(weights_file(cfg["init_from"], "init_from"))
    data = dict(cfg["data"])
    if "normalisation" in data and not any(word.startswith("data.normalisation=") for word in words):
        data["normalisation"] = [told.spec.mean, told.spec.std]
    return {"model": told.model | cfg["model"], "data": data}
