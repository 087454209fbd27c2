"""The trained model that an adapter goes on: which file it is, whether it fits the data, and its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import nn

from data.loader import LatentSpec
from data.shards import file_sha256
from models.adapters import Adapter, attach
from training.checkpoint.find import weights_file
from training.config.build import build
from training.config.compose import Composed, compose
from training.pretrained import refuse_strangers, told_by, weights_for
from training.process.ranks import SINGLE, Ranks

CLOSE = 1e-6
"""Relative difference of statistics that are the same, written down by two programs."""


@dataclass(frozen=True)
class Base:
    """A weights file, and what of it the data changes."""

    file: Path
    new_classes: bool
    """Whether the data has classes that the model does not know; then the label table is trained too."""

    @cached_property
    def sha256(self) -> str:
        return file_sha256(self.file)


def with_model(composed: Composed) -> Composed:
    """The configuration with the model of `init_from`, where it says model=pretrained, and its normalisation.

    Other keys of `model` stay, and change the file's. ValueError for a file that is none of ours.
    """
    cfg, node = composed.cfg, dict(composed.cfg.model or {})
    if node.pop("of", None) is None:
        return composed
    file = weights_file(cfg.init_from, "init_from")
    refuse_strangers(file, told := told_by(file))
    given = {"model": told.model | node, "data": dict(cfg.data)}
    if cfg.data.get("normalisation") == "channel":
        given["data"]["normalisation"] = [told.spec.mean, told.spec.std]
    return composed._replace(cfg=replace(cfg, **given), source=composed.source | given)


def settled(words: list[str]) -> Composed:
    """`compose`, with model=pretrained read from its file."""
    return with_model(compose(words))


def find_base(init_from: str, spec: LatentSpec, ranks: Ranks = SINGLE) -> Base:
    """The base of a run on latents of `spec`, from the header of the file.

    ValueError if it was trained on other latents: made by another encoder, or normalised otherwise.
    """
    file = ranks.agreed(lambda: weights_file(init_from, "init_from").resolve())
    told, given = told_by(file), f"init_from={init_from}"
    if told.adapter is not None:
        raise ValueError(
            f"{given} is an adapter, not a model; merge it first: python -m scripts.export run_dir=<its run> "
            f"format=weights out=<file>.safetensors."
        )
    hashes = (told.spec.encoder_sha256, spec.encoder_sha256)
    if None not in hashes and hashes[0] != hashes[1]:
        raise ValueError(
            f"{given} was trained on latents of another encoder than the data; encode the images with that one."
        )
    pairs = list(zip_longest(told.spec.mean + told.spec.std, spec.mean + spec.std, fillvalue=math.inf))
    if not all(math.isclose(then, now, rel_tol=CLOSE, abs_tol=CLOSE) for then, now in pairs):
        raise ValueError(
            f"{given} was trained on latents normalised otherwise than the data's; use model=pretrained, which takes "
            f"the normalisation from there as well."
        )
    return Base(file, not set(spec.names) <= set(told.spec.names))


def load_base(model: nn.Module, spec: LatentSpec, base: Base) -> None:
    """Loads the weights of a base into a new model; rows of the label table go by the names of classes."""
    try:
        tensors, _ = weights_for(model, spec, base.file)
    except ValueError as error:
        raise ValueError(f"init_from: {error} Use model=pretrained, which builds the model of the file.") from error
    model.load_state_dict(tensors)


def put_on(model: nn.Module, node: dict[str, Any], new_classes: bool) -> None:
    """Freezes the model and puts the adapter on that the configuration node describes."""
    attach(model, build(node, "adapter", kind=Adapter), new_classes)
