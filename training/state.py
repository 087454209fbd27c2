"""All that changes while a run goes on, in one object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from accel.parallel import cut
from accel.stack import AccelerationStack
from data.loader import LatentLoader
from models.denoiser import Denoiser
from training.ema import EMA
from training.metrics import Meter
from training.spikes import SpikeGuard


@dataclass
class TrainState:
    """Model, optimizer, averages, loader, the sums of the current log window, and counters.

    Noise, t, flips and label drops are functions of the stream position, so `samples` stands for their state; torch's
    generators are kept as well for models that use them.
    """

    model: Denoiser
    optimizer: torch.optim.Optimizer
    ema: EMA
    loader: LatentLoader
    meter: Meter
    stack: AccelerationStack
    spikes: SpikeGuard | None = None
    step: int = 0
    samples: int = 0
    skipped_steps: int = 0

    def advance(self, samples: int) -> None:
        self.step += 1
        self.samples += samples

    def due(self, every: int) -> bool:
        """True each `every` steps; never for 0."""
        return every > 0 and self.step % every == 0

    def state_dict(self) -> dict[str, Any]:
        """References, not copies: save or copy it before the next step."""
        return {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict()["state"],
            "loader": self.loader.state_dict(),
            "window": self.meter.state_dict(),
            "counters": {"step": self.step, "samples": self.samples, "skipped_steps": self.skipped_steps},
            "techniques": self.stack.state_dict(),
            "guards": self.spikes.state_dict() if self.spikes else {},
            "rng": rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads everything; ValueError if the tensors do not fit the model. Hyper-parameters stay the config's."""
        try:
            load_weights(self.model, state["model"])
        except RuntimeError as error:
            raise ValueError(f"the checkpoint does not fit this model: {error}") from error
        self.ema.load_state_dict(state["ema"])
        load_moments(self.optimizer, state["optimizer"])
        self.stack.load_state_dict(state["techniques"])
        if self.spikes is not None:
            self.spikes.load_state_dict(state["guards"])
        self.loader.load_state_dict(state["loader"])
        self.meter.load_state_dict(state["window"])
        for name, value in state["counters"].items():
            setattr(self, name, value)
        load_rng_state(state["rng"])

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The averaged weights, in evaluation mode and uncompiled: batch sizes other than training's recompile."""
        with self.stack.evaluation(), self.ema.applied(), torch.compiler.set_stance("force_eager"):
            self.model.eval()
            try:
                yield
            finally:
                self.model.train()

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Whatever happens inside leaves no trace. The copy lies in host memory, to leave the device's to the step."""
        before = copied(self.state_dict())
        try:
            yield
        finally:
            self.load_state_dict(before)
            self.optimizer.zero_grad(set_to_none=True)


def load_weights(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Whole tensors into a model, sharded or not; RuntimeError if they do not fit."""
    own = model.state_dict()
    model.load_state_dict({name: cut(tensor, own.get(name)) for name, tensor in weights.items()})


def load_moments(optimizer: torch.optim.Optimizer, saved: dict[int, dict[str, Any]]) -> None:
    """Loads an optimizer's state, in place where it exists already: a captured step goes on using those tensors.

    Hyper-parameters stay as they are. Adam that has not stepped yet is Adam whose moments and step count are zero.
    """
    current = optimizer.state_dict()
    if not saved and isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        saved = {i: dict.fromkeys(entries, 0.0) for i, entries in current["state"].items()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = {i: {name: cut(t, parameters[i]) for name, t in entries.items()} for i, entries in saved.items()}
    same = saved.keys() == current["state"].keys()
    if not (
        same and all(isinstance(t, torch.Tensor) for entries in current["state"].values() for t in entries.values())
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
    return [copied(value) for value in node] if isinstance(node, list) else node


def rng_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def load_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
