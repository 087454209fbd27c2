"""Keeps the optimizer's state in host memory; the device holds the state of one part of the
parameters at a time.

The technique costs copies: every step copies the state to the device and back, 16 bytes per
parameter with AdamW (4 with 8-bit moments), through page-locked memory, part by part, without
prefetching. In return it frees the state's bytes on the device. Its speed on a GPU is not measured
yet. The technique works with one process or ddp; with fsdp use `runtime.parallel.cpu_offload`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accel.composite_optimizer import (
    Groups,
    MakeOptimizer,
    Members,
    collect_state,
    count_bytes,
    iterate_innermost,
    split_parts,
)
from accel.evidence import Evidence
from accel.technique import Observation, Planning, Saving, Technique

MIN_OFFLOADED_ELEMENTS = 4096
"""Number of elements below which a tensor of the optimizer's state stays on the device, such as
step counts, scales and moments of vectors."""


class HostState(Members):
    """An optimizer that updates one part of the parameters after the other. The large tensors of a
    part's state are on the device during the part's update, and in host memory at all other
    times."""

    def __init__(self, groups: Groups, make: MakeOptimizer) -> None:
        super().__init__(groups, [make(part) for part in split_parts(groups)])
        self.device = self.numbered_parameters[0].device
        self.host: dict[torch.optim.Optimizer, dict[tuple[Tensor, str], Tensor]] = {}
        """Innermost optimizer -> a mapping of its state in host memory: (parameter, name of an
        entry of the parameter's state) -> the entry's tensor."""
        self.moved = 0
        """Bytes of state that the latest step copied to the device, plus those that it copied to
        the host."""

    def step(self, closure: Any = None) -> None:
        self.moved = 0
        super().step(closure)

    @contextmanager
    def surround_update(self, member: torch.optim.Optimizer) -> Iterator[None]:
        """Inside the context, the state of `member` is on the device. When the context ends, the
        large tensors of that state are copied to host memory."""
        for optimizer in iterate_innermost(member):
            for key, value in self.host.get(optimizer, {}).items():
                parameter, name = key
                on_device = value.to(self.device, copy=True, non_blocking=True)
                optimizer.state[parameter][name] = on_device
                self.moved += count_bytes(on_device)
        yield

        for optimizer in iterate_innermost(member):
            host = self.host.setdefault(optimizer, {})
            for parameter, entries in optimizer.state.items():
                for name, value in entries.items():
                    if isinstance(value, Tensor) and value.numel() >= MIN_OFFLOADED_ELEMENTS:
                        if (parameter, name) not in host:
                            host[parameter, name] = make_host_tensor(value)
                        entries[name] = host[parameter, name].copy_(value, non_blocking=True)
                        self.moved += count_bytes(value)

    def wait(self) -> None:
        """Waits until the copies to host memory that the latest step has queued are complete."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def make_host_tensor(value: Tensor) -> Tensor:
    """Makes a tensor in host memory with the shape and dtype of `value`. The new tensor is
    page-locked if `value` is on a GPU, unless `value` is a tensor of a library's class, such as an
    8-bit moment."""
    if value.is_cuda and not hasattr(value, "__tensor_flatten__"):
        return torch.empty_like(value, device="cpu", pin_memory=True)
    return value.detach().to("cpu", copy=True)


def list_host_tensors(technique: OffloadOptimizer) -> list[Tensor]:
    hosts = [host for state in technique.states for host in state.host.values()]
    return [tensor for host in hosts for tensor in host.values()]


class OffloadOptimizer(Technique):
    key = "offload_optimizer"
    summary = "the optimizer's state in host memory"
    loss_rtol = 0.0
    used_in = ("training",)
    without_gpu = "This run is on {device}, so the optimizer's state lies in host memory as it is."
    planning = Planning(
        savings=(
            Saving(
                {"offload_optimizer": True},
                "the state crosses to the host and back in every step",
                80,
            ),
        ),
        count_part_bytes=lambda technique, _: 0.0 if technique.enabled else None,
        list_host_tensors=list_host_tensors,
    )
    states: Sequence[HostState] = ()

    def on_optimizer(self, make: MakeOptimizer) -> MakeOptimizer:
        if not self.enabled:
            return make

        def make_on_host(groups: Groups) -> torch.optim.Optimizer:
            state = HostState(groups, make)
            self.states = [*self.states, state]
            return state

        return make_on_host

    # What would still say "on" if this did nothing? The count of moved bytes: the state may still
    # be on the device. So read also the device of each tensor of the state.
    def observe(self, evidence: Evidence) -> Observation:
        if not self.states:
            return Observation(False, "the state lies where the parameters are")
        tensors = [
            t
            for state in self.states
            for p in state.numbered_parameters
            for t in collect_state(state, p).values()
            if isinstance(t, Tensor) and t.numel() >= MIN_OFFLOADED_ELEMENTS
        ]
        away = [t for t in tensors if t.device.type == "cpu"]
        moved = sum(state.moved for state in self.states)
        size = sum(t.nbytes for t in away)
        note = (
            f"{len(away)} of {len(tensors)} tensors of the state lie in host memory, "
            f"{size / 2**20:.1f} MiB; the step moved {moved / 2**20:.1f} MiB there and back"
        )
        return Observation(len(away) == len(tensors) and moved >= 2 * size > 0, note)
