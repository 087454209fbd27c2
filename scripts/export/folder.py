"""Writes the folder that diffusers opens: `transformer/`, `vae/`, `pipeline.py`, `model_index.json`
and a model card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import nn

from common.config.build import resolve_target
from common.errors import UserError
from common.files import write_atomically, write_json
from models.autoencoders import ByteAutoencoder
from sampling.draw import SAMPLER_KEYS
from sampling.load import TrainedModel
from scripts.export.source import join_sources
from scripts.report.history import name_autoencoder
from training.checkpoint.files import write_tensors
from training.weights.pretrained import list_sizes, list_targets

MODELLING = "modeling_fastlatent"
TRANSFORMER = "FastlatentTransformer"
AUTOENCODING = "modeling_autoencoder"
AUTOENCODER = "FastlatentAutoencoder"
PIPELINE = "FastlatentPipeline"
CLASSES_MODULE = "scripts.export.classes."
ORIGIN = (
    ", cut out of the sources of fastlatent by `python -m scripts.export`; Apache-2.0.\n\n"
    "Letters: B samples, C channels, H W latent height and width, L tokens, D width, K heads,\n"
    "P head dim, N state size, E inner width.\n"
)
VERSION = {"_diffusers_version": diffusers.__version__}
AUTO_MAP = {"auto_map": {"AutoModel": f"{MODELLING}.{TRANSFORMER}"}}


def refuse_own_code(node: Mapping[str, Any]) -> None:
    """Raises a UserError for a model with the user's own code, which cannot be copied into one
    file."""
    for target in list_targets(node):
        known = "models." if target != node["_target_"] else "models.denoiser.Denoiser"
        if not str(target).startswith(known):
            raise UserError(
                f"_target_={target} of the model is code of your own, which format=diffusers "
                "cannot copy into one file; use format=weights."
            )


def write_folder(folder: Path, trained: TrainedModel, card: str, include: bool) -> None:
    """Writes all files of the folder; if `include`, also the files of the autoencoder."""
    refuse_own_code(trained.opened.description.model)
    write_transformer(folder / "transformer", trained)

    # Content of model_index.json, which diffusers' AutoModel reads before all other files.
    index = {
        "_class_name": ["pipeline", PIPELINE],
        **VERSION,
        **AUTO_MAP,
        "transformer": [MODELLING, TRANSFORMER],
        "vae": [None, None],
    }
    vae = getattr(trained.autoencoder, "vae", None)
    if vae is not None and include:
        vae.save_pretrained(folder / "vae")
        kind = ["diffusers", trained.autoencoder.kind]
        config = {key: value for key, value in vae.config.items() if not key.startswith("_")}
        if kind[1] == "AutoencoderTiny":
            # AutoencoderTiny adds this key itself, and warns of it in a file.
            del config["block_out_channels"]
        branches = find_branches(trained)
        if branches:
            kind = [AUTOENCODING, AUTOENCODER]
            config = {"sizes": config, "branches": branches}
            source = join_sources(f"An autoencoder{ORIGIN}", CLASSES_MODULE + AUTOENCODER)
            write_atomically(folder / f"vae/{AUTOENCODING}.py", source)
        write_json(folder / "vae/config.json", {"_class_name": kind[1], **VERSION, **config})
        index["vae"] = kind

    # The pipeline needs the code of the text encoder.
    kinds = [CLASSES_MODULE + PIPELINE]
    if trained.text_level != "none" and trained.spec.text is not None:
        kinds.insert(0, trained.spec.text.encoder["_target_"])
    source = join_sources(f"Draws images with a denoiser of latents{ORIGIN}", *kinds)
    write_atomically(folder / "pipeline.py", source)
    write_json(folder / "model_index.json", index)
    write_atomically(folder / "README.md", card)


def write_transformer(part: Path, trained: TrainedModel) -> None:
    """Writes the denoiser to the folder `part`: code, configuration and weights."""
    spec = trained.spec
    node = trained.opened.description.model
    arguments = {key: value for key, value in node.items() if key != "_target_"}

    if not node.get("attention_every"):
        arguments.pop("attention", None)

    # In config.json, name each layer by its class instead of by `_target_`, because
    # the exported file of code contains these classes. List these classes in `kinds`, so that
    # `join_sources` copies them into that file.
    kinds = []
    for key in ("mixer", "attention", "mlp"):
        if key not in arguments:
            continue
        layer = dict(node[key])
        kind = resolve_target(layer.pop("_target_"), f"model.{key}")
        layer.pop("_partial_", None)
        arguments[key] = {"name": kind.__name__, **layer}
        kinds.append(f"{kind.__module__}.{kind.__name__}")
    source = join_sources(f"A denoiser of latents{ORIGIN}", *kinds, CLASSES_MODULE + TRANSFORMER)
    if trained.text_level != "none" and spec.text is not None:
        encoder = dict(spec.text.encoder)
        encoder["name"] = encoder.pop("_target_").rpartition(".")[2]
        if Path(encoder.get("path") or "").is_absolute():  # a folder of this machine
            encoder["path"] = Path(encoder["path"]).name
        arguments["text"] = asdict(spec.text) | {"encoder": encoder}
    example = torch.zeros(1, *spec.shape, device=trained.device)
    latents = {
        "size": trained.decode(example).shape[1:3],
        "mean": spec.mean,
        "std": spec.std,
        "class_names": spec.names,
        "sampling": {key: vars(trained.sampling)[key] for key in SAMPLER_KEYS},
        "autoencoder": name_autoencoder(spec.encoder),
        "global_branches": bool(find_branches(trained)),
        "is_bytes": isinstance(trained.autoencoder, ByteAutoencoder),
    }
    config = {"_class_name": TRANSFORMER, **VERSION, **list_sizes(spec), **arguments, **AUTO_MAP}
    part.mkdir()
    write_atomically(part / f"{MODELLING}.py", source)
    write_json(part / "config.json", config | {"latents": latents})
    write_tensors(part / "diffusion_pytorch_model.safetensors", trained.model.state_dict(), {})


def find_branches(trained: TrainedModel) -> dict[str, list[int]]:
    """Returns a dict: name of each block of the autoencoder that has a global branch of TAEF2 ->
    [hidden channels, channels] of the branch. The classes of diffusers have no such branches."""
    vae = getattr(trained.autoencoder, "vae", nn.Identity())
    end = ".pool.0.weight"
    return {
        name.removesuffix(end): [*weight.shape[:2]]
        for name, weight in vae.named_parameters()
        if name.endswith(end)
    }


def can_be_included(trained: TrainedModel) -> bool:
    """Returns whether the folder can contain the autoencoder: False if the user wrote its class."""
    return not name_autoencoder(trained.spec.encoder) or hasattr(trained.autoencoder, "vae")
