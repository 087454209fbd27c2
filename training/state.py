"""The state of a run: everything that a step changes, and how a checkpoint saves and loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from accel.composite_optimizer import Members, parameters_of
from accel.sharding import shard_like
from accel.stack import AccelerationStack
from common.errors import UserError
from common.trees import flatten, nest
from data.loader import LatentLoader
from models.adapters import find_adapted_layers, find_trained_parameters
from models.denoiser import Denoiser
from training.heads import ModelWithHeads
from training.optim.ema import EMA
from training.optim.power_averages import PowerAverage
from training.optim.spikes import SpikeGuard
from training.records.metrics import Meter


class Layout(Enum):
    """The ways in which a checkpoint can store a piece of the state."""

    whole = auto()
    """Unsharded tensors in a separate file that other tools can read; rank 0 gathers and writes
    them."""
    shared = auto()
    """Tensors that are sharded or equal on all ranks, and numbers that are equal on all ranks."""
    values = auto()
    """Numbers that are equal on all ranks."""
    sums = auto()
    """Tensors that differ between ranks, and numbers that do not. If another number of ranks loads
    the checkpoint, each rank gets the mean of each tensor over the ranks that saved it."""
    each = auto()
    """Tensors that differ between ranks. If another number of ranks loads the checkpoint, rank r
    gets the tensors of the old rank r mod the old number of ranks."""


LAYOUTS_WITH_NUMBERS = (Layout.values, Layout.sums)
"""Layouts of pieces whose numbers have an entry of their own in `state.json`; the numbers of all
other pieces are in the entry `leaves` of that file."""


COUNTERS = ("step", "samples", "skipped_steps", "skipped_data")
LAYOUTS = {
    "model": Layout.whole,
    "ema": Layout.whole,
    "averages": Layout.shared,
    "aux_heads": Layout.shared,
    "optimizer": Layout.shared,
    "techniques": Layout.shared,
    "guards": Layout.shared,
    "loader": Layout.values,
    "counters": Layout.values,
    "window": Layout.sums,
    "rng": Layout.each,
}
"""Name of a piece of the state -> its layout in a checkpoint (see `Layout`), which says whether the
ranks have equal values, and how they are stored. A new piece needs an entry here and a line in both
`state_dict` and `load_state_dict`."""


@dataclass
class TrainState:
    """Everything that a step changes: model, optimizer, averages, loader, sums of the current log
    window, and counters.

    Noise, t, flips and label drops are functions of a sample's position in the stream, so they have
    no state besides the counter `samples`. Checkpoints also store the states of PyTorch's random
    generators, for models that use them.
    """

    network: ModelWithHeads
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
    """Place of a damaged data block that any rank skipped -> number of its samples."""
    began_at: int = 0
    """Step at which this process started or resumed."""
    power_averages: Sequence[PowerAverage] = ()
    """Averages that the run keeps besides `ema` if `ema.snapshots` is set."""
    parts: Sequence[float] = ()
    """Mean losses of equal parts of the held-out split, from the latest evaluation: by the
    differences of two checkpoints in all parts one knows how sure the difference of their losses
    is."""
    layouts = LAYOUTS

    @property
    def model(self) -> Denoiser:
        return self.network.model

    @property
    def moved(self) -> bool:
        """True if this process has taken a step."""
        return self.step > self.began_at

    @property
    def done(self) -> bool:
        return self.samples >= self.total_samples

    def is_due(self, *intervals: int) -> bool:
        """Says whether a task with these intervals, in steps, is due: it is due if the current step
        is a multiple of one of `intervals`, or the run is done. An interval of 0 means never, and
        nothing is due before this process has taken a step."""
        return self.moved and any(
            every > 0 and (self.done or self.step % every == 0) for every in intervals
        )

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Returns name of a piece of the state -> name within the piece -> tensor or number. The
        tensors are not copied: save or copy them before the next step changes them."""
        gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        rng = {f"cuda.{i}": state for i, state in enumerate(gpus)}
        return {
            "model": select_saved_weights(self.model),
            "ema": self.ema.state_dict(),
            "averages": flatten({f"{a.length:.0%}": a.state_dict() for a in self.power_averages}),
            "aux_heads": self.network.aux_heads.state_dict(prefix="aux_heads."),
            "optimizer": flatten(self.optimizer.state_dict()["state"]),
            "techniques": flatten(self.stack.state_dict()),
            "guards": self.spikes.state_dict() if self.spikes else {},
            "loader": self.loader.state_dict(),
            "counters": {name: vars(self)[name] for name in COUNTERS},
            "window": self.meter.window.state_dict(),
            "rng": {"torch": torch.get_rng_state(), **rng},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned. Hyper-parameters, such as the learning rate, come from
        the configuration, not from `state`. Raises UserError if the tensors do not fit the model,
        or if a counter is no integer of at least 0."""
        load_weights(self.model, state["model"])
        heads = {n.removeprefix("aux_heads."): t for n, t in state["aux_heads"].items()}
        load_weights(self.network.aux_heads, heads)
        self.ema.load_state_dict(state["ema"])
        averages = nest(state["averages"])
        for average in self.power_averages:
            average.load_state_dict(averages.get(f"{average.length:.0%}", {}))
        load_moments(self.optimizer, state["optimizer"])
        self.stack.load_state_dict(nest(state["techniques"]))
        if self.spikes is not None:
            self.spikes.load_state_dict(state["guards"])
        self.loader.load_state_dict(state["loader"])
        for name in COUNTERS:
            counter = state["counters"][name]
            counts = counter.values() if name == "skipped_data" else [counter]
            if not all(type(count) is int and 0 <= count < 2**53 for count in counts):
                raise UserError(f"the counter {name} is {counter}, which is no count.")
            setattr(self, name, counter)
        self.meter.window.load_state_dict(state["window"])

        # Restore the GPUs' generators only if this process sees as many as the one that saved them.
        rng = state["rng"]
        torch.set_rng_state(rng["torch"])
        gpus = [rng[f"cuda.{i}"] for i in range(len(rng) - 1)]
        if len(gpus) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(gpus)
        self.began_at = self.step

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Inside the `with` block the model has the averaged weights, is in evaluation mode, and
        runs eagerly, because a compiled model is compiled again for a batch size other than that of
        training."""
        with (
            self.stack.surround_evaluation(),
            self.ema.swap_in(),
            torch.compiler.set_stance("force_eager"),
        ):
            self.network.eval()
            try:
                yield
            finally:
                self.network.train()

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """At the end of the `with` block, restores the state that the run had at the beginning of
        the block. The copy of the state is in host memory, so that the steps in the block can use
        all of the device's memory."""
        before = tree_map_only(
            Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), self.state_dict()
        )
        try:
            yield
        finally:
            self.load_state_dict(before)
            self.optimizer.zero_grad(set_to_none=True)


