"""The parts of a run, built from its configuration."""

from __future__ import annotations

import inspect
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from accel.ledger import Ledger
from accel.stack import AccelerationStack
from data.loader import LatentLoader, LatentSpec
from models.autoencoders import Autoencoder
from models.denoiser import Denoiser
from training.build import build, resolve_target
from training.checkpoint import Checkpoints, load, resolve_weights
from training.config import Composed
from training.optim import parameter_groups
from training.schema import TrainConfig
from training.state import TrainState


def spine(node: Any) -> dict[str, Any]:
    """A typed node as keyword arguments, choices as plain strings."""
    values = {f.name: getattr(node, f.name) for f in fields(node)}
    return {k: v.value if isinstance(v, Enum) else v for k, v in values.items()}


def build_loader(cfg: TrainConfig, device: torch.device) -> LatentLoader:
    return build(cfg.data, "data", batch_size=cfg.batch_size // cfg.accumulation_steps, seed=cfg.seed, device=device)


def build_model(node: dict[str, Any], spec: LatentSpec, device: torch.device) -> Denoiser:
    """The denoiser for `spec`, made without memory on the meta device, then initialised on `device`."""
    with torch.device("meta"):
        model = build(
            node, "model", channels=spec.channels, height=spec.height, width=spec.width, num_classes=spec.num_classes
        )
    model = model.to_empty(device=device)
    model.init_weights()
    return model


def build_optimizer(node: dict[str, Any], model: Denoiser, stack: AccelerationStack) -> torch.optim.Optimizer:
    """The optimizer over the model's parameter groups, with the stack's arguments where its class takes them."""
    known = inspect.signature(resolve_target(node.get("_target_", ""), "optim")).parameters
    extra = {name: value for name, value in stack.optimizer_kwargs().items() if name in known}
    return build(
        node, "optim", parameter_groups(model, node.get("weight_decay", 0.0)), kind=torch.optim.Optimizer, **extra
    )


def build_autoencoder(spec: LatentSpec, device: torch.device) -> Autoencoder:
    """The autoencoder that the latents were made with; ValueError if its weights are others."""
    autoencoder = build(spec.encoder, "encoder", kind=Autoencoder).to(device)
    if spec.encoder_sha256 not in (None, autoencoder.weights_sha256):
        raise ValueError(
            f"the encoder at {spec.encoder.get('path')} has other weights than the one that made the latents "
            f"(sha256 {autoencoder.weights_sha256} instead of {spec.encoder_sha256}); restore it or encode again."
        )
    return autoencoder


def identity(composed: Composed, spec: LatentSpec, ledger: Ledger) -> dict[str, Any]:
    """What a checkpoint says about its run; `model` and `data` must be equal on resume."""
    cfg: TrainConfig = composed.cfg
    return {
        "model": cfg.model,
        "data": {"fingerprint": spec.fingerprint, "seed": cfg.seed},
        "spec": spec.as_dict(),
        "seed": cfg.seed,
        "choices": composed.choices,
        "ledger": ledger.as_dict(),
    }


def restore(cfg: TrainConfig, state: TrainState, checkpoints: Checkpoints, identity: dict[str, Any]) -> str:
    """Continues from `resume`, or else takes the weights of `init_from`; says in a sentence what it did."""
    if cfg.resume not in ("auto", "never"):
        load(Path(cfg.resume).expanduser(), state, identity)
        return f"resumed from {cfg.resume} at step {state.step}"
    folder = checkpoints.load_latest(state, identity) if cfg.resume == "auto" else None
    if folder:
        return f"resumed from {folder} at step {state.step}"
    if cfg.init_from is not None:
        file = resolve_weights(cfg.init_from)
        try:
            state.model.load_state_dict(load_file(file))
        except RuntimeError as error:
            raise ValueError(f"init_from={cfg.init_from}: {file} does not fit this model: {error}") from error
        state.ema.load_state_dict({name: p.detach() for name, p in state.model.named_parameters()})
        return f"starting with the weights of {file}"
    return "starting from scratch"
