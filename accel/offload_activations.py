"""What the forward pass keeps for the backward pass waits in host memory.

With gradient checkpointing that is the blocks' inputs alone, without it everything.

What it costs: the bytes kept cross to the host and back in every step, through page-locked memory; nothing is fetched
ahead of time. What it buys: their bytes on the device. Speed on a GPU: not measured yet. By hooks on saved tensors
rather than torch's `CheckpointPolicy.MUST_CPU_OFFLOAD`, which moves results of chosen operations but not the inputs
of a block that is recomputed as a whole.
Reference: https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel.evidence import Evidence, nbytes
from accel.technique import AnyStep, Model, Observation, Technique

SMALL = 2**20
"""Bytes below which a tensor stays on the device: a copy of its own would cost more than it saves."""


class OffloadActivations(Technique):
    key = "offload_activations"
    summary = "what is kept for the backward pass waits in host memory"
    loss_rtol = 0.0

    def __init__(self, value: bool | str, device: torch.device) -> None:
        super().__init__(value, device)
        self.parameters: list[Tensor] = []
        self.own: set[int] = set()
        self.copies: dict[Any, Tensor] = {}
        """Of one forward pass: (storage, layout, version) -> its copy. Several operations keep the same tensor."""
        self.tensors, self.away, self.moved, self.stayed = 0, 0, 0, 0
        """Of the latest steps: tensors of `SMALL` bytes or more, those that went to the host, bytes, and bytes left."""

    def unavailable(self) -> str | None:
        if self.device.type != "cuda":
            return f"This run is on {self.device.type}, whose memory is the host's."
        return None

    def on_model(self, model: Model) -> Model:
        self.parameters = [*model.parameters(), *model.buffers()]
        return model

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.enabled:
            forward = step.forward

            @functools.wraps(forward)
            def offloaded_forward(*args: Any, **kwargs: Any) -> Any:
                self.own = {p.untyped_storage()._cdata for p in self.parameters}
                try:
                    with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                        return forward(*args, **kwargs)
                finally:
                    self.copies.clear()

            step.forward = offloaded_forward
        return step

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        if tensor.device.type != self.device.type or storage._cdata in self.own:
            return tensor
        if nbytes(tensor) < SMALL or 0 in tensor.stride():
            self.stayed += nbytes(tensor)
            return tensor
        self.tensors += 1
        # A reference to the storage that does not keep its memory, and whose address nothing else gets meanwhile.
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (StorageWeakRef(storage), *layout, tensor._version)
        if key not in self.copies:
            self.copies[key] = self.to_host(tensor)
        held = self.copies[key]
        self.away += held.device.type == "cpu" and held.untyped_storage()._cdata != storage._cdata
        return tensor.device, held

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in host memory with the same strides, which a compiled backward pass relies on."""
        self.moved += nbytes(tensor)
        room = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return room.copy_(tensor.detach(), non_blocking=True)

    def compare(self, run: Callable[[], object], evidence: Evidence) -> None:
        """Counts a step of its own: the probes of the observed one keep tensors by hooks that win over these."""
        if self.enabled:
            self.tensors = self.away = self.moved = self.stayed = 0
            run()

    def observe(self, evidence: Evidence) -> Observation:
        if not self.enabled:
            return Observation(False, "what is kept stays on the device")
        note = f"{self.away} of {self.tensors} kept tensors of {SMALL} bytes or more went "
        note += f"to the host, {self.moved / 2**20:.1f} "
        note += f"MiB a step and as much back; {self.stayed / 2**20:.1f} MiB of smaller ones stayed"
        return Observation(0 < self.tensors == self.away, note)


def unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, held = kept
    room = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=device)
    return room.copy_(held, non_blocking=True)
