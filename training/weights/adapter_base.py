"""The trained model that an adapter goes on: which file it is, whether it fits the data, and its
weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from common.errors import UserError
from common.files import hash_file
from data.loader import LatentSpec
from models.adapters import Adapter, attach
from training.checkpoint.load import find_checkpoints, find_weights_file
from training.config.build import build
from training.config.compose import Composed, compose
from training.config.schema import TrainConfig
from training.distributed.ranks import SINGLE, Ranks
from training.weights.pretrained import (
    Description,
    build_described,
    fit_weights,
    read_description,
    read_tensors,
    refuse_foreign_targets,
)

STATISTICS_TOLERANCE = 1e-6
"""Relative difference of statistics that are the same, written down by two programs."""


@dataclass(frozen=True)
class Base:
    """A weights file, and what of it the data changes."""

    file: Path
    new_classes: bool
    """Whether the data has classes that the model does not know; then the label table is trained
    too."""

    @cached_property
    def sha256(self) -> str:
        return hash_file(self.file)


def insert_pretrained(composed: Composed) -> Composed:
    """The configuration with the model of `init_from`, where it says model=pretrained, and its
    normalisation.

    A run that goes on has both from its own checkpoint. Other keys of `model` stay, and change the
    file's. ValueError for a file that is none of ours, or describes another model than it holds.
    """
    cfg = composed.cfg
    node = dict(composed.cfg.model or {})
    if node.pop("of", None) is None:
        return composed
    if (own := find_own_checkpoint(cfg)) is not None:
        refuse_foreign_targets(own, told := read_description(own))
    else:
        file, told = read_base_model(str(cfg.init_from))
        with build_described(file, told, read_tensors(file).values()):
            pass
    given = {"model": told.model | node, "data": dict(cfg.data)}
    if cfg.data.get("normalisation") == "channel":
        given["data"]["normalisation"] = [told.spec.mean, told.spec.std]
    return composed._replace(cfg=replace(cfg, **given), source=composed.source | given)


def compose_pretrained(words: list[str]) -> Composed:
    """`compose`, with model=pretrained read from its file."""
    return insert_pretrained(compose(words))


def find_own_checkpoint(cfg: TrainConfig) -> Path | None:
    """The weights in the newest checkpoint that a run goes on from, and that can be read; None for
    one that starts."""
    if cfg.resume == "never":
        return None
    found = find_checkpoints(cfg.run_dir) if cfg.run_dir else []
    if not found and cfg.resume != "auto":
        found = find_checkpoints(cfg.resume)
    for folder in reversed(found):
        try:
            read_description(folder / "ema.safetensors")
        except ValueError:  # `restore` tells of the damage, and takes the one before
            continue
        return folder / "ema.safetensors"
    return None


def read_base_model(init_from: str) -> tuple[Path, Description]:
    """The file that `init_from` means, and what its header says; ValueError if it holds an
    adapter."""
    file = find_weights_file(init_from, "init_from").resolve()
    if (told := read_description(file)).adapter is not None:
        raise UserError(
            f"init_from={init_from} is an adapter, not a model; merge it first: python -m "
            "scripts.export run_dir=<its run> format=weights out=<file>.safetensors."
        )
    return file, told


def find_base_file(cfg: TrainConfig) -> Path:
    """The file of `init_from`; where that names a run that has trained on, the one that this run
    started with."""
    if (own := find_own_checkpoint(cfg)) is not None and (
        note := read_description(own).adapter
    ) is not None:
        kept = Path(note.base)
        run = Path(str(cfg.init_from)).expanduser().resolve()
        if run in kept.parents and kept.is_file() and hash_file(kept) == note.base_sha256:
            return kept
    return read_base_model(str(cfg.init_from))[0]


def refuse_other_encoder(given: str, then: LatentSpec, now: LatentSpec) -> None:
    """ValueError if two sets of latents are of two encoders: by the hash of the weights, without
    one by their names."""
    if then.encoder_sha256 and now.encoder_sha256:
        if then.encoder_sha256 != now.encoder_sha256:
            raise UserError(
                f"{given} was trained on latents of another encoder than the data; encode the "
                "images with that one."
            )
        return
    named = ("_target_", "path", "revision")
    first, second = (
        " ".join(str(spec.encoder[key]) for key in named if spec.encoder.get(key))
        for spec in (then, now)
    )
    if first != second:
        raise UserError(
            f"{given} was trained on latents of {first}, and the data is of {second}; encode the "
            "images with the first, or, if both are one, import the weights with encoder=<its "
            "folder>, which compares hashes."
        )


def find_base(cfg: TrainConfig, spec: LatentSpec, ranks: Ranks = SINGLE) -> Base:
    """The base of a run on latents of `spec`, from the header of the file.

    ValueError if it was trained on other latents: made by another encoder, or normalised otherwise.
    """
    file = ranks.broadcast_result(lambda: find_base_file(cfg))
    given = f"init_from={cfg.init_from}"
    told = read_description(file)
    refuse_other_encoder(given, told.spec, spec)
    # Of another number of channels the weights do not fit, which `load_base` says.
    pairs = zip(told.spec.mean + told.spec.std, spec.mean + spec.std, strict=False)
    if not all(
        math.isclose(then, now, rel_tol=STATISTICS_TOLERANCE, abs_tol=STATISTICS_TOLERANCE)
        for then, now in pairs
    ):
        raise UserError(
            f"{given} was trained on latents normalised otherwise than the data's; use "
            "model=pretrained, which takes the normalisation from there as well."
        )
    return Base(file, not set(spec.names) <= set(told.spec.names))


def load_base(model: nn.Module, spec: LatentSpec, base: Base) -> str:
    """Loads the weights of a base into a new model; rows of the label table go by the names of
    classes. Says, to end a sentence, which rows were lost."""
    try:
        tensors, said = fit_weights(model, spec, base.file)
    except ValueError as error:
        raise UserError(
            f"init_from: {error} Use model=pretrained, which builds the model of the file."
        ) from error
    model.load_state_dict(tensors)
    return said


def add_adapter(model: nn.Module, node: dict[str, Any], new_classes: bool) -> None:
    """Freezes the model and puts the adapter on that the configuration node describes."""
    attach(model, build(node, "adapter", kind=Adapter), new_classes)
