"""Reads adapters from checkpoints and PEFT folders, merges them into models, and writes adapters in
PEFT's format.

PEFT (https://github.com/huggingface/peft) stores `adapter_config.json` and
`adapter_model.safetensors` in a folder, and names the two LoRA matrices of a layer
`base_model.model.<layer>.lora_A.weight` and `base_model.model.<layer>.lora_B.weight`. In the files
that fastlatent writes, the header also describes the model, its latents and its classes. diffusers
stores a LoRA in one file, `pytorch_lora_weights.safetensors`, with PEFT's configuration in the
header.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.errors import UserError
from common.files import hash_file, make_folder, read_object, write_json
from common.text import is_figure, shorten_error
from models.adapters import PromptedLabels, find_trained_parameters, merge_adapter
from models.denoiser import Denoiser
from models.layers import LabelEmbedding
from training.checkpoint.files import METADATA_KEY, write_tensors
from training.checkpoint.load import find_weights_file
from training.weights.first_weights import add_adapter
from training.weights.pretrained import (
    AdapterNote,
    Description,
    build_described,
    build_model,
    find_description,
    fit_weights,
    load_pretrained,
    read_description,
    read_header,
    read_tensors,
    refuse_misfit,
)

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
DIFFUSERS_KEY = "lora_adapter_metadata"
"""Key in the header of a file of diffusers. The value is PEFT's configuration as JSON, with the
name of the pipeline's part before each key, such as `transformer.lora_alpha`."""
PEFT_PREFIX = "base_model.model."
FACTOR = re.compile(
    r"(?:base_model\.model\.|transformer\.|diffusion_model\.|unet\.)*(.+)\.lora_([AB])\.weight"
)
"""Matches the name of a LoRA matrix as PEFT, diffusers and others write it; the groups are the name
of the layer and of the matrix."""
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
    "rank_pattern",
    "alpha_pattern",
}
"""Keys of PEFT's configuration that either do not affect the output of a trained LoRA or that this
file reads. All other keys must have a value that switches them off: null, false, "none", empty, or
that of `PEFT_DEFAULTS`."""
PEFT_DEFAULTS = {"megatron_core": "megatron.core", "qalora_group_size": 16}
"""Keys whose default in PEFT is another value: it counts only with a key that is refused."""
PATTERN_KEYS = ("rank_pattern", "alpha_pattern")
KNOWN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of PEFT's key `init_lora_weights` with which PEFT leaves the base model's weights
unchanged."""


class OpenedModel(NamedTuple):
    """A model that was read from a file, in evaluation mode, with its adapter merged if it has
    one."""

    model: Denoiser
    description: Description
    """The description in the header of `file`. An adapter's file that PEFT wrote holds no
    description; then this is the base model's description, with a note about the adapter."""
    file: Path
    """Path of the adapter's file if there is an adapter, otherwise of the model's file."""
    sha256: str
    """The sha256 of the content of `file`."""


def load_model(file: Path, device: torch.device, adapter: str | None = None) -> OpenedModel:
    """Loads the model in `file` and merges the adapter that `adapter` names: a folder of PEFT or
    diffusers, an adapter's file, a checkpoint or a run. If `adapter` is None and `file` itself
    holds an adapter, loads the base model of that adapter and merges the adapter.

    UserError if the adapter was trained on another model, or its tensors do not fit the model.
    """
    if adapter is not None:
        for name in (TENSORS_FILE, DIFFUSERS_FILE):
            foreign_file = Path(adapter).expanduser() / name
            if foreign_file.is_file():
                return load_adapted(foreign_file, file, device)
        return load_adapted(find_weights_file(adapter, "adapter"), file, device)

    description = read_description(file)
    note = description.adapter
    if note is None:
        return OpenedModel(load_pretrained(file, device)[0], description, file, hash_file(file))
    base = Path(note.base)
    if not base.is_file():
        raise UserError(
            f"{file} is an adapter on {base}, which does not exist; use weights=<that file> "
            f"adapter={file} instead."
        )
    return load_adapted(file, base, device)