def select_saved_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a model that the file of its weights stores, by name: all tensors, or,
    if the model has an adapter, only the trained ones."""
    tensors = model.state_dict()
    if find_adapted_layers(model):
        tensors = {name: tensors[name] for name in find_trained_parameters(model)}
    return tensors


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads unsharded tensors, by name, into a model, whose own tensors may be sharded. Raises
    UserError if names or shapes do not fit."""
    current = model.state_dict()
    frozen = {name: current[name] for name in current.keys() - select_saved_weights(model).keys()}
    try:
        loaded = {name: shard_like(tensor, current.get(name)) for name, tensor in weights.items()}
        model.load_state_dict(frozen | loaded)
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit this model: {error}") from error


def load_moments(optimizer: torch.optim.Optimizer, leaves: Mapping[str, Any]) -> None:
    """Loads the state of an optimizer, such as its moments; `leaves` is a flat dict of that state.
    Fills existing tensors in place, because a captured CUDA graph keeps using them.
    Hyper-parameters such as the learning rate stay as they are."""
    saved: dict[int, dict[str, Any]] = {int(i): entries for i, entries in nest(leaves).items()}
    if isinstance(optimizer, Members):
        optimizer.load_state_dict({"state": saved})
        return

    current = optimizer.state_dict()
    state = current["state"]

    # A checkpoint saved before the first step has no moments of Adam. If the optimizer already has
    # moments, fill them with zeros, because Adam begins with zeros.
    if not saved and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        saved = {i: dict.fromkeys(entries, 0.0) for i, entries in state.items()}
    parameters = parameters_of(optimizer)
    for i, entries in saved.items():
        saved[i] = {name: shard_like(value, parameters[i]) for name, value in entries.items()}

    if saved.keys() != state.keys() or not all(
        isinstance(t, Tensor) for t in flatten(state).values()
    ):
        optimizer.load_state_dict(current | {"state": saved})
        return
    values = flatten(saved)
    for name, tensor in flatten(state).items():
        value = values[name]
        tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)
