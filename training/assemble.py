"""Builds a training run from its configuration, takes its steps, describes it for its checkpoints,
and restores it from a checkpoint."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accel.counted_rows import AdapterGradients, OptimizerState
from accel.ledger import Ledger
from accel.sharding import get_world_size
from accel.stack import AccelerationStack
from accel.technique import Technique
from common.clock import CLOCK
from common.config.build import build, resolve_target
from common.config.compose import Composed
from common.config.schema import TrainConfig
from common.distributed.ranks import SINGLE, Ranks
from common.environment import find_peak_flops
from common.errors import UserError
from data.loader import Batch, LatentLoader
from models.denoiser import Denoiser
from models.sampler import check_internal_guidance
from training.checkpoint.files import make_header
from training.checkpoint.load import (
    find_branch,
    find_newest_verified,
    find_weights_file,
    load,
    select_identity,
    verify,
)
from training.checkpoint.save import Checkpoints
from training.drawing import Conditions, Samples, check_guidance, list_samples, open_data
from training.heads import ModelWithHeads
from training.inputs import build_loader, find_text_level, prove_kernels
from training.objective import Objective
from training.optim.ema import EMA
from training.optim.groups import make_parameter_groups
from training.optim.power_averages import LENGTHS, PowerAverage
from training.optim.schedule import Schedule
from training.optim.spikes import SpikeGuard
from training.records.metrics import Meter, StepOutput
from training.state import TrainState, load_weights
from training.step import TrainStep
from training.weights.first_weights import Base, add_adapter, load_base, open_base
from training.weights.pretrained import build_model, fit_weights

CHANGEABLE_KEYS = (
    *("batch_size", "accumulation_steps", "total_samples", "max_grad_norm", "deterministic"),
    *("optim", "schedule", "ema", "guards", "runtime"),
)
"""Configuration keys that influence the trained weights, but may change when a run resumes."""

GRID_ROWS = 10
"""Largest number of rows in a sample grid; each row shows samples of one class or text."""


def build_optimizer(
    node: dict[str, Any], network: ModelWithHeads, stack: AccelerationStack
) -> torch.optim.Optimizer:
    """Builds the optimizer over the model's parameter groups. Techniques in `stack` may request
    constructor arguments, such as fused=True; the function passes those that the optimizer's
    constructor accepts."""
    kind = resolve_target(node.get("_target_", ""), "optim")
    known = set(inspect.signature(kind).parameters)

    # Do not use fused SGD: if it skips its first update, its momentum buffer is uninitialised.
    if kind is torch.optim.SGD:
        known.discard("fused")
    extra = {name: value for name, value in stack.make_optimizer_kwargs().items() if name in known}
    make = partial(build, node, "optim", kind=torch.optim.Optimizer, **extra)
    return stack.on_optimizer(make)(make_parameter_groups(network, node))


def build_stack(
    cfg: TrainConfig,
    device: torch.device,
    alone: bool = False,
    kind: type[AccelerationStack] = AccelerationStack,
) -> AccelerationStack:
    """Builds the stack of acceleration techniques that `cfg.runtime` selects.

    Raises UserError if a technique is unavailable and `on_unavailable` is "error". Also raises
    UserError if several processes train without synchronising gradients, unless `alone` is true.
    `kind` is the class of the stack; scripts.plan passes a subclass that assumes a GPU with all
    techniques.
    """
    # Add two checks to the ledger: the form (such as 8-bit) of the optimizer's state and, if there
    # is an adapter, the gradients of its parameters.
    optimizer = resolve_target(cfg.optim.get("_target_", ""), "optim")
    extra_rows: list[Technique] = [
        OptimizerState(optimizer, cfg.optim.get("momentum", 0.0), device)
    ]
    if cfg.adapter:
        adapter = resolve_target(cfg.adapter.get("_target_", ""), "adapter")
        extra_rows.append(AdapterGradients(adapter.__name__.lower(), device))
    stack = kind(
        cfg.runtime.values(),
        device,
        on_unavailable=cfg.runtime.on_unavailable,
        deterministic=cfg.deterministic,
        extra_rows=extra_rows,
    )
    reason = stack.explain_separate_training()
    if reason and not alone:
        mode = cfg.runtime.parallel.mode
        raise UserError(f"runtime.parallel.mode={mode} with {get_world_size()} processes: {reason}")
    return stack


@dataclass
class Training:
    """A training run, built from one configuration. `train.py`, the benchmarks and the tests all
    use this class."""

    cfg: TrainConfig
    device: torch.device
    ranks: Ranks
    loader: LatentLoader
    stack: AccelerationStack
    state: TrainState
    step: TrainStep
    base: Base | None = None
    """The base model of the adapter; None without an adapter."""
    kernels: dict[str, Any] = field(default_factory=dict)
    """The chosen fused kernels and the measurements behind the choice; empty if the run has no
    kernels to choose."""
    batches: Sequence[Batch] = ()
    """Micro-batches of the last step."""
    grid_rows: Conditions | None = None
    """Conditions of the rows of a sample grid, if the run draws any; `warm_up` chooses them."""

    @property
    def model(self) -> Denoiser:
        return self.state.model

    @property
    def micro_batch(self) -> int:
        """Number of samples in a micro-batch, per process."""
        return self.cfg.batch_size // self.cfg.accumulation_steps // self.ranks.world_size

    @cached_property
    def first_samples(self) -> Samples:
        """The first training samples in the order of seed 0, as many as the distances need. The
        first rank reads them; all ranks must read this property together."""
        cfg = self.cfg
        return self.ranks.broadcast_result(
            lambda: list_samples(
                open_data(cfg.data, self.loader.spec, 0, "pooled"),
                "train",
                max(GRID_ROWS, cfg.fd.count),
            )
        )

    def choose_conditions(self, source: str, count: int) -> Conditions:
        """Returns the conditions of `count` samples of the model: all classes in turn or, for a
        model of texts, those of the data's first samples: held-out ones if `source` is "held_out",
        and else `first_samples`. All ranks must call it together."""
        loader = self.loader
        if find_text_level(self.cfg.model) == "none":
            labels = loader.spec.labels[:count]
            return Conditions.of_classes(loader.spec, labels, "balanced", self.device)
        if source == "held_out":
            samples = list_samples(loader, source, count)
        else:
            samples = self.first_samples[:, :count]
        return Conditions.of_samples(source, samples, loader, self.device)

    def take_batches(self) -> list[Batch]:
        """Takes the micro-batches of one step from the loader."""
        return [next(self.loader) for _ in range(self.cfg.accumulation_steps)]

    def take_step(self) -> StepOutput:
        """Takes one training step: batches, update, meter and counters. Returns the step's figures
        (loss, gradient norm, …) as scalar tensors on the device."""
        state = self.state
        step = self.step
        with state.meter.measure_wait():
            self.batches = self.take_batches()
        step.mark("data")
        step.schedule(state.samples)
        output = step(self.batches)
        step.mark("rest")
        state.meter.update(output)
        step.mark("logging")
        state.step += 1
        state.samples += self.cfg.batch_size
        return output

    def close_window(self) -> dict[str, Any]:
        """Ends the meter's log window and adds its skipped steps to the state. Returns the metrics
        of the window."""
        state = self.state
        metrics = {"step": state.step, "samples": state.samples}
        metrics |= state.meter.report(self.step.lr)
        state.skipped_steps += metrics["skipped"]
        return metrics

    def note_skipped_data(self) -> dict[str, int]:
        """Records in the state the damaged data blocks that any rank has skipped under
        `data.on_corrupt=skip`. Returns their total number of samples, as the metric
        `skipped_data`."""
        state = self.state
        rank_skipped = self.loader.skipped
        new = float(not rank_skipped.keys() <= state.skipped_data.keys())
        if self.ranks.all_reduce(torch.tensor(new), "max"):
            for skipped in self.ranks.gather_objects(rank_skipped):
                state.skipped_data = state.skipped_data | skipped
        return {"skipped_data": sum(state.skipped_data.values())}

    def has_skipped_too_many(self) -> bool:
        """Says whether the last `guards.max_skipped_in_row` steps were all skipped. Uses a count
        that is a few steps old: it is already in host memory, so reading it does not wait for the
        device."""
        seen = self.state.meter.in_row_seen
        return seen is not None and float(seen) >= self.cfg.guards.max_skipped_in_row

    @CLOCK.count_as("warm_up")
    def warm_up(self) -> Ledger:
        """Takes steps until compilation has ended, observes in one step which techniques are
        active, and then restores the state from before these steps. Returns the ledger of the
        techniques."""
        if self.cfg.sample_every:
            # Choose the rows of grids now: the data may not be there later.
            source = "held_out" if self.loader.held_out_count else "train"
            self.grid_rows = self.choose_conditions(source, GRID_ROWS)
        with self.state.preserve():
            self.step.schedule(0, factor=1.0)
            ledger = self.stack.warm_up(
                lambda: self.step(self.take_batches()), self.model.blocks, self.step
            )
        self.state.meter.busy_ms = self.stack.busy_ms
        return ledger


def refuse_unfit(cfg: TrainConfig, loader: LatentLoader, model: Denoiser) -> None:
    """Raises a UserError for guidance that the data or the model does not allow, for a sweep's
    metric that needs held-out samples if the data have none, and for a model whose description no
    command could read from its checkpoints."""
    check_guidance(
        loader.spec, find_text_level(cfg.model), cfg.sampling.guidance, "sampling.guidance"
    )
    check_internal_guidance(model, cfg.sampling.internal_guidance, "sampling.")
    if cfg.sweep_metric == "eval_loss" and not loader.held_out_count:
        raise UserError(
            "sweep_metric=eval_loss needs held-out samples, and the data have none; choose loss."
        )
    # Leave room for the number of the step, and for what describes an adapter and its base.
    make_header({"model": cfg.model, "spec": loader.spec.as_dict(), "step": "0" * 2**14}, "model")


class Parts(NamedTuple):
    """The parts of a run that depend on its data, weights and device; plans (scripts/plan) use
    stand-ins."""

    loader: LatentLoader
    objective: Objective
    base: Base | None
    model: Denoiser
    stack: AccelerationStack


def join_parts(cfg: TrainConfig, device: torch.device, ranks: Ranks, parts: Parts) -> Training:
    """Adds the adapter and the objective's heads to the model, applies the techniques, and builds
    optimizer, state and step."""
    loader, objective, base, model, stack = parts
    if base is not None:
        add_adapter(model, cfg.adapter, base.new_classes)
    network = ModelWithHeads(model)
    objective.attach_heads(network)

    # Apply the techniques before building the optimizer, because sharding replaces the parameters.
    network = stack.on_model(network)
    optimizer = build_optimizer(cfg.optim, network, stack)

    # Build the state of the run, and the step, which changes that state.
    ema = EMA(model, cfg.ema.half_life_samples, cfg.ema.ramp)
    schedule = Schedule(total_samples=cfg.total_samples, **vars(cfg.schedule))
    peak = find_peak_flops(device, stack.precision)
    meter = Meter(cfg.batch_size, model.tokens, network.count_train_flops(), peak, ranks)
    spikes = None
    if cfg.guards.spike_sigmas:
        spikes = SpikeGuard(cfg.guards.spike_sigmas, cfg.guards.spike_window, device)
    state = TrainState(network, optimizer, ema, loader, meter, stack, spikes, cfg.total_samples)
    if cfg.ema.snapshots:
        state.power_averages = [PowerAverage(model, length) for length in LENGTHS]
    step = stack.on_step(TrainStep(cfg, state, objective, schedule))
    return Training(cfg, device, ranks, loader, stack, state, step, base)


def assemble(
    cfg: TrainConfig,
    device: torch.device,
    ranks: Ranks = SINGLE,
    folder: Path | None = None,
    loader: LatentLoader | None = None,
) -> Training:
    """Builds the loader, unless it is given, the model with the weights of an adapter's base, its
    techniques, the optimizer, the state and the step.

    `folder` is the run folder; if the run chose fused kernels before, the folder holds that choice.
    Raises UserError, with a one-sentence message, if a part cannot be built.
    """
    if loader is None:
        samples = cfg.batch_size // cfg.accumulation_steps // ranks.world_size
        level = find_text_level(cfg.model)
        loader = build_loader(cfg.data, cfg.seed, samples, device, ranks, level)
    loader.wait_for_batch_seconds = 60.0 * cfg.runtime.parallel.timeout_minutes
    objective = build(cfg.objective, "objective", kind=Objective)
    base = open_base(cfg, loader, ranks)
    model = build_model(cfg.model, loader.spec, device)
    refuse_unfit(cfg, loader, model)

    stack = build_stack(cfg, device)
    stack.on_process()
    kernels = prove_kernels(stack, model, loader.spec, loader.batch_size, folder)
    if base is not None:
        rows = load_base(model, loader.spec, base, cfg.model)
        if rows:
            ranks.say(f"the adapter's base is {base.file}{rows}")
    training = join_parts(cfg, device, ranks, Parts(loader, objective, base, model, stack))
    training.kernels = kernels
    return training


def describe_run(composed: Composed, training: Training, ledger: Ledger) -> dict[str, Any]:
    """Describes a run for its checkpoints, as nested dicts of JSON types.

    When a run resumes, its `model`, `data`, `objective`, `optimizer` and `adapter` (with its base
    model) must equal those of the checkpoint; `settings` may differ, and the resumed run reports
    the differences.
    """
    cfg = composed.cfg
    spec = training.loader.spec
    base = training.base
    identity = select_identity(vars(cfg))
    settings = {key: node for key, node in composed.source.items() if key in CHANGEABLE_KEYS}
    settings |= {key: asdict(cfg)[key] for key in ("total_samples", "schedule", "ema")}
    if base is not None:
        identity["adapter"] = {
            "node": identity["adapter"],
            "base_sha256": base.sha256,
            "labels": base.new_classes,
        }
    return {
        **identity,
        "base": base and str(base.file),
        "data": {"fingerprint": spec.fingerprint, **identity["data"]},
        # JSON types, such as the value of an enum member
        "settings": json.loads(json.dumps(settings)),
        "spec": spec.as_dict(),
        "choices": composed.choices,
        "ledger": ledger.as_dict(),
    }


def restore(
    cfg: TrainConfig, state: TrainState, checkpoints: Checkpoints, described: dict[str, Any]
) -> str:
    """Continues this run from its newest checkpoint, or starts a new run. Returns a sentence that
    names the checkpoint or weights from which training starts.

    If this run has no checkpoint, it starts from the checkpoint that `resume` names (or the newest
    one of the run that `resume` names), else from an adapter on its base model, the weights of
    `init_from`, or new weights. Raises UserError if `resume` names a checkpoint of this same run
    that is not its newest.
    """
    ranks = checkpoints.ranks

    def find() -> Path | None:
        branch = find_branch(cfg.resume, checkpoints.folder)
        newest = None if cfg.resume == "never" else find_newest_verified(checkpoints.folder)
        return newest or (branch and verify(branch))

    # If this run or `resume` has a checkpoint, load it.
    folder = ranks.broadcast_result(find)
    if folder is not None:
        changes = load(folder, state, described, ranks)
        sentence = f"resumed from {folder} at step {state.step}"
        return f"{sentence}; since then {changes}" if changes else sentence

    # Otherwise start a new run: from an adapter on its base model, the weights of `init_from`, or
    # new weights.
    if cfg.adapter:
        count = sum(p.numel() for p in state.ema.parameters)
        return f"starting with an adapter of {count} parameters on {described['base']}"
    if cfg.init_from is not None:
        file = ranks.broadcast_result(lambda: find_weights_file(str(cfg.init_from), "init_from"))
        try:
            tensors, rows = fit_weights(state.model, state.loader.spec, file, cfg.model)
        except ValueError as error:
            raise UserError(f"init_from={cfg.init_from}: {error}") from error
        load_weights(state.model, tensors)
        state.ema.restart()
        return f"starting with the weights of {file}{rows}"
    return "starting from scratch"