def load_adapted(file: Path, base: Path, device: torch.device) -> OpenedModel:
    """Loads the model in the file `base`, and merges the adapter in `file` into it. UserError if
    the adapter was trained on other weights, or does not fit the model."""
    base_description = read_description(base)
    base_tensors = read_tensors(base).values()
    tensors = read_tensors(file)
    description = find_description(file)
    if description is None:
        tensors, description = read_foreign_lora(
            file, tensors, base, base_description, base_tensors
        )
    note = description.adapter
    if note is None or base_description.adapter is not None:
        wrong = f"{base} is an adapter" if note else f"{file} is a model"
        raise UserError(f"{wrong}; name a model by weights= and an adapter by adapter=.")
    base_sha256 = hash_file(base) if note.base_sha256 else ""
    if base_sha256 != note.base_sha256:
        raise UserError(
            f"{file} was trained on other weights (sha256 {note.base_sha256[:12]}…) than {base} "
            f"has ({base_sha256[:12]}…); use those."
        )

    # Check that the adapter's tensors fit, after translating PEFT's names to fastlatent's. Build
    # the model for this on the meta device, which allocates no memory.
    with build_described(file, description, [*base_tensors, *tensors.values()]) as model:
        add_adapter(model, note.node, note.labels)
    parameters = find_trained_parameters(model)
    names = {to_peft_name(name): name for name in parameters}
    tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    refuse_misfit(file, "the adapter that it describes", tensors, parameters)

    # Build the model with the base model's weights, and merge the adapter.
    model = build_model(description.model, description.spec, device)
    tensors_of_base, _ = fit_weights(model, description.spec, base, description.model)
    model.load_state_dict(tensors_of_base)
    add_adapter(model, note.node, note.labels)
    model.load_state_dict(model.state_dict() | tensors)
    merge_adapter(model)
    for name, tensor in model.state_dict().items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{file} makes {name} of the model not finite; use another checkpoint of the "
                "adapter."
            )
    return OpenedModel(model.eval(), description, file, hash_file(file))


def to_peft_name(name: str) -> str:
    """Returns the name that PEFT gives to the parameter that fastlatent calls `name`; `name`
    belongs to an adapter."""
    if name.endswith(".prompt"):
        return PROMPT_KEY
    suffix = ".weight" if name.endswith((".lora_A", ".lora_B")) else ""
    return PEFT_PREFIX + name.replace(".base_layer.", ".") + suffix


