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
from accel.parallel import world_size
from accel.stack import AccelerationStack
from data.loader import LatentLoader, LatentSpec
from models.autoencoders import Autoencoder
from models.denoiser import Denoiser
from training.build import build, resolve_target
from training.checkpoint import Checkpoints, load, resolve_weights
from training.config import Composed
from training.ema import EMA
from training.metrics import Meter
from training.objective import FlowMatching
from training.optim import parameter_groups
from training.peak_flops import peak_flops
from training.ranks import SINGLE, Ranks
from training.schedule import Schedule
from training.schema import RuntimeConfig, TrainConfig
from training.state import TrainState, load_weights
from training.step import TrainStep


def spine(node: Any) -> dict[str, Any]:
    """A typed node as keyword arguments, choices as plain strings."""
    values = {f.name: getattr(node, f.name) for f in fields(node)}
    return {k: v.value if isinstance(v, Enum) else v for k, v in values.items()}


def runtime_values(runtime: RuntimeConfig) -> dict[str, Any]:
    """The runtime keys by technique: those of `parallel` beside the others, its mode under the technique's name."""
    parallel = spine(runtime.parallel)
    return spine(runtime) | parallel | {"parallel": parallel["mode"]}


def build_loader(
    node: dict[str, Any], seed: int, micro_batch: int, device: torch.device, ranks: Ranks = SINGLE
) -> LatentLoader:
    """The loader of this process's share: `micro_batch` samples of each micro-batch."""
    shared = {"seed": seed, "device": device, "rank": ranks.rank, "world_size": ranks.world_size}
    return build(node, "data", batch_size=micro_batch, **shared)


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


def build_stack(cfg: TrainConfig, device: torch.device) -> AccelerationStack:
    """The techniques that `runtime` asks for; ValueError if one cannot be had and `on_unavailable` is error, and if
    several processes would train apart from each other."""
    strictness = {"on_unavailable": cfg.runtime.on_unavailable.value, "deterministic": cfg.deterministic}
    stack = AccelerationStack(runtime_values(cfg.runtime), device, **strictness)
    if world_size() > 1 and stack.value("parallel") == "none":
        reason = stack.reasons.get("parallel", "Each would train a model of its own; use auto, or start one process.")
        mode = cfg.runtime.parallel.mode.value
        raise ValueError(f"runtime.parallel.mode={mode} with {world_size()} processes: {reason}")
    return stack


def build_step(
    cfg: TrainConfig,
    model: Denoiser,
    loader: LatentLoader,
    objective: FlowMatching,
    optimizer: torch.optim.Optimizer,
    stack: AccelerationStack,
    ranks: Ranks = SINGLE,
) -> tuple[TrainState, TrainStep]:
    """All that changes in a run, and what changes it; `stack.on_model` has been applied to `model`."""
    device = next(model.parameters()).device
    ema = EMA(model, **spine(cfg.ema))
    schedule = Schedule(total_samples=cfg.total_samples, **spine(cfg.schedule))
    peak = peak_flops(device, str(stack.value("precision")))
    meter = Meter(cfg.batch_size, model.tokens, model.flops_per_sample(), peak, ranks)
    state = TrainState(model, optimizer, ema, loader, meter, stack)
    rates = {"seed": cfg.seed, "batch_size": cfg.batch_size, "max_grad_norm": cfg.max_grad_norm}
    return state, stack.on_step(TrainStep(model, objective, optimizer, schedule, ema, **rates))


def build_autoencoder(spec: LatentSpec, device: torch.device, path: str | None = None) -> Autoencoder:
    """The autoencoder that made the latents, or the same one at `path`; ValueError if its weights are others."""
    node = spec.encoder if path is None else spec.encoder | {"path": path}
    autoencoder = build(node, "encoder", kind=Autoencoder).to(device)
    if spec.encoder_sha256 not in (None, autoencoder.weights_sha256):
        raise ValueError(
            f"the encoder at {node.get('path')} has other weights than the one that made the latents "
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
    """Continues the run, or starts it from `resume` or `init_from`; says in a sentence what it did.

    A checkpoint that `resume` names is where a new run starts; the same command again continues that run from its own
    newest checkpoint. An older checkpoint of the same run is a ValueError: later ones would be lost or win.
    """
    branch = None if cfg.resume in ("auto", "never") else Path(cfg.resume).expanduser().resolve()
    found = checkpoints.found()
    if branch and found and branch.parent == checkpoints.folder.resolve() and branch != found[-1].resolve():
        raise ValueError(
            f"resume={cfg.resume}: run_dir holds a later checkpoint, {found[-1].name}; use a new run_dir to branch off."
        )
    if cfg.resume != "never" and (folder := checkpoints.load_latest(state, identity)):
        return f"resumed from {folder} at step {state.step}"
    if branch:
        load(branch, state, identity)
        return f"resumed from {branch} at step {state.step}"
    if cfg.init_from is not None:
        file = resolve_weights(cfg.init_from)
        try:
            load_weights(state.model, load_file(file))
        except RuntimeError as error:
            raise ValueError(f"init_from={cfg.init_from}: {file} does not fit this model: {error}") from error
        state.ema.load_state_dict({name: p.detach() for name, p in state.model.named_parameters()})
        return f"starting with the weights of {file}"
    return "starting from scratch"
