"""The folder that diffusers opens: `transformer/`, `vae/`, `pipeline.py`, `model_index.json` and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.autoencoders import PixelAutoencoder
from scripts.export.source import File, Name
from training.checkpoint.tensor_file import write_tensors
from training.config.schema import SamplingConfig
from training.pretrained import is_part_of_model
from training.sampling import TrainedModel

MODELLING, TRANSFORMER = "modeling_fastlatent", "FastlatentTransformer"
PIPELINE = "FastlatentPipeline"
HERE = "scripts.export."
GENERATED = (
    "{what}, cut out of the sources of fastlatent by `python -m scripts.export`; Apache-2.0.\n\n"
    "Letters: B samples, C channels, H W latent height and width, L tokens, D width, K heads, P head dim, N state\n"
    "size, E inner width.\n"
)
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
    for key, part in {"model": node, **{key: node[key] for key in ("mixer", "mlp") if key in node}}.items():
        target = str(part["_target_"])
        if not (is_part_of_model(target) and target.startswith("models.")) or (
            key == "model" and target != "models.denoiser.Denoiser"
        ):
            raise ValueError(
                f"{key}._target_={target} is code of your own, which format=diffusers cannot copy into one file; "
                f"use format=torch_export."
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
    return found.write(GENERATED.format(what="A denoiser of latents")), {key: told for key, (_, told) in layers.items()}


def pipeline() -> str:
    """The source of the pipeline as one file."""
    found = File({})
    found.add(Name(f"{HERE}pipeline", PIPELINE))
    return found.write(GENERATED.format(what="Draws images with a denoiser of latents"))


def write_folder(folder: Path, trained: TrainedModel, node: Mapping[str, Any], card: str, include: bool) -> None:
    """Writes all files of the folder. `include`: the autoencoder's too, where diffusers itself can open it."""
    import diffusers

    exportable(node)
    spec, version = trained.spec, diffusers.__version__
    source, layers = modelling(node)
    vae = getattr(trained.autoencoder, "vae", None)
    sizes = {name: getattr(spec, name) for name in ("channels", "height", "width", "num_classes")}
    told = {key: value for key, value in node.items() if key not in ("_target_", *layers)}
    latents = {"mean": spec.mean, "std": spec.std, "class_names": spec.names, "sampling": plain(trained.sampling)}
    latents["autoencoder"] = autoencoder_of(trained)
    config = {"_class_name": TRANSFORMER, "_diffusers_version": version} | sizes | told | layers
    auto = {"auto_map": {"AutoModel": f"{MODELLING}.{TRANSFORMER}"}}
    config |= auto | {"latents": latents}
    part = folder / "transformer"
    part.mkdir()
    (part / f"{MODELLING}.py").write_text(source)
    (part / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    write_tensors(part / "diffusion_pytorch_model.safetensors", trained.model.state_dict(), {})
    index: dict[str, Any] = {"_class_name": ["pipeline", PIPELINE], "_diffusers_version": version}
    index |= {"transformer": [MODELLING, TRANSFORMER], "vae": [None, None]} | auto  # AutoModel looks here first
    if vae is not None and include:
        vae.save_pretrained(folder / "vae")
        index["vae"] = ["diffusers", trained.autoencoder.kind]
    (folder / "pipeline.py").write_text(pipeline())
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "README.md").write_text(card)


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


def opens_in_diffusers(trained: TrainedModel) -> bool:
    """Whether diffusers' own class computes what the autoencoder does: not with the global branches of TAEF2."""
    if isinstance(trained.autoencoder, PixelAutoencoder):
        return True
    vae = getattr(trained.autoencoder, "vae", None)
    return vae is not None and not any(".pool." in name for name, _ in vae.named_parameters())