def read_foreign_lora(
    file: Path,
    tensors: Mapping[str, Tensor],
    base: Path,
    base_description: Description,
    base_tensors: Collection[Tensor],
) -> tuple[dict[str, Tensor], Description]:
    """Returns the tensors of a LoRA that another tool wrote to `file`, by our names, and its
    description; it was trained on the model in `base`, which has `base_tensors`. UserError if it
    is anything other than plain LoRA, if its alpha is not stated, or if a tensor belongs to no
    linear layer of that model."""
    place, config = find_lora_config(file)
    refuse_other_adapters(place, config)

    # Find the layer of each tensor.
    with build_described(base, base_description, base_tensors) as model:
        linear = {name for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    matches = {name: FACTOR.fullmatch(name) for name in tensors}
    fitting = {name: match for name, match in matches.items() if match and match[1] in linear}
    renamed = {f"{match[1]}.lora_{match[2]}": tensors[name] for name, match in fitting.items()}
    if not renamed or len(renamed) < len(tensors):
        stranger = next((name for name in tensors if name not in fitting), "one of two alike")
        raise UserError(
            f"{file}: {len(renamed)} of {len(tensors)} tensors are LoRA matrices of linear layers "
            f"of {base}, and {stranger[:200]} is none; use weights=<the model on which it was "
            "trained>, and a LoRA of linear layers alone."
        )
    layers = sorted({match[1] for match in fitting.values()})

    # A layer has the value of the first of PEFT's patterns, regular expressions, that matches its
    # name or the end of it.
    node = {
        "_target_": "models.adapters.Lora",
        "rank": config["r"],
        "alpha": config["lora_alpha"],
        "targets": layers,
    }
    try:
        for key, default in (("rank_pattern", config["r"]), ("alpha_pattern", node["alpha"])):
            patterns = (config.get(key) or {}).items()
            node[key] = {
                layer: next((v for p, v in patterns if re.match(rf"(.*\.)?({p})$", layer)), default)
                for layer in layers
            }
    except re.error as error:
        raise UserError(
            f"{place}: {str(error.pattern)[:80]} is no regular expression ({error})."
        ) from error
    return renamed, replace(base_description, adapter=AdapterNote(node, "", False, ""))


def find_lora_config(file: Path) -> tuple[str, dict[str, Any]]:
    """Finds PEFT's configuration of the LoRA in `file`, beside it or in its header. Returns its
    place, for messages, and the configuration; UserError if there is none."""
    text = read_header(file, DIFFUSERS_KEY)
    config_file = file.with_name(CONFIG_FILE)
    if text is None and config_file.is_file():
        return str(config_file), read_object(config_file)
    if text is None:
        raise UserError(
            f"{file} does not say its alpha, neither in {CONFIG_FILE} beside it nor in its header "
            f"({DIFFUSERS_KEY}), and another alpha gives another model; save it again by PEFT or "
            "diffusers."
        )
    place = f"{file}: {DIFFUSERS_KEY} in its header"
    try:
        return place, {key.rpartition(".")[2]: value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{place} is no JSON object ({shorten_error(error)}).") from error


def refuse_other_adapters(place: str, config: Mapping[str, Any]) -> None:
    """Raises UserError if PEFT's configuration describes anything except a plain LoRA on unchanged
    weights of the base model: merging any other adapter here gives another result than PEFT's."""
    if config.get("peft_type", "LORA") != "LORA":
        raise UserError(
            f"{place}: peft_type={str(config['peft_type'])[:80]} is not supported; LORA is."
        )
    refused = [
        key
        for key, value in config.items()
        if key not in HARMLESS_KEYS
        and value not in (None, False, "none", {}, [], PEFT_DEFAULTS.get(key))
    ]

    numbers = {key: config.get(key) or {} for key in PATTERN_KEYS}
    numbers |= {key: config.get(key) for key in ("r", "lora_alpha")}
    for key, value in numbers.items():
        figures = value.values() if isinstance(value, dict) else [value]
        is_fit = all(is_figure(figure) and 0 < figure < math.inf for figure in figures)
        if not is_fit or isinstance(value, dict) != (key in PATTERN_KEYS):
            refused.insert(0, key)
    if config.get("init_lora_weights") not in KNOWN_STARTS:
        refused.append("init_lora_weights")
    if refused:
        value = str(config.get(refused[0]))[:80]
        raise UserError(f"{place}: {refused[0]}={value} is not supported; plain LoRA is.")


def write_peft(file: Path, folder: Path) -> None:
    """Reads the adapter in `file`, the weights file of a checkpoint, and writes it to a new
    `folder` in PEFT's format. UserError if the file holds no adapter."""
    description = read_description(file)
    tensors = read_tensors(file)
    note = description.adapter
    if note is None:
        raise UserError(
            f"{file} holds a model, no adapter; format=peft is for runs with adapter=lora or "
            "prompt."
        )

    # If an MLP computes the vectors of a prompt, replace the MLP by these vectors, because PEFT
    # stores only vectors.
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
        config |= {key: note.node.get(key) or {} for key in PATTERN_KEYS}

    # If the table of label embeddings was trained too, list the table under `modules_to_save`,
    # PEFT's key for modules whose weights are saved whole.
    modules = [
        name.removesuffix(".weight").replace(".base_layer.", ".")
        for name in tensors
        if ".table." in name
    ]
    header = {METADATA_KEY: json.dumps(asdict(replace(description, adapter=note)))}
    peft_tensors = {to_peft_name(name): tensor for name, tensor in tensors.items()}
    make_folder(folder)
    write_tensors(folder / TENSORS_FILE, peft_tensors, header)
    write_json(folder / CONFIG_FILE, config | {"modules_to_save": modules or None})


def replace_mlp(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a copy of `tensors` in which the vectors of the prompt `name` replace the MLP that
    computes them, if the prompt has an MLP."""
    prompt = {
        key.removeprefix(f"{name}."): tensor
        for key, tensor in tensors.items()
        if key.startswith(f"{name}.")
    }
    if "mlp.0.weight" not in prompt:
        return dict(tensors)
    rows, width = prompt["prompt"].shape
    layer = PromptedLabels(LabelEmbedding(width, rows - 1), len(prompt["mlp.0.weight"]))
    layer.load_state_dict(layer.state_dict() | prompt)
    others = {key: t for key, t in tensors.items() if not key.startswith(f"{name}.mlp.")}
    return others | {f"{name}.prompt": layer.compute_vectors().detach()}
