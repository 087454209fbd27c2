"""Rung 0: the training loop that a newcomer writes, honestly. It is here to be compared with and
nothing else uses it.

fp32 without TF32; a DataLoader over single samples, each batch copied to the device when it is
needed; AdamW as `torch.optim.AdamW(parameters)` gives it (on a GPU PyTorch's foreach kernels, on a
CPU a loop over tensors); averages in a loop over parameters; `loss.item()` after every step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel.ledger import Ledger
from common.errors import UserError
from data.loader import Batch, EpochOrder, InMemoryLatents
from scripts.bench.workload import Runnable
from scripts.timing import MemoryPeak
from training.assemble import build_stack
from training.components import build_loader
from training.config.build import build
from training.config.compose import compose
from training.environment import pick_device
from training.weights.pretrained import build_model

PREFETCHED = 2
"""Batches that a worker of PyTorch's DataLoader makes ahead."""


class ItemsInFiles(Dataset):
    """Single samples, one npy file each; written to `folder` once."""

    def __init__(self, latents: Tensor, labels: Tensor, folder: Path) -> None:
        self.folder = folder
        self.labels = labels
        folder.mkdir(parents=True, exist_ok=True)
        for i, latent in enumerate(latents.numpy()):
            np.save(folder / f"{i}.npy", latent)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.load(self.folder / f"{index}.npy")), self.labels[index]


def stream_order(count: int, seed: int) -> Iterator[int]:
    """The framework's order of samples, without end, so that both loops see the same data."""
    order = EpochOrder(count, seed, torch.device("cpu"))
    for epoch in itertools.count():
        yield from order.of_epoch(epoch).tolist()


class NaiveLoop(Runnable):
    """The loop above. `storage` says where samples lie, a folder for one npy file each, and
    `item_every_step` whether the loss is read each step.

    It is timed with torch.randn; only `final_loss` draws the framework's stateless noise, to be
    comparable.
    """

    def __init__(
        self,
        overrides: list[str],
        *,
        storage: Path | Literal["memory", "resident"],
        item_every_step: bool = True,
        num_workers: int = 0,
    ) -> None:
        cfg = compose([*overrides, "runtime=eager"]).cfg
        self.cfg = cfg
        self.batch_size = cfg.batch_size
        self.item_every_step = item_every_step
        self.device = pick_device(cfg.runtime.device.value)
        self.stack = build_stack(cfg, self.device)
        self.stack.on_process()
        self.num_workers = num_workers
        self.ledger = Ledger()
        self.source = build_loader(cfg.data, cfg.seed, cfg.batch_size, self.device)
        if not isinstance(self.source, InMemoryLatents):
            raise UserError(
                f"the naive loop takes data=synthetic or data=digits, not {cfg.data['_target_']}."
            )
        spec = self.source.spec
        self.items: TensorDataset | ItemsInFiles | None = None
        if storage != "resident":
            train = self.source.train
            latents = self.source.normalise(train.floating()).cpu()
            labels = train.labels.cpu()
            del self.source, train  # nothing of the set is on the device
            in_files = isinstance(storage, Path)
            self.items = (
                ItemsInFiles(latents, labels, storage)
                if in_files
                else TensorDataset(latents, labels)
            )
        memory = MemoryPeak(self.device)
        torch.manual_seed(cfg.seed)
        self.model = build_model(cfg.model, spec, self.device)
        self.objective = build(cfg.objective, "objective")
        initial = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        began = time.perf_counter()
        self.start()
        self.run(1)
        self.final_loss(1)
        self.warm_up_seconds = time.perf_counter() - began
        self.model.load_state_dict(initial)
        self.start()
        self.memory_peak = memory.read()

    def start(self) -> None:
        """From the first sample, with a new optimizer."""
        self.averages = [p.detach().clone() for p in self.model.parameters()]
        rates = {name: value for name, value in self.cfg.optim.items() if name != "_target_"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **rates)
        self.batches = self.read()
        self.samples = 0

    def read(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.items is None:
            self.source.load_state_dict({"samples_seen": 0})
            return ((batch.latents, batch.labels) for batch in self.source)
        order = stream_order(len(self.items), self.cfg.seed)
        loader = DataLoader(
            self.items, self.batch_size, sampler=order, num_workers=self.num_workers
        )
        return ((latents.to(self.device), labels.to(self.device)) for latents, labels in loader)

    def prepare(self) -> None:
        """Flags; and the batches that workers have prefetched while something else ran are used
        up."""
        super().prepare()
        if self.items is not None:
            for _ in range(PREFETCHED * self.num_workers):
                next(self.batches)

    def one_step(self, comparable: bool = False) -> Tensor:
        latents, labels = next(self.batches)
        if comparable:
            position = torch.arange(self.samples, self.samples + len(labels), device=self.device)
            batch = Batch(latents, labels, position, position)
            null = self.model.num_classes
            loss = self.objective.losses(self.model, batch, seed=self.cfg.seed, null_label=null)[
                0
            ].mean()
        else:
            loss = self.loss(latents, labels)
        self.samples += len(labels)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
                average.mul_(0.9999).add_(parameter, alpha=0.0001)
        if self.item_every_step:
            loss.item()
        return loss.detach()

    def loss(self, latents: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn_like(latents)
        t = torch.sigmoid(torch.randn(len(labels), device=self.device))
        drop = torch.rand(len(labels), device=self.device) < 0.1
        labels = torch.where(drop, self.model.num_classes, labels)
        x = torch.lerp(latents, noise, t.view(-1, 1, 1, 1))
        return torch.nn.functional.mse_loss(self.model(x, t, labels), noise - latents)
