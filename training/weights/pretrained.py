"""Loads a trained model from one file: `model.safetensors` or `ema.safetensors` of a checkpoint, or
a copy of it.

The header of the file describes the model and its latents, so sampling needs no other file of the
run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accel.sharding import to_full
from common.condition import TextEncoder
from common.config.build import build, fill_defaults, is_admitted
from common.errors import UserError, describe_first_fault
from common.text import shorten_error
from common.trees import list_nodes
from data.spec import Count, LatentSpec, TextSpec, find_wrong_lengths
from models.denoiser import Denoiser
from models.images import Autoencoder
from models.layers import LabelEmbedding
from training.checkpoint.files import HASH_KEY, MAX_DESCRIPTION_CHARS, METADATA_KEY, hash_tensors

MODEL_SIZE_FACTOR = 4
"""Limit for a model while it is built: it may have at most MODEL_SIZE_FACTOR times the number of
tensors, and MODEL_SIZE_FACTOR times the number of elements, of its weights file. Once built, the
model must have exactly the tensors of the file."""
HARMLESS_ARGUMENTS = ("drop_path", "internal_block")
"""Arguments of a model in which a run may differ from the weights with which it starts: they change
no output, apart from those of a new head."""
PIN = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Matches a git commit or a sha256, either of which identifies the exact weights of an encoder."""


@dataclass(frozen=True)
class AdapterNote:
    """The description of an adapter and its base model, as it stands in the header of the adapter's
    file."""

    node: dict[str, Any]
    """Configuration node of the adapter."""
    base_sha256: str
    labels: bool
    """True if the table of label embeddings was trained too; then the adapter's file contains that
    table."""
    base: str
    """Path of the base model's weights file at the time when the adapter was trained."""


@dataclass(frozen=True)
class Description:
    """The description of a model, as it stands in the header of its weights file."""

    weights: Literal["model", "ema"]
    model: dict[str, Any]
    """Configuration node of the model."""
    spec: LatentSpec
    step: Count
    adapter: AdapterNote | None = None
    """Description of the adapter if the file holds only an adapter; None if it holds a whole
    model."""


