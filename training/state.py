"""The state of a run: everything that a step changes, in one object and one list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from accel.composite_optimizer import Members, parameters_of
from accel.sharding import shard_like
from accel.stack import AccelerationStack
from common.errors import UserError
from data.loader import LatentLoader
from models.adapters import find_adapted_layers, find_trained_parameters
from models.denoiser import Denoiser
from training.checkpoint.files import Layout, flatten, nest
from training.metrics import Meter
from training.step import EMA, SpikeGuard

COUNTERS = ("step", "samples", "skipped_steps", "skipped_data")
LAYOUTS = {
    "model": Layout.whole,
    "ema": Layout.whole,
    "optimizer": Layout.shared,
    "techniques": Layout.shared,
    "guards": Layout.shared,
    "loader": Layout.values,
    "counters": Layout.values,
    "window": Layout.sums,
    "rng": Layout.each,
}
"""The pieces of the state and how a checkpoint keeps each: the format of checkpoints. A new piece
is one more entry here, and one in each of the methods that save and load."""


@dataclass
class TrainState:
    """Model, optimizer, averages, loader, the sums of the current log window, and counters.

    Noise, t, flips and label drops are functions of the stream position, so `samples` stands for
    their state; torch's generators are kept as well for models that use them.
    """

    model: Denoiser
    optimizer: torch.optim.Optimizer
    ema: EMA
    loader: LatentLoader
    meter: Meter
    stack: AccelerationStack
    spikes: SpikeGuard | None = None
    total_samples: int = 0
    step: int = 0
    samples: int = 0
    skipped_steps: int = 0
    skipped_data: dict[str, int] = field(default_factory=dict)
    """Damaged blocks that all ranks skipped -> their samples."""
    began_at: int = 0
    """The step that this process started or resumed from."""
    layouts = LAYOUTS

    def advance(self, samples: int) -> None:
        self.step += 1
        self.samples += samples

    @property
    def moved(self) -> bool:
        """Whether this process has taken a step."""
        return self.step > self.began_at

    @property
    def done(self) -> bool:
        return self.samples >= self.total_samples

    def is_due(self, *intervals: int) -> bool:
        """True each so many steps and when the run is done; never for 0, and never at the step
        where a resume began."""
        return self.moved and any(
            every > 0 and (self.done or self.step % every == 0) for every in intervals
        )

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Leaves by piece and name: references, not copies. Save or copy them before the next
        step."""
        return {
            "model": select_saved_weights(self.model),
            "ema": self.ema.state_dict(),
            "optimizer": dict(flatten(self.optimizer.state_dict()["state"])),
            "techniques": dict(flatten(self.stack.state_dict())),
            "guards": self.spikes.state_dict() if self.spikes else {},
            "loader": self.loader.state_dict(),
            "counters": {name: getattr(self, name) for name in COUNTERS},
            "window": self.meter.state_dict(),
            "rng": read_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads everything; ValueError if the tensors do not fit the model. Hyper-parameters stay
        the config's."""
        load_weights(self.model, state["model"])
        self.ema.load_state_dict(state["ema"])
        load_moments(self.optimizer, state["optimizer"])
        self.stack.load_state_dict(nest(state["techniques"]))
        if self.spikes is not None:
            self.spikes.load_state_dict(state["guards"])
        self.loader.load_state_dict(state["loader"])
        self.load_counters(state["counters"])
        self.meter.load_state_dict(state["window"])
        load_rng_state(state["rng"])
        self.began_at = self.step

    def load_counters(self, saved: Mapping[str, Any]) -> None:
        """Sets the counters; checkpoints of earlier versions have no `skipped_data`."""
        known = {"skipped_data": {}} | dict(saved)
        for name in COUNTERS:
            counts = known[name].values() if name == "skipped_data" else [known[name]]
            if not all(type(count) is int and 0 <= count < 2**53 for count in counts):
                raise UserError(f"the counter {name} is {known[name]}, which is no count.")
            setattr(self, name, known[name])

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """The averaged weights, in evaluation mode and uncompiled: batch sizes other than
        training's recompile."""
        with (
            self.stack.surround_evaluation(),
            self.ema.swap_in(),
            torch.compiler.set_stance("force_eager"),
        ):
            self.model.eval()
            try:
                yield
            finally:
                self.model.train()

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Restores the state at the end of the block, from a copy in host memory: the device's is
        left to the step."""
        before = tree_map_only(
            Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), self.state_dict()
        )
        try:
            yield
        finally:
            self.load_state_dict(before)
            self.optimizer.zero_grad(set_to_none=True)


def select_saved_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that a checkpoint keeps: all, or those of an adapter."""
    own = model.state_dict()
    return (
        {name: own[name] for name in find_trained_parameters(model)}
        if find_adapted_layers(model)
        else own
    )


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads whole tensors into a model, sharded or not; ValueError if they do not fit."""
    own = model.state_dict()
    frozen = {name: own[name] for name in own.keys() - select_saved_weights(model).keys()}
    try:
        model.load_state_dict(
            frozen | {name: shard_like(tensor, own.get(name)) for name, tensor in weights.items()}
        )
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit this model: {error}") from error


def load_moments(optimizer: torch.optim.Optimizer, leaves: Mapping[str, Any]) -> None:
    """Loads an optimizer's state, in place where it exists already: a captured step goes on using
    those tensors.

    Hyper-parameters stay as they are. Adam that has not stepped yet is Adam whose moments and step
    count are zero.
    """
    saved: dict[int, dict[str, Any]] = {int(i): of for i, of in nest(leaves).items()}
    if isinstance(optimizer, Members):
        optimizer.load_state_dict({"state": saved})
        return

    current = optimizer.state_dict()
    own = current["state"]
    if not saved and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        saved = {i: dict.fromkeys(entries, 0.0) for i, entries in own.items()}
    parameters = parameters_of(optimizer)
    for i, entries in saved.items():
        saved[i] = {name: shard_like(value, parameters[i]) for name, value in entries.items()}

    tensors = [value for _, value in flatten(own)]
    if saved.keys() != own.keys() or not all(isinstance(value, Tensor) for value in tensors):
        optimizer.load_state_dict(current | {"state": saved})
        return
    values = dict(flatten(saved))
    for name, tensor in flatten(own):
        value = values[name]
        tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)


def read_rng_state() -> dict[str, Tensor]:
    """The states of PyTorch's generators: the host's and each GPU's."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state()} | {f"cuda.{i}": state for i, state in enumerate(gpus)}


def load_rng_state(saved: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(saved["torch"])
    gpus = [saved[f"cuda.{i}"] for i in range(len(saved) - 1)]
    if len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)
