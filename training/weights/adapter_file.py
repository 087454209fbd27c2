"""An adapter in a file: the checkpoint of its run, or a folder in PEFT's format; and a model with
it merged in.

PEFT (https://github.com/huggingface/peft) keeps `adapter_config.json` and
`adapter_model.safetensors` in a folder, and calls the factors of a layer
`base_model.model.<layer>.lora_A.weight` and `….lora_B.weight`. Ours also have a description in the
header, by which they know their model, its latents and its classes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import UserError
from common.files import hash_file, make_folder, read_object, write_json
from common.text import is_figure
from models.adapters import PromptedLabels, find_trained_parameters, merge_adapter
from models.denoiser import Denoiser
from models.layers import LabelEmbedding
from training.checkpoint.files import METADATA_KEY, write_tensors
from training.checkpoint.load import find_weights_file
from training.weights.adapter_base import add_adapter
from training.weights.pretrained import (
    AdapterNote,
    Description,
    build_described,
    build_model,
    find_description,
    fit_weights,
    load_pretrained,
    read_description,
    read_tensors,
    refuse_misfit,
)

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
PROMPT_KEY = "prompt_embeddings"
HARMLESS_KEYS = {
    "peft_type",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "auto_mapping",
    "peft_version",
    "init_lora_weights",
    "layers_to_transform",
    "layers_pattern",
    "runtime_config",
    "loftq_config",
    "eva_config",
    "corda_config",
}
"""Keys of PEFT's configuration that change nothing of what a trained LoRA computes. Any other must
be off."""
KNOWN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Ways to start a LoRA that leave the base's weights as they are."""


class OpenedModel(NamedTuple):
    """A model that was read from its file, in evaluation mode, with its adapter merged in."""

    model: Denoiser
    description: Description
    """What the file says of the model; for an adapter that PEFT trained, what the file of its base
    says."""
    file: Path
    """The file of what was trained: the adapter's, where there is one."""
    sha256: str
    """The hash of that file."""


def load_model(file: Path, device: torch.device, adapter: str | None = None) -> OpenedModel:
    """`load_pretrained`, with the adapter merged in that `file` is, or that `adapter` names for the
    model in `file`.

    ValueError if the adapter was trained on another model, or does not fit.
    """
    if adapter is not None:
        found = Path(adapter).expanduser() / TENSORS_FILE
        return load_adapted(
            found if found.is_file() else find_weights_file(adapter, "adapter"), file, device
        )
    told = read_description(file)
    if (note := told.adapter) is None:
        return OpenedModel(load_pretrained(file, device)[0], told, file, hash_file(file))
    if not (base := Path(note.base)).is_file():
        raise UserError(
            f"{file} is an adapter on {base}, which is not there; use weights=<that file> "
            f"adapter={file} instead."
        )
    return load_adapted(file, base, device)


def load_adapted(file: Path, base: Path, device: torch.device) -> OpenedModel:
    below = read_description(base)
    tensors = read_tensors(file)
    told = find_description(file) or read_peft_description(file, below, tensors)
    note = told.adapter
    if note is None or below.adapter is not None:
        wrong = f"{base} is an adapter" if note else f"{file} is a model"
        raise UserError(f"{wrong}; name a model by weights= and an adapter by adapter=.")
    if note.base_sha256 and note.base_sha256 != (found := hash_file(base)):
        raise UserError(
            f"{file} was trained on other weights (sha256 {note.base_sha256[:12]}…) than {base} "
            f"has ({found[:12]}…); use those."
        )

    # On the meta device, which allocates nothing: whether the tensors, by our names, fit.
    with build_described(file, told, [*read_tensors(base).values(), *tensors.values()]) as model:
        add_adapter(model, note.node, note.labels)
    own = find_trained_parameters(model)
    names = {to_peft_name(name): name for name in own}
    tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    refuse_misfit(file, "the adapter that it describes", tensors, own)

    model = build_model(told.model, told.spec, device)
    model.load_state_dict(fit_weights(model, told.spec, base)[0])
    add_adapter(model, note.node, note.labels)
    model.load_state_dict(model.state_dict() | tensors)
    merge_adapter(model)
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{file} makes {name} of the model not finite; use another checkpoint of the "
                "adapter."
            )
    return OpenedModel(model.eval(), told, file, hash_file(file))


