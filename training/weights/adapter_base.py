"""Finds the base model of an adapter, checks that it fits the data, and loads its weights."""

from __future__ import annotations

import math
from contextlib import suppress
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
"""Relative and absolute tolerance when mean and std are compared: two programs may have rounded the
same ones differently."""


@dataclass(frozen=True)
class Base:
    """Weights file of an adapter's base model."""

    file: Path
    new_classes: bool
    """True if the data has classes that the base model lacks; then the run trains the label table
    too."""

    @cached_property
    def sha256(self) -> str:
        return hash_file(self.file)


def insert_pretrained(composed: Composed) -> Composed:
    """Replaces model=pretrained by the model that the file of `init_from` describes, and the data's
    normalisation by the file's.

    A resumed run takes both from its own checkpoint. Other keys of `model` override those of the
    file. ValueError if fastlatent did not write the file, or if its description does not fit its
    tensors.
    """
    cfg = composed.cfg
    node = dict(composed.cfg.model or {})
    if node.pop("of", None) is None:
        return composed

    file = find_own_checkpoint(cfg)
    if file is not None:
        description = read_description(file)
        refuse_foreign_targets(file, description)
    else:
        file, description = read_base_model(str(cfg.init_from))
        with build_described(file, description, read_tensors(file).values()):
            pass

    parts = {"model": description.model | node, "data": dict(cfg.data)}
    if cfg.data.get("normalisation") == "channel":
        parts["data"]["normalisation"] = [description.spec.mean, description.spec.std]
    return composed._replace(cfg=replace(cfg, **parts), source=composed.source | parts)


def compose_pretrained(words: list[str]) -> Composed:
    """Composes a configuration, with model=pretrained replaced by the model in its file."""
    return insert_pretrained(compose(words))


def find_own_checkpoint(cfg: TrainConfig) -> Path | None:
    """Finds the weights in the newest readable checkpoint that a run resumes from; None for a new
    run."""
    if cfg.resume == "never":
        return None
    checkpoints = find_checkpoints(cfg.run_dir) if cfg.run_dir else []
    if not checkpoints and cfg.resume != "auto":
        checkpoints = find_checkpoints(cfg.resume)
    for folder in reversed(checkpoints):
        # Skip a checkpoint that cannot be read: `restore` reports it, and uses the one before.
        with suppress(ValueError):
            read_description(folder / "ema.safetensors")
            return folder / "ema.safetensors"
    return None


def read_base_model(init_from: str) -> tuple[Path, Description]:
    """Returns the file that `init_from` names, with its description; ValueError if it holds an
    adapter."""
    file = find_weights_file(init_from, "init_from").resolve()
    description = read_description(file)
    if description.adapter is not None:
        raise UserError(
            f"init_from={init_from} is an adapter, not a model; merge it first: python -m "
            "scripts.export run_dir=<its run> format=weights out=<file>.safetensors."
        )
    return file, description


def find_base_file(cfg: TrainConfig) -> Path:
    """Finds the weights file of the base model. A resumed run uses the file that it started from,
    even if the run named by `init_from` has newer checkpoints since."""
    checkpoint = find_own_checkpoint(cfg)
    note = None if checkpoint is None else read_description(checkpoint).adapter
    if note is not None:
        base = Path(note.base)
        run = Path(str(cfg.init_from)).expanduser().resolve()
        if run in base.parents and base.is_file() and hash_file(base) == note.base_sha256:
            return base
    return read_base_model(str(cfg.init_from))[0]


def refuse_other_encoder(setting: str, then: LatentSpec, now: LatentSpec) -> None:
    """Raises ValueError if two latent sets were made with different encoders. It compares the
    hashes of the encoders' weights, or their names if a hash is missing. The message begins with
    `setting`, a key and its value."""
    if then.encoder_sha256 and now.encoder_sha256:
        if then.encoder_sha256 != now.encoder_sha256:
            raise UserError(
                f"{setting} was trained on latents of another encoder than the data; encode the "
                "images with that one."
            )
        return

    def name_encoder(spec: LatentSpec) -> str:
        values = [spec.encoder.get(key) for key in ("_target_", "path", "revision")]
        return " ".join(str(value) for value in values if value)

    first = name_encoder(then)
    second = name_encoder(now)
    if first != second:
        raise UserError(
            f"{setting} was trained on latents of {first}, and the data is of {second}; encode the "
            "images with the first, or, if both are the same encoder, import the weights with "
            "encoder=<its folder>, which compares hashes."
        )


def find_base(cfg: TrainConfig, spec: LatentSpec, ranks: Ranks = SINGLE) -> Base:
    """Finds the base model for the adapter of a run on latents of `spec`; reads only the header of
    its file.

    ValueError if the base was trained on latents of another encoder or normalisation.
    """
    file = ranks.broadcast_result(lambda: find_base_file(cfg))
    setting = f"init_from={cfg.init_from}"
    base_spec = read_description(file).spec
    refuse_other_encoder(setting, base_spec, spec)

    # Allow different lengths here: if the numbers of channels differ, `load_base` reports that the
    # weights do not fit.
    pairs = zip(base_spec.mean + base_spec.std, spec.mean + spec.std, strict=False)
    if not all(
        math.isclose(then, now, rel_tol=STATISTICS_TOLERANCE, abs_tol=STATISTICS_TOLERANCE)
        for then, now in pairs
    ):
        raise UserError(
            f"{setting} was trained on latents with another normalisation than the data's; use "
            "model=pretrained, which also takes the normalisation from there."
        )
    return Base(file, not set(spec.names) <= set(base_spec.names))


def load_base(model: nn.Module, spec: LatentSpec, base: Base) -> str:
    """Loads the weights of a base into a new model, and matches rows of the label table by class
    names; returns the end of a sentence about the rows kept, or ""."""
    try:
        tensors, note = fit_weights(model, spec, base.file)
    except ValueError as error:
        raise UserError(
            f"init_from: {error} Use model=pretrained, which builds the model of the file."
        ) from error
    model.load_state_dict(tensors)
    return note


def add_adapter(model: nn.Module, node: dict[str, Any], new_classes: bool) -> None:
    """Freezes the model and attaches the adapter that the configuration node describes."""
    attach(model, build(node, "adapter", kind=Adapter), new_classes)