@contextmanager
def explain_read_errors(file: Path) -> Iterator[None]:
    """If the `with` block fails to read `file` as safetensors, raises a UserError that says so."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} cannot be read as safetensors ({shorten_error(error)})."
        ) from error


def read_header(file: Path, key: str) -> str | None:
    """Returns the value of `key` in the header of a safetensors file; None if it has none."""
    with explain_read_errors(file), safe_open(file, "pt") as opened:
        return (opened.metadata() or {}).get(key)


def find_description(file: Path) -> Description | None:
    """Reads, checks and returns the description in a file's header; None if the header has none,
    because fastlatent did not write the file. UserError if the description is invalid."""
    text = read_header(file, METADATA_KEY)
    if text is None:
        return None
    refusal = f"{file}: the description in its header"
    if len(text) > MAX_DESCRIPTION_CHARS:
        raise UserError(
            f"{refusal} has {len(text)} characters; more than {MAX_DESCRIPTION_CHARS} are not read."
        )
    try:
        description = TypeAdapter(Description).validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(
            f"{refusal} {describe_first_fault(error, 'description of a model')}; use another copy."
        ) from error

    # Check what the types of the fields cannot express: the lengths of lists.
    spec = description.spec
    faults = [*find_wrong_lengths(spec), *(spec.text.find_faults() if spec.text else ())]
    classes = len(spec.class_names)
    if classes not in (0, spec.num_classes):
        faults.append(f"there are names of {classes} classes, and there are {spec.num_classes}")
    if faults:
        raise UserError(f"{refusal} contradicts itself: {faults[0]}; use another copy.")
    return description


def read_description(file: Path) -> Description:
    """Reads, checks and returns the description in a file's header. UserError if the description
    is invalid, or absent because fastlatent did not write the file."""
    description = find_description(file)
    if description is None:
        raise UserError(
            f"{file} does not say which model it holds; name a file of a checkpoint of ours."
        )
    return description


def load_pretrained(file: Path, device: torch.device) -> tuple[Denoiser, LatentSpec]:
    """Loads the model in `file`; returns the model, in evaluation mode, and the spec of its
    latents. UserError if the file does not describe its model.

    A file may come from anywhere, so its `_target_`s may name only classes of the package `models`
    and of extensions that this command has admitted. The function allocates memory for the model
    only after it has checked that the shapes of the model and of the file's tensors agree.
    """
    description = read_description(file)
    tensors = read_tensors(file)
    with build_described(file, description, tensors.values()) as model:
        meta_tensors = model.state_dict()
    refuse_misfit(file, "the model that it describes", tensors, meta_tensors)
    model = model.to_empty(device=device)
    model.init_weights()
    model.load_state_dict(tensors)
    return model.eval(), description.spec


def refuse_foreign_targets(file: Path, description: Description) -> None:
    """Raises UserError if a `_target_` in the description names a class outside of the package
    `models` and of admitted extensions."""
    note = description.adapter
    for name in list_targets([description.model, note and note.node]):
        # Refuse encoders too: their classes are in the package `models`, but are no part of a
        # denoiser.
        encoders = ("models.autoencoders.", "models.text_encoders.")
        if not is_part_of_model(name) or str(name).startswith(encoders):
            raise UserError(
                f"{file} names {str(name)[:200]} as part of its model, which is none of ours; do "
                "not trust this file. If that code is your own, add "
                f"extensions=[{str(name).partition('.')[0][:80]}] to the command."
            )


@contextmanager
def build_described(
    file: Path, description: Description, tensors: Collection[Tensor]
) -> Iterator[Denoiser]:
    """Yields the model that the description in `file` defines, built on the meta device.

    UserError if the description names a class that is not allowed, if the model cannot be built,
    or if the model, with the modules that the `with` block builds, is much larger than the file's
    `tensors`.
    """
    refuse_foreign_targets(file, description)
    # Number of parameters, and number of elements of parameters, that the model and the code inside
    # the `with` statement may still create.
    remaining = [
        MODEL_SIZE_FACTOR * len(tensors),
        MODEL_SIZE_FACTOR * sum(tensor.numel() for tensor in tensors),
    ]

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            remaining[0] -= 1
            remaining[1] -= parameter.numel()
        if min(remaining) < 0:
            raise UserError("it would be much larger than the tensors in the file.")

    hook = register_module_parameter_registration_hook(count)
    try:
        yield build_on_meta(description.model, description.spec)
    except Exception as error:  # a class may raise any error for bad arguments
        raise UserError(
            f"{file} describes a model that cannot be built: {shorten_error(error)[:600]}"
        ) from error
    finally:
        hook.remove()


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Returns the tensors of a weights file by name, in host memory; UserError if the file is
    damaged, or has another hash than its header says."""
    with explain_read_errors(file):
        tensors = load_file(file)
    if read_header(file, HASH_KEY) not in (None, hash_tensors(tensors)):
        raise UserError(f"{file} is damaged: its header has another hash; use another copy.")
    return tensors


def refuse_misfit(
    file: Path,
    model_name: str,
    file_tensors: Mapping[str, Tensor],
    model_tensors: Mapping[str, Tensor],
    hint: str = "",
) -> None:
    """Raises UserError unless a file's tensors and a model's tensors have the same names and
    shapes; the message names the first difference, calls the model `model_name`, and ends with
    `hint`."""
    for name in [*model_tensors, *file_tensors]:
        in_file, in_model = (
            f"has shape {tuple(tensors[name].shape)}" if name in tensors else "is missing"
            for tensors in (file_tensors, model_tensors)
        )
        if in_file != in_model:
            raise UserError(
                f"{file} does not fit {model_name}: {name[:200]} {in_file} in the file and "
                f"{in_model} in the model{hint}."
            )


