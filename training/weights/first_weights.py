"""Finds the weights with which a run starts (of model=pretrained, of a checkpoint, or of the base
of an adapter), checks that they fit the data, and loads a base."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from common.config.build import build, fill_defaults
from common.config.compose import Composed, compose
from common.config.schema import TrainConfig
from common.config.words import find_given_word
from common.distributed.ranks import SINGLE, Ranks
from common.errors import UserError
from common.files import hash_file
from common.trees import flatten
from data.loader import LatentLoader
from data.spec import LatentSpec
from models.adapters import Adapter, attach
from training.checkpoint.load import find_checkpoints, find_weights_file
from training.weights.pretrained import (
    Description,
    build_described,
    find_description,
    fit_weights,
    read_description,
    read_tensors,
    refuse_foreign_targets,
)

STATISTICS_TOLERANCE = 1e-6
"""Relative and absolute tolerance for comparing the means and stds of two latent sets: two programs
may round the same values differently."""
SCAN_ORDER = "mixer.columns"
"""Key of `model` that says whether every other block scans the tokens column by column."""


@dataclass(frozen=True)
class Base:
    """The weights file of the base model, to which an adapter is added."""

    file: Path
    new_classes: bool
    """True if the data has classes that the base model lacks; then the run also trains the table of
    label embeddings."""
    spec: LatentSpec
    """Description of the latents on which the base model was trained, with its classes."""

    @cached_property
    def sha256(self) -> str:
        return hash_file(self.file)


def insert_pretrained(composed: Composed) -> Composed:
    """Returns a copy of `composed` in which the model that the file of `init_from` describes
    replaces model=pretrained, and that file's mean and std replace data.normalisation=channel. With
    any other model, only the scan's order of tokens may change (`keep_scan_order`).

    A resumed run takes the model, mean and std from its own checkpoint instead. Keys that the user
    sets in `model` override those in the file. UserError if fastlatent did not write the file, or
    if the file's description does not fit its tensors.
    """
    cfg = composed.cfg
    node = dict(cfg.model or {})
    if node.pop("of", None) is None:
        return keep_scan_order(composed)

    file = find_own_checkpoint(cfg)
    if file is not None:
        description = read_description(file)
        refuse_foreign_targets(file, description)
    else:
        file, description = read_base_model(cfg)
        with build_described(file, description, read_tensors(file).values()):
            pass

    parts = {"model": description.model | node, "data": dict(cfg.data)}
    if cfg.data.get("normalisation") == "channel":
        parts["data"]["normalisation"] = [description.spec.mean, description.spec.std]
    return composed._replace(cfg=replace(cfg, **parts), source=composed.source | parts)


def compose_pretrained(words: list[str]) -> Composed:
    """Composes and checks a configuration from override words, and replaces model=pretrained by the
    model that the file of `init_from` describes."""
    return insert_pretrained(compose(words))


def keep_scan_order(composed: Composed) -> Composed:
    """Returns a copy of `composed` that scans the tokens in the order in which the weights were
    trained with which the run starts, and prints a line if the files of conf/ chose another order.
    Weights without the key `SCAN_ORDER` in their description were trained row by row.

    The shapes of the weights do not depend on the order, so no other check would find the mistake.
    Every rank reads the same file, so all ranks decide the same. UserError if the command itself
    asks for another order.
    """
    cfg = composed.cfg
    file, description = find_first_weights(cfg)
    then = flatten(description.model) if description else {}
    now = fill_defaults(cfg.model or {}, "model")
    order = bool(then.get(SCAN_ORDER))
    if file is None or SCAN_ORDER not in now or order == now[SCAN_ORDER]:
        return composed

    # If the command itself chose the order, accept it only for weights that do not describe their
    # model, because another tool wrote them.
    word = find_given_word(f"model.{SCAN_ORDER}", composed.overrides)
    given = "=" in word
    if given and description is None:
        return composed
    fact = f"the weights in {file} need model.{SCAN_ORDER}={str(order).lower()}"
    if given:
        raise UserError(f"{word}: {fact}; leave the word out, or start with new weights.")
    Ranks.from_environment().say(f"{fact}, so this run keeps their order of tokens")
    parts = {"model": cfg.model | {"mixer": cfg.model["mixer"] | {"columns": order}}}
    return composed._replace(cfg=replace(cfg, **parts), source=composed.source | parts)


def find_first_weights(cfg: TrainConfig) -> tuple[Path | None, Description | None]:
    """Returns the path and the description of the weights with which the run starts: those of its
    own newest checkpoint, or of the file that `init_from` names, whose hash the function does not
    verify. The path is None if there is no such file or if its header cannot be read."""
    file = find_own_checkpoint(cfg)
    if file is None and cfg.init_from is not None:
        newest = find_checkpoints(cfg.init_from)[-1:]
        file = newest[0] / "ema.safetensors" if newest else Path(cfg.init_from).expanduser()
    if file is not None:
        # `restore` (training/assemble.py) will report a file that cannot be read.
        with suppress(ValueError):
            return file, find_description(file)
    return None, None


def find_own_checkpoint(cfg: TrainConfig) -> Path | None:
    """Returns the path of `ema.safetensors` in the newest readable checkpoint from which the run
    resumes; None if there is no such checkpoint, because the run is new."""
    if cfg.resume == "never":
        return None
    checkpoints = find_checkpoints(cfg.run_dir) if cfg.run_dir else []
    if not checkpoints and cfg.resume != "auto":
        checkpoints = find_checkpoints(cfg.resume)
    for folder in reversed(checkpoints):
        # Skip a checkpoint that cannot be read: `restore` (training/assemble.py) will report that
        # checkpoint, and use the one before it.
        with suppress(ValueError):
            read_description(folder / "ema.safetensors")
            return folder / "ema.safetensors"
    return None


def read_base_model(cfg: TrainConfig) -> tuple[Path, Description]:
    """Returns the path of the weights file that the setting `init_from` names, and the description
    in its header; UserError if the file holds an adapter."""
    file = find_weights_file(str(cfg.init_from), "init_from").resolve()
    description = read_description(file)
    if description.adapter is not None:
        raise UserError(
            f"init_from={cfg.init_from} is an adapter, not a model; merge it first: python -m "
            "scripts.export run_dir=<its run> format=weights out=<file>.safetensors."
        )
    return file, description


def find_base_file(cfg: TrainConfig) -> Path:
    """Returns the path of the base model's weights file. A resumed run uses the file with which it
    started, even if the run that `init_from` names has saved newer checkpoints since."""
    checkpoint = find_own_checkpoint(cfg)
    note = None if checkpoint is None else read_description(checkpoint).adapter
    if note is not None:
        base = Path(note.base)
        run = Path(str(cfg.init_from)).expanduser().resolve()
        if run in base.parents and base.is_file() and hash_file(base) == note.base_sha256:
            return base
    return read_base_model(cfg)[0]


def refuse_other_encoder(setting: str, then: LatentSpec, now: LatentSpec) -> None:
    """Raises UserError if two latent sets were made with different encoders: the set of the
    trained model, `then`, and the set of this run, `now`. The function compares the hashes of the
    encoders' weights, or the encoders' names if a hash is missing. The message begins with
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
    the base model's file.

    UserError if the base model was trained on latents of another encoder or with another
    normalisation.
    """
    file = ranks.broadcast_result(lambda: find_base_file(cfg))
    setting = f"init_from={cfg.init_from}"
    base_spec = read_description(file).spec
    refuse_other_encoder(setting, base_spec, spec)

    # With `strict=False`, zip ignores a difference in the number of channels: `load_base` later
    # reports that the weights do not fit.
    pairs = zip(base_spec.mean + base_spec.std, spec.mean + spec.std, strict=False)
    if not all(
        math.isclose(then, now, rel_tol=STATISTICS_TOLERANCE, abs_tol=STATISTICS_TOLERANCE)
        for then, now in pairs
    ):
        raise UserError(
            f"{setting} was trained on latents with another normalisation than the data's; use "
            "model=pretrained, which also takes the normalisation from there."
        )
    return Base(file, not set(spec.names) <= set(base_spec.names), base_spec)


def open_base(cfg: TrainConfig, loader: LatentLoader, ranks: Ranks) -> Base | None:
    """Finds the base model as `find_base` does; None for a run without an adapter. Gives the
    loader's spec the mean of the texts of the base model, whose weights know no other: the
    texts of a small set may all be near their own mean; and behind its own classes those of the
    base model, so that samples of these can still be drawn."""
    if not cfg.adapter:
        return None
    spec = loader.spec
    base = find_base(cfg, spec, ranks)
    if base.spec.text and spec.text:
        spec = replace(spec, text=replace(spec.text, mean=base.spec.text.mean))
    if spec.num_classes:
        # Leave classes out that are called by numbers: a number must name one class.
        named = [name for name in base.spec.names if not name.isdecimal()]
        names = list(dict.fromkeys([*spec.names, *named]))
        spec = replace(spec, class_names=names, num_classes=len(names))
    loader.spec = spec
    return base


def load_base(model: nn.Module, spec: LatentSpec, base: Base, node: Mapping[str, Any]) -> str:
    """Loads the weights of a base model into the new `model`, of the configuration `node`.
    A class gets the row that the base model's label table has for the class of the same name.
    Returns the end of a sentence about the rows kept and the positions resized, "" if the classes
    and the size of the latents are the same."""
    try:
        tensors, note = fit_weights(model, spec, base.file, node)
    except ValueError as error:
        raise UserError(
            f"init_from: {error} Use model=pretrained, which builds the model of the file."
        ) from error
    model.load_state_dict(tensors)
    return note


def add_adapter(model: nn.Module, node: dict[str, Any], new_classes: bool) -> None:
    """Freezes the parameters of `model` and adds the adapter that the configuration node `node`
    describes. If `new_classes` is true, the label table is trained too."""
    attach(model, build(node, "adapter", kind=Adapter), new_classes)
