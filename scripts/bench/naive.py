"""Rung 0: the training loop that a newcomer writes, honestly. It is here to be compared with and nothing else uses it.

fp32 without TF32; a DataLoader over single samples, each batch copied to the device when it is needed; AdamW as
`torch.optim.AdamW(parameters)` gives it (on a GPU PyTorch's foreach kernels, on a CPU a loop over tensors); averages
in a loop over parameters; `loss.item()` after every step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.loader import Batch, EpochOrder, InMemoryLatents
from scripts.bench.timing import MemoryPeak
from training.assemble import build_loader, build_stack
from training.config.build import build
from training.config.compose import compose
from training.environment import pick_device
from training.pretrained import build_model

PREFETCHED = 2
"""Batches that a worker of PyTorch's DataLoader makes ahead."""
Storage = Literal["npy", "memory", "resident"]


class ItemsInMemory(Dataset):
    """Single samples of tensors in host memory."""

    def __init__(self, latents: Tensor, labels: Tensor) -> None:
        self.latents, self.labels = latents, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.latents[index], self.labels[index]


class ItemsInFiles(Dataset):
    """Single samples, one npy file each; written to `folder` once."""

    def __init__(self, latents: Tensor, labels: Tensor, folder: Path) -> None:
        self.folder, self.labels = folder, labels
        folder.mkdir(parents=True, exist_ok=True)
        for i, latent in enumerate(latents.numpy()):
            np.save(folder / f"{i}.npy", latent)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.load(self.folder / f"{index}.npy")), self.labels[index]


class StreamOrder(torch.utils.data.Sampler[int]):
    """The framework's order of samples, without end, so that both loops see the same data."""

    def __init__(self, count: int, seed: int) -> None:
        self.order = EpochOrder(count, seed, torch.device("cpu"))

    def __iter__(self) -> Iterator[int]:
        epoch = 0
        while True:
            yield from self.order.permutation(epoch).tolist()
            epoch += 1


class NaiveLoop:
    """The loop above. `storage` says where samples lie and `item_every_step` whether the loss is read each step.

    It is timed with torch.randn; only `final_loss` draws the framework's stateless noise, to be comparable.
    """

    def __init__(
        self,
        name: str,
        overrides: list[str],
        *,
        storage: Storage,
        item_every_step: bool = True,
        num_workers: int = 0,
        folder: Path | None = None,
    ) -> None:
        cfg = compose([*overrides, "runtime=eager"]).cfg
        self.name, self.cfg, self.batch_size, self.item_every_step = name, cfg, cfg.batch_size, item_every_step
        self.device = pick_device(cfg.runtime.device.value)
        self.stack = build_stack(cfg, self.device)
        self.stack.on_process()
        self.num_workers = num_workers
        self.source = build_loader(cfg.data, cfg.seed, cfg.batch_size, self.device)
        if not isinstance(self.source, InMemoryLatents):
            raise ValueError(f"the naive loop takes data=synthetic or data=digits, not {cfg.data['_target_']}.")
        spec = self.source.spec
        self.items: ItemsInMemory | ItemsInFiles | None = None
        if storage != "resident":
            whole = self.source.train.rows(torch.arange(self.source.spec.count, device=self.device))
            latents = self.source.normalise(whole.floating()).cpu()
            labels = whole.labels.cpu()
            del self.source  # nothing of the set is on the device
            assert storage == "memory" or folder is not None
            self.items = ItemsInMemory(latents, labels)
            if storage == "npy" and folder is not None:
                self.items = ItemsInFiles(latents, labels, folder)
        memory = MemoryPeak(self.device)
        memory.start()
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
        order = StreamOrder(len(self.items), self.cfg.seed)
        loader = DataLoader(self.items, self.batch_size, sampler=order, num_workers=self.num_workers)
        return ((latents.to(self.device), labels.to(self.device)) for latents, labels in loader)

    def prepare(self) -> None:
        """Flags; and the batches that workers have prefetched while something else ran are used up."""
        self.stack.on_process()
        if self.items is not None:
            for _ in range(PREFETCHED * self.num_workers):
                next(self.batches)

    def one_step(self, comparable: bool = False) -> Tensor:
        latents, labels = next(self.batches)
        if comparable:
            position = torch.arange(self.samples, self.samples + len(labels), device=self.device)
            batch = Batch(latents, labels, position, position)
            null = self.model.num_classes
            loss = self.objective.losses(self.model, batch, seed=self.cfg.seed, null_label=null)[0].mean()
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

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def final_loss(self, steps: int) -> float:
        self.stack.on_process()
        losses = [self.one_step(comparable=True) for _ in range(steps)]
        return torch.stack(losses[len(losses) // 2 :]).mean().item()

    def missing(self) -> list[str]:
        return []

    def mfu(self, step_seconds: float) -> None:
        """Products in fp32 have no meaningful share of a 16-bit peak."""