def to_peft_name(name: str) -> str:
    """What PEFT calls a parameter of ours."""
    if name.endswith(".prompt"):
        return PROMPT_KEY
    return (
        PEFT_PREFIX
        + name.replace(".base_layer.", ".")
        + (".weight" if name.endswith((".lora_A", ".lora_B")) else "")
    )


def read_peft_description(
    file: Path, below: Description, tensors: Mapping[str, Tensor]
) -> Description:
    """What PEFT's own file tells of a LoRA on the model `below`; ValueError for what this version
    does not compute."""
    config = read_object(file.with_name(CONFIG_FILE))
    if config.get("peft_type", "LORA") != "LORA":
        raise UserError(
            f"{file.with_name(CONFIG_FILE)}: peft_type={str(config['peft_type'])[:80]} is not read; "
            "LORA is."
        )
    figures = ("r", "lora_alpha")
    odd = [k for k in figures if not is_figure(config.get(k)) or not math.isfinite(config[k])]
    odd += [
        key
        for key, value in config.items()
        if key not in HARMLESS_KEYS and value not in (None, False, "none", {}, [])
    ]
    if config.get("init_lora_weights") not in KNOWN_STARTS:  # the others change the base
        odd += ["init_lora_weights"]
    if odd:
        told = str(config.get(odd[0]))[:80]
        raise UserError(
            f"{file.with_name(CONFIG_FILE)}: {odd[0]}={told} is not read; plain LoRA is."
        )
    factor = re.compile(re.escape(PEFT_PREFIX) + r"(.+)\.lora_A\.weight")
    layers = [found[1] for found in map(factor.fullmatch, tensors) if found]
    node = {
        "_target_": "models.adapters.Lora",
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "targets": layers,
    }
    return replace(below, adapter=AdapterNote(node, "", False, ""))


def write_peft(file: Path, folder: Path) -> None:
    """Writes the adapter in a checkpoint's `file` to a new folder, as PEFT does. ValueError if it
    holds none."""
    told = read_description(file)
    tensors = read_tensors(file)
    if (note := told.adapter) is None:
        raise UserError(
            f"{file} holds a model, no adapter; format=peft is for runs with adapter=lora or "
            "prompt."
        )
    prompts = [name.removesuffix(".prompt") for name in tensors if name.endswith(".prompt")]
    for name in prompts:
        tensors = replace_mlp(name, tensors)
        note = replace(note, node=note.node | {"hidden": 0})
    layers = [name.removesuffix(".lora_A") for name in tensors if name.endswith(".lora_A")]
    config: dict[str, Any] = {
        "base_model_name_or_path": Path(note.base).name,
        "inference_mode": True,
    }
    if prompts:
        rows, width = tensors[f"{prompts[0]}.prompt"].shape
        config |= {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": rows, "token_dim": width}
    else:
        config |= {"peft_type": "LORA", "r": note.node["rank"], "lora_alpha": note.node["alpha"]}
        config |= {"target_modules": sorted(layers), "lora_dropout": 0.0, "bias": "none"}
    whole = [
        name.removesuffix(".weight").replace(".base_layer.", ".")
        for name in tensors
        if ".table." in name
    ]
    header = {METADATA_KEY: json.dumps(asdict(replace(told, adapter=note)))}
    make_folder(folder)
    write_tensors(
        folder / TENSORS_FILE,
        {to_peft_name(name): tensor for name, tensor in tensors.items()},
        header,
    )
    write_json(folder / CONFIG_FILE, config | {"modules_to_save": whole or None})


def replace_mlp(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the vectors of the prompt `name` in the place of the MLP that computes them,
    if it has one."""
    own = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}.")
    }
    if "mlp.0.weight" not in own:
        return dict(tensors)
    rows, width = own["prompt"].shape
    layer = PromptedLabels(LabelEmbedding(width, rows - 1), len(own["mlp.0.weight"]))
    layer.load_state_dict(layer.state_dict() | own)
    kept = {key: t for key, t in tensors.items() if not key.startswith(f"{name}.mlp.")}
    return kept | {f"{name}.prompt": layer.compute_vectors().detach()}
