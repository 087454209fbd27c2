"""The state of a run: everything that a step changes, in one object and one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from accel.composite_optimizer import Members
from accel.sharding import cut
from accel.stack import AccelerationStack
from common.errors import UserError
from data.loader import LatentLoader
from models.adapters import layers_of, trained
from models.denoiser import Denoiser
from training.checkpoint.parts import Kept
from training.ema import EMA
from training.meter import Meter
from training.spikes import SpikeGuard


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

    def due(self, every: int) -> bool:
        """True each `every` steps and when the run is done; never for 0, and never at the step
        where a resume began."""
        return every > 0 and self.moved and (self.done or self.step % every == 0)

    @property
    def kept(self) -> dict[str, Kept]:
        return {piece.name: piece.kept for piece in PIECES}

    def state_dict(self) -> dict[str, Any]:
        """References, not copies: save or copy it before the next step."""
        return {piece.name: piece.save(self) for piece in PIECES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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


def load_model(state: TrainState, weights: dict[str, Any]) -> None:
    try:
        load_weights(state.model, weights)
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit this model: {error}") from error


def saved_weights(model: torch.nn.Module) -> dict[str, Any]:
    """The tensors of a model that a checkpoint keeps: all, or those of an adapter."""
    own = model.state_dict()
    return {name: own[name] for name in trained(model)} if layers_of(model) else own


def load_weights(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Whole tensors into a model, sharded or not; RuntimeError if they do not fit."""
    own = model.state_dict()
    frozen = {name: own[name] for name in own.keys() - saved_weights(model).keys()}
    model.load_state_dict(
        frozen | {name: cut(tensor, own.get(name)) for name, tensor in weights.items()}
    )


def load_moments(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Loads an optimizer's state, in place where it exists already: a captured step goes on using
    those tensors.

    Hyper-parameters stay as they are. Adam that has not stepped yet is Adam whose moments and step
    count are zero.
    """
    if isinstance(optimizer, Members):
        optimizer.load_state_dict({"state": saved})
        return
    current = optimizer.state_dict()
    if not saved and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        saved = {i: dict.fromkeys(entries, 0.0) for i, entries in current["state"].items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = {
        i: {name: cut(t, parameters[i]) for name, t in entries.items()}
        for i, entries in saved.items()
    }
    same = saved.keys() == current["state"].keys()
    if not (
        same
        and all(
            isinstance(t, torch.Tensor)
            for entries in current["state"].values()
            for t in entries.values()
        )
    ):
        optimizer.load_state_dict({"state": saved, "param_groups": current["param_groups"]})
        return
    for i, entries in current["state"].items():
        for name, tensor in entries.items():
            value = saved[i][name]
            tensor.copy_(value) if isinstance(value, torch.Tensor) else tensor.fill_(value)


def copied(node: Any) -> Any:
    """The same tree with its tensors copied to host memory."""
    if isinstance(node, torch.Tensor):
        return node.detach().to("cpu", copy=True)
    if isinstance(node, dict):
        return {key: copied(value) for key, value in node.items()}
    return node


def rng_state() -> dict[str, Any]:
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state()} | {f"cuda.{i}": state for i, state in enumerate(gpus)}


def load_rng_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    gpus = [saved[f"cuda.{i}"] for i in range(len(saved) - 1)]
    if len(gpus) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(gpus)


def load_counters(state: TrainState, saved: Mapping[str, Any]) -> None:
    """Sets the counters; checkpoints of earlier versions have no `skipped_data`."""
    known = {"skipped_data": {}} | dict(saved)
    for name in COUNTERS:
        counts = known[name].values() if name == "skipped_data" else [known[name]]
        if not all(type(count) is int and 0 <= count < 2**53 for count in counts):
            raise UserError(f"the counter {name} is {known[name]}, which is no count.")
    vars(state).update({name: known[name] for name in COUNTERS})


class Piece(NamedTuple):
    """A piece of the state: its name in a checkpoint, how that keeps it, and the functions that
    save and load it."""

    name: str
    kept: Kept
    save: Callable[[TrainState], Mapping[Any, Any]]
    load: Callable[[TrainState, Any], None]


COUNTERS = ("step", "samples", "skipped_steps", "skipped_data")
PIECES = (
    Piece("model", Kept.whole, lambda s: saved_weights(s.model), load_model),
    Piece(
        "ema",
        Kept.whole,
        lambda s: s.ema.state_dict(),
        lambda s, saved: s.ema.load_state_dict(saved),
    ),
    Piece(
        "optimizer",
        Kept.shared,
        lambda s: s.optimizer.state_dict()["state"],
        lambda s, saved: load_moments(s.optimizer, saved),
    ),
    Piece(
        "techniques",
        Kept.shared,
        lambda s: s.stack.state_dict(),
        lambda s, saved: s.stack.load_state_dict(saved),
    ),
    Piece(
        "guards",
        Kept.shared,
        lambda s: s.spikes.state_dict() if s.spikes else {},
        lambda s, saved: s.spikes.load_state_dict(saved) if s.spikes else None,
    ),
    Piece(
        "loader",
        Kept.values,
        lambda s: s.loader.state_dict(),
        lambda s, saved: s.loader.load_state_dict(saved),
    ),
    Piece(
        "counters",
        Kept.values,
        lambda s: {name: getattr(s, name) for name in COUNTERS},
        load_counters,
    ),
    Piece(
        "window",
        Kept.sums,
        lambda s: s.meter.state_dict(),
        lambda s, saved: s.meter.load_state_dict(saved),
    ),
    Piece("rng", Kept.each, lambda s: rng_state(), lambda s, saved: load_rng_state(saved)),
)
"""A new piece of state is one more entry. The names and kinds are the format of checkpoints."""