def refuse_other_function(file: Path, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises UserError if the models of two nodes compute different functions from the same
    tensors: `then`, with which the weights in `file` were trained, and `now`."""
    old = fill_defaults(then, "model")
    new = fill_defaults(now, "model")
    words = [
        f"model.{key}={old.get(key)}"
        for key in old | new
        if key not in HARMLESS_ARGUMENTS and old.get(key) != new.get(key)
    ]
    if words:
        raise UserError(
            f"{file} holds weights of a model with {', '.join(words)}, which shows in no tensor, "
            "and this model has other values; use those, or model=pretrained."
        )


def fit_weights(
    model: nn.Module, spec: LatentSpec, file: Path, node: Mapping[str, Any]
) -> tuple[dict[str, Tensor], str]:
    """Reads the tensors of `file` for a `model` of the configuration `node` with the classes of
    `spec`. Returns a dict, name -> tensor, and the end of a sentence about the rows of the label
    table and the positions, "" if the classes and the size of the latents are the same.

    In a label table, a class gets the row that the file has for the class of the same name; a class
    that the file lacks keeps the row of `model`. The embeddings of positions are resized if the
    file's latents have another height or width. UserError if another tensor does not fit, if the
    file's model is another function, or if the classes have no names and their number differs. All
    ranks must call the function together, because the model may be sharded.
    """
    description = find_description(file)
    tensors = read_tensors(file)
    model_tensors = model.state_dict()
    # A new internal head keeps its initial weights; one that the model lacks is left out.
    internal = {n: t for n, t in model_tensors.items() if n.startswith("internal.")}
    rest = {n: t for n, t in tensors.items() if internal or not n.startswith("internal.")}
    tensors = {name: to_full(t).detach() for name, t in internal.items()} | rest
    note = ""
    tables = [
        f"{name}.table.weight"
        for name, module in model.named_modules()
        if isinstance(module, LabelEmbedding)
    ]
    old = spec if description is None else description.spec

    if (
        getattr(model, "text_embed", None) is not None
        and old.text
        and spec.text
        and old.text.encoder_sha256 != spec.text.encoder_sha256
    ):
        raise UserError(
            f"{file} was trained on texts of another text_encoder than the data's; encode the "
            "data's with that one."
        )

    # Compare class names only if the file's spec or this run's spec has some. Without names,
    # `spec.names` makes a string per class, and a file may claim so many classes that these strings
    # fill the memory.
    named = bool(old.class_names or spec.class_names)
    old_names = old.names if named else []
    new_names = spec.names if named else []
    for name in tables if old_names != new_names else []:
        shape = tensors[name].shape if name in tensors else None
        model_table = model_tensors[name]
        if shape != (len(old_names) + 1, model_table.shape[1]):
            continue
        table = to_full(model_table).detach()
        tensors[name], kept = reorder_labels(table, tensors[name], old_names, new_names)
        examples = ", ".join(kept[:3]) + ", …" * (len(kept) > 3)
        note = (
            f"; kept {len(kept)} of {len(old_names)} rows of the label table by the names of their "
            f"classes{f' ({examples})' if kept else ''}, and the null row; new rows: "
            f"{len(new_names) - len(kept)}"
        )
    if isinstance(model, Denoiser):
        note += resize_positions(tensors, model, old)
    hint = "" if description else ", and the file names no classes"
    refuse_misfit(file, "this model", tensors, model_tensors, hint)
    if description is not None:
        refuse_other_function(file, description.model, node)
    return tensors, note


def resize_positions(tensors: dict[str, Tensor], model: Denoiser, old: LatentSpec) -> str:
    """Interpolates the embeddings of positions among `tensors`, weights for latents of `old`, to
    the grid of `model`, as vision transformers are fine-tuned on other sizes (Dosovitskiy et al.
    2021, section 3.2). Returns the end of a sentence about it, "" if the grid is the same."""
    grid = (old.height // model.patch_size, old.width // model.patch_size)
    positions = tensors.get("pos_embed", torch.empty(0))
    if grid == model.grid or positions.shape != (1, math.prod(grid), model.dim):
        return ""
    planes = positions.mT.unflatten(2, grid)
    resized = nn.functional.interpolate(planes.float(), model.grid, mode="bicubic", antialias=True)
    tensors["pos_embed"] = resized.flatten(2).mT.to(positions).contiguous()
    sizes = ["×".join(map(str, size)) for size in (grid, model.grid)]
    return f"; positions resized from {sizes[0]} to {sizes[1]} tokens"


def reorder_labels(
    new_table: Tensor, old_table: Tensor, old_names: Sequence[str], new_names: Sequence[str]
) -> tuple[Tensor, list[str]]:
    """Returns a copy of `new_table` (classes + 1, width) into which it copies rows of `old_table`:
    the rows of classes whose name is in both lists, and the last row, that of the null label. Also
    returns the names of these classes."""
    old_rows = {name: row for row, name in enumerate(old_names)}
    new_rows = {name: row for row, name in enumerate(new_names)}
    if len(old_rows) < len(old_names) or len(new_rows) < len(new_names):
        raise UserError(
            "two classes have the same name, so rows of the label table cannot be matched by name; "
            "rename one."
        )
    kept = [name for name in new_names if name in old_rows]
    sources = [*(old_rows[name] for name in kept), -1]
    targets = [*(new_rows[name] for name in kept), -1]
    table = new_table.clone()
    table[targets] = old_table[sources].to(table)
    return table, kept


def is_part_of_model(target: Any) -> bool:
    """Says whether a `_target_` names a class of the package `models` or of an admitted
    extension."""
    return str(target).startswith("models.") or is_admitted(target)


def list_targets(node: Any) -> list[Any]:
    """Lists the value of every `_target_` in nested dicts and lists of a configuration."""
    return [value for key, value in list_nodes(node) if key.rpartition(".")[2] == "_target_"]


def build_model(node: Mapping[str, Any], spec: LatentSpec, device: torch.device) -> Denoiser:
    """Builds the denoiser that the configuration `node` describes, for latents of `spec`, on
    `device`, with initial weights."""
    model = build_on_meta(node, spec).to_empty(device=device)
    model.init_weights()
    return model


def list_sizes(spec: LatentSpec) -> dict[str, Any]:
    """Returns a dict: name of an argument of the denoiser -> size that `spec` determines."""
    return {
        "channels": spec.channels,
        "height": spec.height,
        "width": spec.width,
        "num_classes": spec.null_label,
    }


def build_on_meta(node: Mapping[str, Any], spec: LatentSpec) -> Denoiser:
    """Builds the denoiser that the configuration `node` describes, for latents of `spec`, on the
    meta device: its tensors have shapes, but no values and no memory."""
    shape = list_sizes(spec)
    if node.get("conditioning", "class") != "class":
        shape["text"] = spec.text and asdict(spec.text)
    with torch.device("meta"):
        return build(node, "model", kind=nn.Module, **shape)


def build_autoencoder(
    spec: LatentSpec, device: torch.device, path: str | None = None
) -> Autoencoder:
    """Builds the autoencoder that encoded the latents of `spec`, and loads its weights from `path`,
    or, if `path` is None, from the place that `spec` names. UserError if the weights have another
    hash than those that encoded the latents."""
    return build_encoder("encoder", Autoencoder, spec.encoder, spec.encoder_sha256, path).to(device)


def build_text_encoder(text: TextSpec, path: str | None) -> TextEncoder:
    """Builds the text encoder that encoded the texts, as `build_autoencoder` does, on the
    CPU."""
    return build_encoder("text_encoder", TextEncoder, text.encoder, text.encoder_sha256, path)


def build_encoder(
    key: str, kind: type, node: Mapping[str, Any], sha256: str | None, path: str | None
) -> Any:
    """Builds an encoder of the class `kind` that a latent set names: `node` is its configuration,
    `sha256` the hash of its weights, None if unknown, and `path` replaces the place in `node`.
    `key` is the name of the command's key for this path, for messages."""
    # Refuse an encoder that is no class of `models` or of an admitted extension, because the
    # latents, and so the class name in them, may come from anywhere.
    node = dict(node) if path is None else {**node, "path": path}
    targets = list_targets(node)
    if len(targets) != 1 or not is_part_of_model(targets[0]):
        raise UserError(
            f"the latents name {str(targets)[:200]} as their {key}, which is none; do not trust "
            "their source."
        )

    # Download weights only if a hash or a commit identifies them exactly.
    source = node.get("path")
    pinned = any(PIN.fullmatch(str(pin)) for pin in (sha256, node.get("revision")))
    is_here = not isinstance(source, str) or os.path.exists(os.path.expanduser(source))
    if path is None and not pinned and not is_here:
        raise UserError(
            f"the latents name the {key} {str(source)[:200]}, which does not exist on this disk, "
            "and no hash or commit identifies its weights, so no hub is asked for them; use "
            f"{key}=<folder> with its files, or correct {key}.path in the latents' manifest.json."
        )
    try:
        encoder = build(node, key, kind=kind)
    except UserError as error:
        if path is not None:
            raise
        raise UserError(f"{error} If it was moved: {key}=<its folder>.") from error
    if sha256 not in (None, encoder.weights_sha256):
        raise UserError(
            f"the {key} at {node.get('path')} has other weights than the one that made the "
            f"latents (sha256 {encoder.weights_sha256} instead of {sha256}); restore it or encode "
            "again."
        )
    return encoder
