"""A trained model in one file: `model.safetensors` or `ema.safetensors` of a checkpoint, wherever
it was copied to.

The header of the file says what the model is and what its latents are, so sampling needs nothing
else of the run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accel.sharding import to_full
from common.errors import UserError, describe_first_fault
from common.text import shorten_error
from data.loader import Count, LatentSpec, find_wrong_lengths
from models.denoiser import Denoiser
from models.images import Autoencoder
from models.layers import LabelEmbedding
from training.checkpoint.files import METADATA_KEY
from training.config.build import build, is_admitted

MAX_DESCRIPTION_CHARS = 2**24
"""Characters of a description; more would take memory before anything of it can be checked."""
MODEL_SIZE_FACTOR = 4
"""So many times the tensors and the values of a file its model may have while it is built; in the
end, as many."""
PIN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A commit, or a hash of weights."""


@dataclass(frozen=True)
class AdapterNote:
    """What the header of an adapter's weights file says of the adapter and of the model that it
    goes on."""

    node: dict[str, Any]
    """The configuration node of the adapter."""
    base_sha256: str
    labels: bool
    """Whether the label table was trained too; it is in the file then."""
    base: str
    """The weights file of the model, where it lay when the adapter was trained."""


@dataclass(frozen=True)
class Description:
    """What the header of a weights file says."""

    weights: Literal["model", "ema"]
    model: dict[str, Any]
    """The configuration node of the model."""
    spec: LatentSpec
    step: Count
    adapter: AdapterNote | None = None
    """Of a file that holds an adapter only."""


@contextmanager
def explain_read_errors(file: Path) -> Iterator[None]:
    """ValueError where the block cannot read `file` as safetensors."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as safetensors ({shorten_error(error)})."
        ) from error


def find_description(file: Path) -> Description | None:
    """What the header of a weights file says, checked; None if the file is none of ours. ValueError
    for a false one."""
    with explain_read_errors(file), safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get(METADATA_KEY)
    if text is None:
        return None
    refusal = f"{file}: the description in its header"
    if len(text) > MAX_DESCRIPTION_CHARS:
        raise UserError(
            f"{refusal} has {len(text)} characters; more than {MAX_DESCRIPTION_CHARS} are not read."
        )
    try:
        told = TypeAdapter(Description).validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(
            f"{refusal} {describe_first_fault(error, 'description of a model')}; use another copy."
        ) from error
    faults = find_wrong_lengths(told.spec)
    classes = len(told.spec.class_names)
    if classes not in (0, told.spec.num_classes):
        faults.append(
            f"there are names of {classes} classes, and there are {told.spec.num_classes}"
        )
    if faults:
        raise UserError(f"{refusal} contradicts itself: {faults[0]}; use another copy.")
    return told


def read_description(file: Path) -> Description:
    """The same for a file that must be one of ours."""
    if (told := find_description(file)) is None:
        raise UserError(
            f"{file} does not say which model it holds; name a file of a checkpoint of ours."
        )
    return told


def load_pretrained(file: Path, device: torch.device) -> tuple[Denoiser, LatentSpec]:
    """The model in evaluation mode, and the latents it knows; ValueError if the file does not
    describe its model.

    A file comes from anywhere, so its `_target_`s may only name classes of the package `models`,
    and of packages that this command has admitted itself; nothing is allocated before its shapes
    are those of the tensors that are there.
    """
    told = read_description(file)
    tensors = read_tensors(file)
    with build_described(file, told, tensors.values()) as model:
        own = model.state_dict()
    refuse_misfit(file, "the model that it describes", tensors, own)
    model = model.to_empty(device=device)
    model.init_weights()
    model.load_state_dict(tensors)
    return model.eval(), told.spec


def refuse_foreign_targets(file: Path, told: Description) -> None:
    """ValueError if a description names a class that is no part of a model of ours."""
    for name in list_targets([told.model, told.adapter and told.adapter.node]):
        if not is_part_of_model(name) or str(name).startswith("models.autoencoders."):
            raise UserError(
                f"{file} names {str(name)[:200]} as part of its model, which is none of ours; do "
                "not trust this file. If that code is your own, add "
                f"extensions=[{str(name).partition('.')[0][:80]}] to the command."
            )


@contextmanager
def build_described(
    file: Path, told: Description, tensors: Collection[Tensor]
) -> Iterator[Denoiser]:
    """The model that a file describes, on the meta device; with what the block adds to it, not much
    larger than `tensors`. ValueError if it names classes that are none of ours, or cannot be
    built."""
    refuse_foreign_targets(file, told)
    try:
        with limit_parameters(
            MODEL_SIZE_FACTOR * len(tensors),
            MODEL_SIZE_FACTOR * sum(tensor.numel() for tensor in tensors),
        ):
            yield build_on_meta(told.model, told.spec)
    except Exception as error:  # whatever a class makes of values that nobody has checked
        raise UserError(
            f"{file} describes a model that cannot be built: {shorten_error(error)[:600]}"
        ) from error


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a weights file, on the host and mapped rather than read; ValueError if it is
    damaged."""
    with explain_read_errors(file):
        return load_file(file)


