"""Rung 0 of the bench's ladder of techniques: a training loop as a newcomer to PyTorch writes it.
Only the bench uses it.

It trains in fp32 without TF32. A DataLoader reads single samples, and the loop copies each batch to
the device at the step that needs the batch. The optimizer is `torch.optim.AdamW(parameters)`, which
runs PyTorch's foreach kernels on a GPU and a loop over tensors on a CPU. A loop over parameters
updates the averages of the weights. After every step the loop calls `loss.item()`, which waits for
the device.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from accel.ledger import Ledger
from common.condition import Condition
from common.config.build import build
from common.errors import UserError
from data.digits import DigitLatents
from data.loader import Batch
from data.order import EpochOrder
from data.synthetic import SyntheticLatents
from scripts.bench import Words
from scripts.bench.step import Loop
from scripts.timing import MemoryPeak
from training.assemble import build_stack
from training.heads import ModelWithHeads
from training.inputs import build_loader
from training.weights.pretrained import build_model


class ItemsInFiles(Dataset):
    """Data set that keeps each sample in its own npy file, in a temporary folder."""

    def __init__(self, latents: Tensor, labels: Tensor) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.labels = labels
        for i, latent in enumerate(latents.numpy()):
            np.save(self.folder / f"{i}.npy", latent)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.load(self.folder / f"{index}.npy")), self.labels[index]


class NewcomersLoop(Loop):
    """A plain PyTorch training loop, as a newcomer writes it. `storage` says where the samples lie:
    "files", "memory", or "resident" (on the device). With `item="never"` the loop does not call
    `loss.item()`.

    The loss is the framework's, with the same noise and times t, so that the losses of both can be
    compared.
    """

    def __init__(
        self,
        overrides: Words,
        storage: str,
        item: str = "always",
        num_workers: str = "0",
        prefetch_factor: str = "2",
    ) -> None:
        super().__init__([*overrides, "runtime=eager"])
        self.item = item
        self.num_workers = int(num_workers)
        self.prefetch_factor = int(prefetch_factor)
        self.stack = build_stack(self.cfg, self.device)
        self.stack.on_process()
        self.ledger = Ledger()

        # Load the data set with the framework's loader, and copy the samples to the place that
        # `storage` names.
        data = self.cfg.data
        self.source = build_loader(data, self.cfg.seed, self.cfg.batch_size, self.device)
        if not isinstance(self.source, DigitLatents | SyntheticLatents):
            raise UserError(
                f"the newcomer takes data=synthetic or data=digits, not {data['_target_']}."
            )
        self.spec = self.source.spec
        self.items: Dataset | None = None
        if storage != "resident":
            train = self.source.whole.train
            latents = self.source.normalise(train.as_floating()).cpu()
            labels = train.labels.cpu()
            # Delete the loader, which frees the device's copy of the set.
            del self.source, train
            kind = ItemsInFiles if storage == "files" else TensorDataset
            self.items = kind(latents, labels)

        # Take warm-up steps, then start anew, so that measured steps start from initial weights.
        memory = MemoryPeak(self.device)
        self.objective = build(self.cfg.objective, "objective")
        self.start()
        began = time.perf_counter()
        self.run(2)
        self.warm_up_seconds = time.perf_counter() - began
        self.start()
        self.memory_peak = memory.read()

    def start(self) -> None:
        """Starts from the first sample, with initial weights."""
        torch.manual_seed(self.cfg.seed)
        self.model = build_model(self.cfg.model, self.spec, self.device)
        self.objective.attach_heads(ModelWithHeads(self.model))
        self.averages = [p.detach().clone() for p in self.model.parameters()]
        rates = {name: value for name, value in self.cfg.optim.items() if name != "_target_"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **rates)
        self.batches = self.make_batches()
        self.samples = 0

    def make_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Returns an iterator over the batches (latents, labels), on the device."""
        if self.items is None:
            self.source.load_state_dict({"samples_seen": 0})
            return ((batch.latents, batch.condition.labels) for batch in self.source)
        # The samples come in the framework's order, so that both loops see the same ones.
        order = EpochOrder(self.spec.count, self.cfg.seed, torch.device("cpu"))
        loader = DataLoader(
            self.items,
            self.cfg.batch_size,
            sampler=chain.from_iterable(order.find_epoch(i).tolist() for i in count()),
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_factor if self.num_workers else None,
        )
        # The generator must not refer to self. If it did, garbage collection would end the loader's
        # workers, and PyTorch would wait five seconds for each worker.
        device = self.device
        return ((x.to(device), labels.to(device)) for x, labels in loader)

    def prepare(self) -> None:
        """Sets PyTorch's flags for this loop, and skips the batches that workers prefetched while
        another loop ran, so that the measured time includes reading."""
        super().prepare()
        for _ in range(self.prefetch_factor * self.num_workers):
            next(self.batches)

    def take_step(self) -> Tensor:
        latents, labels = next(self.batches)
        position = torch.arange(self.samples, self.samples + len(labels), device=self.device)
        batch = Batch(latents, Condition(labels), position, position)
        losses, *_ = self.objective.compute_losses(
            lambda *inputs: (self.model(*inputs), {}),
            batch,
            seed=self.cfg.seed,
            null_label=self.model.num_classes,
        )
        loss = losses.mean()
        self.samples += len(labels)

        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_grad_norm)
        self.optimizer.step()
        with torch.no_grad():
            for average, p in zip(self.averages, self.model.parameters(), strict=True):
                average.mul_(0.9999).add_(p, alpha=0.0001)
        if self.item != "never":
            loss.item()
        return loss.detach()
