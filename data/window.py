"""A latent set that does not fit into the device's memory: a window of it lies there, the next one is brought in.

The training split's blocks are permuted in each epoch and cut into groups of at most `window` samples; inside a group
all samples are permuted. Position p of the epoch is the p-th sample of that sequence, a pure function of (seed, epoch,
window). Two groups have room on the device: one in use, one being filled by a thread, through pinned memory, on a
stream of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor

from data.blocks import BlockReader, Skips
from data.held_out import held_out_batches
from data.in_memory import LatentTensors, sampled
from data.loader import Batch, LatentSpec
from data.order import seeded
from data.readers import Readers

STAGES = 2
"""Pinned buffers of one block each."""


class Group(NamedTuple):
    """Blocks that lie on the device together."""

    epoch: int
    number: int
    blocks: list[int]
    first: int
    """Position of its first sample in the epoch."""
    size: int


class GroupOrder:
    """The groups of an epoch. `counts` are the samples of each block."""

    def __init__(self, counts: list[int], seed: int, window: int) -> None:
        if window < max(counts):
            raise ValueError(
                f"a window of {window} samples holds not even one block of {max(counts)}; raise "
                f"data.device_memory_gib, or make the set with a smaller block_size."
            )
        self.counts, self.seed, self.window, self.count = counts, seed, window, sum(counts)
        self.cache: dict[int, list[Group]] = {}

    def groups(self, epoch: int) -> list[Group]:
        if epoch not in self.cache:
            groups: list[Group] = []
            blocks: list[int] = []
            first = size = 0
            for block in torch.randperm(len(self.counts), generator=seeded(self.seed, epoch)).tolist():
                if size + self.counts[block] > self.window:
                    groups.append(Group(epoch, len(groups), blocks, first, size))
                    blocks, first, size = [], first + size, 0
                blocks.append(block)
                size += self.counts[block]
            groups.append(Group(epoch, len(groups), blocks, first, size))
            self.cache = {e: found for e, found in self.cache.items() if e >= epoch - 1} | {epoch: groups}
        return self.cache[epoch]

    def at(self, position: int) -> tuple[Group, int]:
        """The group of a position of the endless stream, and the offset in it."""
        epoch, p = divmod(position, self.count)
        groups = self.groups(epoch)
        group = groups[bisect_right([g.first for g in groups], p) - 1]
        return group, p - group.first

    def after(self, group: Group) -> Group:
        groups = self.groups(group.epoch)
        return groups[group.number + 1] if group.number + 1 < len(groups) else self.groups(group.epoch + 1)[0]

    def permutation(self, group: Group) -> Tensor:
        return torch.randperm(group.size, generator=seeded(self.seed, group.epoch, group.number))


class Slot:
    """Room for one group on the device."""

    def __init__(self, window: int, fields: dict[str, Tensor], device: torch.device) -> None:
        self.tensors = {
            name: torch.empty((window, *t.shape[1:]), dtype=t.dtype, device=device) for name, t in fields.items()
        }
        self.order = torch.empty(0, dtype=torch.long)
        self.holds: tuple[int, int] | None = None
        self.filled: Future[Any] | None = None


class WindowedLatents:
    """A `LatentLoader` with `window` samples on the device at once, and room for as many that come next."""

    def __init__(
        self,
        spec: LatentSpec,
        train: BlockReader,
        held_out: BlockReader,
        *,
        window: int,
        batch_size: int,
        seed: int,
        device: torch.device,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.spec, self.seed, self.device = spec, seed, device
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.blocks, self.held_out_blocks = train, held_out
        self.normalise = spec.normaliser(device)
        self.skips = Skips()
        self.copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.readers = Readers(1, "window")
        self.samples_seen = 0
        self.slots: list[Slot] = []
        self.stages: list[tuple[dict[str, Tensor], Any]] = []
        self.make_room(window)

    def make_room(self, window: int) -> None:
        """Room for two groups of at most `window` samples."""
        for slot in self.slots:
            slot.holds = None  # what is being filled stops at the next block
        self.readers.submit(lambda: None).result()
        if self.copies is not None:
            self.copies.synchronize()
        self.slots, self.stages = [], []  # before there is room for others
        counts = [place.block.samples for place in self.blocks.places]
        self.order = GroupOrder(counts, self.seed, window)
        first = self.blocks.read(0)
        self.slots = [Slot(window, first, self.device) for _ in range(2)]
        if self.copies is not None:
            largest = max(counts)
            for _ in range(STAGES):
                buffers = {
                    name: torch.empty((largest, *t.shape[1:]), dtype=t.dtype, pin_memory=True)
                    for name, t in first.items()
                }
                self.stages.append((buffers, torch.cuda.Event()))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        start = self.samples_seen + self.rank * self.batch_size
        self.samples_seen += self.world_size * self.batch_size
        position = torch.arange(start, start + self.batch_size, device=self.device)
        parts, at, left = [], start, self.batch_size
        while left:
            group, offset = self.order.at(at)
            slot = self.slot_of(group)
            rows = slot.order[offset : offset + left]
            parts.append({name: tensor.index_select(0, rows) for name, tensor in slot.tensors.items()})
            at, left = at + len(rows), left - len(rows)
        tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts[1:] else parts[0]
        ids = tensors.pop("ids")
        raw = sampled(LatentTensors(**tensors), self.seed, position)
        return Batch(self.normalise(raw), tensors["labels"], ids, position)

    def slot_of(self, group: Group) -> Slot:
        """The slot that holds `group`, filled; the group after it is being brought into the other one."""
        slot = self.claim(group, keep=None)
        if slot.filled is not None:
            done = slot.filled.result()  # raises what the thread raised
            slot.filled = None
            if done is not None:
                torch.cuda.current_stream(self.device).wait_event(done)
            self.skips.say(self.blocks.take_reports())
        self.claim(self.order.after(group), keep=slot)
        return slot

    def claim(self, group: Group, keep: Slot | None) -> Slot:
        """The slot of `group`; if it has none, it gets the one that is not to be kept, and filling it begins."""
        key = (group.epoch, group.number)
        for slot in self.slots:
            if slot.holds == key:
                return slot
        slot = self.slots[0] if keep is not self.slots[0] else self.slots[1]
        slot.holds = key
        used = None if self.copies is None else torch.cuda.current_stream(self.device).record_event()
        slot.filled = self.readers.submit(self.fill, slot, group, used)
        return slot

    def fill(self, slot: Slot, group: Group, used: Any) -> Any:
        """Reads a group's blocks into `slot`, once what used it before is done; returns the event of the last copy."""
        row = 0
        for i, number in enumerate(group.blocks):
            if slot.holds != (group.epoch, group.number):
                return None  # another group is wanted here by now
            tensors = self.blocks.read(number)
            rows = len(tensors["ids"])
            if self.copies is None:
                for name, tensor in tensors.items():
                    slot.tensors[name][row : row + rows].copy_(tensor)
            else:
                buffers, copied = self.stages[i % STAGES]
                copied.synchronize()  # the buffer's earlier content has left
                with torch.cuda.stream(self.copies):
                    if i == 0:
                        self.copies.wait_event(used)
                    for name, tensor in tensors.items():
                        buffers[name][:rows].copy_(tensor)
                        slot.tensors[name][row : row + rows].copy_(buffers[name][:rows], non_blocking=True)
                    copied.record(self.copies)
            row += rows
        slot.order = self.order.permutation(group)
        if self.copies is None:
            return None
        with torch.cuda.stream(self.copies):
            slot.order = slot.order.pin_memory().to(self.device, non_blocking=True)
            return self.copies.record_event()

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return held_out_batches(self.held_out_blocks, batch_size, self.device, self.normalise, self.skips)

    def state_dict(self) -> dict[str, int]:
        return {"samples_seen": self.samples_seen, "window": self.order.window}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The order depends on the window, so a resumed run keeps the one that it began with."""
        if state["window"] != self.order.window:
            self.make_room(state["window"])
        self.samples_seen = state["samples_seen"]