@contextmanager
def limit_parameters(tensors: int, values: int) -> Iterator[None]:
    """ValueError as soon as modules built in the block have more parameters, or more values in
    them, than so many."""
    left = [tensors, values]

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            left[:] = left[0] - 1, left[1] - parameter.numel()
        if min(left) < 0:
            raise UserError("it would be larger by far than the tensors that are there.")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def refuse_misfit(
    file: Path, what: str, found: Mapping[str, Tensor], own: Mapping[str, Tensor], hint: str = ""
) -> None:
    """ValueError with the first tensor by which what was `found` in a file differs from a model's
    `own`, and both shapes; `what` says which model."""
    for name in [*own, *found]:
        there, here = (
            f"has shape {tuple(of[name].shape)}" if name in of else "is missing"
            for of in (found, own)
        )
        if there != here:
            raise UserError(
                f"{file} does not fit {what}: {name[:200]} {there} in the file and {here} in the "
                f"model{hint}."
            )


def fit_weights(model: nn.Module, spec: LatentSpec, file: Path) -> tuple[dict[str, Tensor], str]:
    """Reads the tensors of `file` for a `model` of the classes of `spec`; also says, to end a
    sentence, what is lost.

    Rows of a label table follow the names of their classes. Classes that the file does not know
    keep the rows that the model has. ValueError if another tensor does not fit, and for rows
    without names if their number differs. All processes call it together: the model may be sharded.
    """
    told = find_description(file)
    tensors = read_tensors(file)
    own = model.state_dict()
    said = ""
    tables = [
        f"{name}.table.weight"
        for name, part in model.named_modules()
        if isinstance(part, LabelEmbedding)
    ]
    old = spec if told is None else told.spec
    # A spec without names may claim any number of classes, so they are not numbered here.
    named = bool(old.class_names or spec.class_names)
    then = old.names if named else []
    now = spec.names if named else []
    for name in tables if then != now else []:
        shape = tensors[name].shape if name in tensors else None
        if shape != (len(then) + 1, own[name].shape[1]):
            continue
        tensors[name], kept = reorder_labels(to_full(own[name]).detach(), tensors[name], then, now)
        few = f" ({', '.join(kept[:3])}{', …' if kept[3:] else ''})" if kept else ""
        said = (
            f"; kept {len(kept)} of {len(then)} rows of the label table by the names of their "
            f"classes{few}, and the null row; new rows: {len(now) - len(kept)}"
        )
    hint = "" if told else ", and the file names no classes"
    refuse_misfit(file, "this model", tensors, own, hint)
    return tensors, said


def reorder_labels(
    own: Tensor, found: Tensor, then: Sequence[str], now: Sequence[str]
) -> tuple[Tensor, list[str]]:
    """A label table with the rows of `found` for classes of equal names and for the null label, the
    last one, and with its `own` for the others; and those names."""
    if len(set(then)) < len(then) or len(set(now)) < len(now):
        raise UserError(
            "two classes have one name, so rows of the label table cannot go by names; rename one."
        )
    rows, places = ({name: row for row, name in enumerate(names)} for names in (then, now))
    kept = [name for name in now if name in rows]
    table = own.clone()
    table[[*(places[name] for name in kept), -1]] = found[[*(rows[name] for name in kept), -1]].to(
        table
    )
    return table, kept


def is_part_of_model(target: Any) -> bool:
    return str(target).startswith("models.") or is_admitted(target)


def list_targets(node: Any) -> Iterator[Any]:
    """Every `_target_` in a configuration tree."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from [value] if key == "_target_" else list_targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from list_targets(value)


def build_model(node: Mapping[str, Any], spec: LatentSpec, device: torch.device) -> Denoiser:
    """Builds the denoiser for `spec` on `device`, initialised."""
    model = build_on_meta(node, spec).to_empty(device=device)
    model.init_weights()
    return model


def build_on_meta(node: Mapping[str, Any], spec: LatentSpec) -> Denoiser:
    """Builds the denoiser for `spec` on the meta device, which takes no memory: it has shapes and
    no values."""
    shape = {name: getattr(spec, name) for name in ("channels", "height", "width", "num_classes")}
    with torch.device("meta"):
        return build(node, "model", kind=nn.Module, **shape)


def build_autoencoder(
    spec: LatentSpec, device: torch.device, path: str | None = None
) -> Autoencoder:
    """The autoencoder that made the latents, or the same one at `path`; ValueError if its weights
    are others."""
    node = spec.encoder if path is None else spec.encoder | {"path": path}
    named = list(list_targets(node))  # by whoever made the latents or the weights
    if len(named) != 1 or not is_part_of_model(named[0]):
        raise UserError(
            f"the latents name {str(named)[:200]} as their encoder, which is none; do not trust "
            "where they are from."
        )
    place = node.get("path")
    pinned = any(PIN.fullmatch(str(pin)) for pin in (spec.encoder_sha256, node.get("revision")))
    is_here = not isinstance(place, str) or os.path.exists(os.path.expanduser(place))
    if path is None and not pinned and not is_here:
        raise UserError(
            f"the latents name the encoder {str(place)[:200]}, which is nothing on this disk, and "
            "no hash or commit says which weights were meant, so no hub is asked for them; use "
            "encoder=<folder> with the autoencoder, or correct encoder.path in the latents' "
            "manifest.json."
        )
    autoencoder = build(node, "encoder", kind=Autoencoder).to(device)
    if spec.encoder_sha256 not in (None, autoencoder.weights_sha256):
        raise UserError(
            f"the encoder at {node.get('path')} has other weights than the one that made the "
            f"latents (sha256 {autoencoder.weights_sha256} instead of {spec.encoder_sha256}); "
            "restore it or encode again."
        )
    return autoencoder
