"""The folder that diffusers opens: `transformer/`, `vae/`, `pipeline.py`, `model_index.json` and a
model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from common.errors import UserError
from models.autoencoders import PixelAutoencoder
from sampling.load import TrainedModel
from scripts.export.source import File, Name
from training.checkpoint.files import write_tensors
from training.config.schema import SamplingConfig
from training.weights.pretrained import is_part_of_model

MODELLING = "modeling_fastlatent"
TRANSFORMER = "FastlatentTransformer"
AUTOENCODING = "modeling_autoencoder"
AUTOENCODER = "FastlatentAutoencoder"
PIPELINE = "FastlatentPipeline"
HERE = "scripts.export."
GENERATED = (
    "{what}, cut out of the sources of fastlatent by `python -m scripts.export`; Apache-2.0.\n\n"
    "Letters: B samples, C channels, H W latent height and width, L tokens, D width, K heads,\n"
    "P head dim, N state size, E inner width.\n"
)
AUTO = {"auto_map": {"AutoModel": f"{MODELLING}.{TRANSFORMER}"}}
SAMPLING = ("solver", "steps", "guidance", "guidance_interval", "shift")


def layer_of(node: Mapping[str, Any], key: str) -> tuple[type, dict[str, Any]]:
    """The class of a layer, and what the exported model's configuration says of it."""
    from training.config.build import resolve_target

    return resolve_target(node["_target_"], f"model.{key}"), {
        "name": node["_target_"].rpartition(".")[2],
        **{name: value for name, value in node.items() if name not in ("_target_", "_partial_")},
    }


def exportable(node: Mapping[str, Any]) -> None:
    """ValueError for a model with code of somebody's own, which cannot be copied into one file."""
    for key, part in {
        "model": node,
        **{key: node[key] for key in ("mixer", "mlp") if key in node},
    }.items():
        target = str(part["_target_"])
        if not (is_part_of_model(target) and target.startswith("models.")) or (
            key == "model" and target != "models.denoiser.Denoiser"
        ):
            raise UserError(
                f"{key}._target_={target} is code of your own, which format=diffusers cannot copy "
                "into one file; use format=torch_export."
            )


def modelling(node: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The source of the model as one file, and the configuration of its layers."""
    layers = {key: layer_of(node[key], key) for key in ("mixer", "mlp") if key in node}
    kinds = {kind.__name__: kind for kind, _ in layers.values()}
    pairs = ", ".join(f'"{name}": {name}' for name in kinds)
    registry = Name(f"{HERE}transformer", "LAYERS")
    found = File({registry: f"LAYERS: dict[str, type[nn.Module]] = {{{pairs}}}"})
    for kind in kinds.values():
        found.add(Name(kind.__module__, kind.__name__))
    found.add(Name(f"{HERE}transformer", TRANSFORMER))
    return found.write(GENERATED.format(what="A denoiser of latents")), {
        key: told for key, (_, told) in layers.items()
    }


def source_of_class(module: str, name: str, what: str) -> str:
    """The source of a class of this package, with all that it needs, as one file."""
    found = File({})
    found.add(Name(f"{HERE}{module}", name))
    return found.write(GENERATED.format(what=what))


def write_folder(
    folder: Path, trained: TrainedModel, node: Mapping[str, Any], card: str, include: bool
) -> None:
    """Writes all files of the folder. `include`: the autoencoder's too."""
    exportable(node)
    write_transformer(folder / "transformer", trained, node)
    # AutoModel looks into the index first.
    index = {"_class_name": ["pipeline", PIPELINE], **version(), **AUTO}
    index |= {"transformer": [MODELLING, TRANSFORMER], "vae": [None, None]}
    vae = getattr(trained.autoencoder, "vae", None)
    if vae is not None and include:
        vae.save_pretrained(folder / "vae")
        index["vae"] = ["diffusers", trained.autoencoder.kind]
        if branches := branches_of(vae):
            write_branches(folder / "vae", vae.config, branches)
            index["vae"] = [AUTOENCODING, AUTOENCODER]
    source = source_of_class("pipeline", PIPELINE, "Draws images with a denoiser of latents")
    (folder / "pipeline.py").write_text(source)
    write_json(folder / "model_index.json", index)
    (folder / "README.md").write_text(card)


def version() -> dict[str, str]:
    import diffusers

    return {"_diffusers_version": diffusers.__version__}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def write_transformer(part: Path, trained: TrainedModel, node: Mapping[str, Any]) -> None:
    """Writes the denoiser: code, configuration and weights."""
    spec = trained.spec
    source, layers = modelling(node)
    sizes = {name: getattr(spec, name) for name in ("channels", "height", "width", "num_classes")}
    told = {key: value for key, value in node.items() if key not in ("_target_", *layers)}
    latents = {
        "mean": spec.mean,
        "std": spec.std,
        "class_names": spec.names,
        "sampling": plain(trained.sampling),
        "autoencoder": autoencoder_of(trained),
        "global_branches": bool(branches_of(getattr(trained.autoencoder, "vae", None))),
    }
    config = {"_class_name": TRANSFORMER, **version(), **sizes, **told, **layers, **AUTO}
    part.mkdir()
    (part / f"{MODELLING}.py").write_text(source)
    write_json(part / "config.json", config | {"latents": latents})
    write_tensors(part / "diffusion_pytorch_model.safetensors", trained.model.state_dict(), {})


def write_branches(part: Path, config: Mapping[str, Any], branches: dict[str, list[int]]) -> None:
    """Writes code and configuration of an autoencoder with global branches."""
    added = "block_out_channels"  # by diffusers itself
    sizes = {key: value for key, value in config.items() if key != added and key[0] != "_"}
    told = {"_class_name": AUTOENCODER, **version(), "sizes": sizes, "branches": branches}
    write_json(part / "config.json", told)
    source = source_of_class("autoencoder", AUTOENCODER, "An autoencoder")
    (part / f"{AUTOENCODING}.py").write_text(source)


def plain(sampling: SamplingConfig) -> dict[str, Any]:
    """How the run drew its own samples."""
    return {key: getattr(value := getattr(sampling, key), "value", value) for key in SAMPLING}


def autoencoder_of(trained: TrainedModel) -> str:
    """What decodes the latents, for whoever has to find it; "" where they are pixels."""
    if isinstance(trained.autoencoder, PixelAutoencoder):
        return ""
    path, revision = (trained.spec.encoder.get(key) for key in ("path", "revision"))
    if path is None:
        return str(trained.spec.encoder.get("_target_"))
    return Path(path).name if Path(path).is_absolute() else f"{path}, revision {revision}"


def branches_of(vae: nn.Module | None) -> dict[str, list[int]]:
    """Blocks with a global branch of TAEF2 -> (hidden channels, channels) of it. diffusers' own
    classes have none."""
    found = {} if vae is None else dict(vae.named_parameters())
    end = ".pool.0.weight"
    return {
        name.removesuffix(end): [*weight.shape[:2]]
        for name, weight in found.items()
        if name.endswith(end)
    }


def can_be_included(trained: TrainedModel) -> bool:
    """Whether the autoencoder can be written into the folder; one of the user's own cannot."""
    return isinstance(trained.autoencoder, PixelAutoencoder) or hasattr(trained.autoencoder, "vae")
