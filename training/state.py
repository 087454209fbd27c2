"""The state of a run: everything that a step changes, in one object and one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.composite_optimizer import Members, parameters_of
from accel.sharding import cut
from accel.stack import AccelerationStack
from common.errors import UserError
from data.loader import LatentLoader
from models.adapters import layers_of, trained
from models.denoiser import Denoiser
from training.checkpoint.parts import Kept, flat, nested
from training.ema import EMA
from training.metrics import Meter
from training.step import SpikeGuard


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
    """Blocks of the data that others stood in for, of all processes -> their samples."""
    began_at: int = 0
    """The step that this process started or resumed from."""

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

    def due(self, *intervals: int) -> bool:
        """True each so many steps and when the run is done; never for 0, and never at the step
        where a resume began."""
        return self.moved and any(
            every > 0 and (self.done or self.step % every == 0) for every in intervals
        )

    @property
    def kept(self) -> dict[str, Kept]:
        return {piece.name: piece.kept for piece in PIECES}

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Leaves by piece and name: references, not copies. Save or copy them before the next
        step."""
        return {piece.name: piece.save(self) for piece in PIECES}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Loads everything; ValueError if the tensors do not fit the model. Hyper-parameters stay
        the config's."""
        for piece in PIECES:
            piece.load(self, state[piece.name])
        self.began_at = self.step

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights, in evaluation mode and uncompiled: batch sizes other than
        training's recompile."""
        with self.stack.evaluation(), self.ema.applied(), torch.compiler.set_stance("force_eager"):
            self.model.eval()
            try:
                yield
            finally:
                self.model.train()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restores the state at the end of the block, from a copy in host memory: the device's is
        left to the step."""
        before = copied(self.state_dict())
        try:
            yield
        finally:
            self.load_state_dict(before)
            self.optimizer.zero_grad(set_to_none=True)


def copied(node: Any) -> Any:
    """The same tree with its tensors copied to host memory."""
    if isinstance(node, Tensor):
        return node.detach().to("cpu", copy=True)
    if isinstance(node, Mapping):
        return {key: copied(value) for key, value in node.items()}
    return node


def saved_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a model that a checkpoint keeps: all, or those of an adapter."""
    own = model.state_dict()
    return {name: own[name] for name in trained(model)} if layers_of(model) else own


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Loads whole tensors into a model, sharded or not; ValueError if they do not fit."""
    own = model.state_dict()
    frozen = {name: own[name] for name in own.keys() - saved_weights(model).keys()}
    try:
        model.load_state_dict(
            frozen | {name: cut(tensor, own.get(name)) for name, tensor in weights.items()}
        )
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit this model: {error}") from error


def load_moments(optimizer: torch.optim.Optimizer, leaves: Mapping[str, Any]) -> None:
    """Loads an optimizer's state, in place where it exists already: a captured step goes on using
    those tensors.

    Hyper-parameters stay as they are. Adam that has not stepped yet is Adam whose moments and step
    count are zero.
    """
    saved: dict[int, dict[str, Any]] = {int(i): of for i, of in nested(leaves).items()}
    if isinstance(optimizer, Members):
        optimizer.load_state_dict({"state": saved})
        return

    current = optimizer.state_dict()
    own = dict(flat(current["state"]))
    if not saved and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        saved = {i: dict.fromkeys(entries, 0.0) for i, entries in current["state"].items()}
    parameters = parameters_of(optimizer)
    for i, entries in saved.items():
        saved[i] = {name: cut(value, parameters[i]) for name, value in entries.items()}

    same = saved.keys() == current["state"].keys()
    if not (same and all(isinstance(value, Tensor) for value in own.values())):
        optimizer.load_state_dict(current | {"state": saved})
        return
    values = dict(flat(saved))
    for name, tensor in own.items():
        value = values[name]
        tensor.copy_(value) if isinstance(value, Tensor) else tensor.fill_(value)


def rng_state() -> dict[str, Tensor]:
    """The states of PyTorch's generators: the host's and each GPU's."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state()} | {f"cuda.{i}": state for i, state in enumerate(gpus)}


def load_rng_state(saved: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(saved["torch"])
    gpus = [saved[f"cuda.{i}"] for i in range(len(saved) - 1)]
    if len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)


COUNTERS = ("step", "samples", "skipped_steps", "skipped_data")


def load_counters(state: TrainState, saved: Mapping[str, Any]) -> None:
    """Sets the counters; checkpoints of earlier versions have no `skipped_data`."""
    known = {"skipped_data": {}} | dict(saved)
    for name in COUNTERS:
        counts = known[name].values() if name == "skipped_data" else [known[name]]
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):
            raise UserError(f"the counter {name} is {known[name]}, which is no count.")
        setattr(state, name, known[name])


class Piece(NamedTuple):
    """A piece of the state: its name in a checkpoint, how that keeps it, and the functions that
    save and load its leaves."""

    name: str
    kept: Kept
    save: Callable[[TrainState], Mapping[str, Any]]
    load: Callable[[TrainState, Any], None]

    @classmethod
    def of(cls, name: str, kept: Kept, part: str) -> Piece:
        """A part of the state that saves and loads itself, if there is one."""

        def save(state: TrainState) -> Mapping[str, Any]:
            own = getattr(state, part)
            return {} if own is None else own.state_dict()

        def load(state: TrainState, saved: Any) -> None:
            own = getattr(state, part)
            if own is not None:
                own.load_state_dict(saved)

        return cls(name, kept, save, load)


PIECES = (
    Piece(
        "model",
        Kept.whole,
        lambda s: saved_weights(s.model),
        lambda s, saved: load_weights(s.model, saved),
    ),
    Piece.of("ema", Kept.whole, "ema"),
    Piece(
        "optimizer",
        Kept.shared,
        lambda s: dict(flat(s.optimizer.state_dict()["state"])),
        lambda s, saved: load_moments(s.optimizer, saved),
    ),
    Piece(
        "techniques",
        Kept.shared,
        lambda s: dict(flat(s.stack.state_dict())),
        lambda s, saved: s.stack.load_state_dict(nested(saved)),
    ),
    Piece.of("guards", Kept.shared, "spikes"),
    Piece.of("loader", Kept.values, "loader"),
    Piece(
        "counters",
        Kept.values,
        lambda s: {name: getattr(s, name) for name in COUNTERS},
        load_counters,
    ),
    Piece.of("window", Kept.sums, "meter"),
    Piece("rng", Kept.each, lambda s: rng_state(), lambda s, saved: load_rng_state(saved)),
)
"""A new piece of state is one more entry. The names and kinds are the format of checkpoints."""
