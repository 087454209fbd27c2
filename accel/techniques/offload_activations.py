"""Moves the tensors that the forward pass saves for the backward pass to host memory meanwhile.

With gradient checkpointing these are the blocks' inputs alone, otherwise all saved activations.

What it costs: the saved bytes cross to the host and back in every step, through page-locked memory,
without prefetching. What it buys: their bytes on the device. Speed on a GPU: not measured yet.
Weights stay on the device, also those that fsdp gathers for a block, which it gathers again for the
backward pass. It uses hooks on saved tensors, because torch's `CheckpointPolicy.MUST_CPU_OFFLOAD`
moves results of chosen operations but not the inputs of a block that is recomputed as a whole.
Reference:
https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from accel import saved_tensors
from accel.evidence import Evidence
from accel.sharding import find_gathered_storages, find_storages
from accel.technique import AnyStep, Model, Observation, Saving, Technique


class OffloadActivations(Technique):
    key = "offload_activations"
    summary = "tensors saved for the backward pass wait in host memory"
    loss_rtol = 0.0

    without_gpu = "This run is on {device}, whose memory is the host's."
    savings = (
        Saving(
            {"offload_activations": True},
            "saved tensors cross to the host and back in each step",
            90,
        ),
    )
    model: nn.Module
    gathered: Set[int] | None = None
    """Addresses of the storages into which a sharded model gathers its parameters."""
    model_storages: Set[int] = frozenset()
    """Addresses in `gathered`, and of the storages of parameters and buffers."""
    moved = 0
    """Bytes that the latest forward pass copied to the host."""
    copies: dict[Any, Tensor]
    """(storage, layout, version) -> copy, during one forward pass, because several operations save
    the same tensor."""

    def on_model(self, model: Model) -> Model:
        self.model = model
        return model

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.enabled:
            forward = step.forward

            @functools.wraps(forward)
            def offloaded_forward(*args: Any, **kwargs: Any) -> Any:
                if self.gathered is None:
                    self.gathered = find_gathered_storages(self.model)
                self.model_storages = self.gathered | find_storages(self.model)
                self.copies = {}
                self.moved = 0
                try:
                    with saved_tensors.move_saved(self.pack, unpack):
                        return forward(*args, **kwargs)
                finally:
                    self.copies.clear()

            step.forward = offloaded_forward
        return step

    def pack(self, tensor: Tensor) -> Any:
        """Returns (device, copy in host memory), or the tensor itself if it stays."""
        storage = tensor.untyped_storage()
        small = tensor.nbytes < saved_tensors.MIN_MOVED_BYTES or 0 in tensor.stride()
        elsewhere = tensor.device.type != self.device.type
        if small or elsewhere or storage._cdata in self.model_storages:
            return tensor.detach()

        # A weak reference does not keep the storage's memory, but reserves its address meanwhile.
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (StorageWeakRef(storage), *layout, tensor._version)
        if key not in self.copies:
            self.copies[key] = self.copy_to_host(tensor)
            self.moved += tensor.nbytes
        return tensor.device, self.copies[key]

    def copy_to_host(self, tensor: Tensor, /) -> Tensor:
        """Copies a tensor to host memory, with the same strides, on which a compiled backward pass
        relies."""
        copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda
        )
        return copy.copy_(tensor.detach(), non_blocking=True)

    # What would still say "on" if this did nothing? The hooks' own count would, so the probes of
    # the blocks inspect the object that autograd keeps for each tensor, and caches that no hook
    # sees.
    def observe(self, evidence: Evidence) -> Observation:
        if not self.enabled:
            return Observation(False, "saved tensors stay on the device")
        calls = [call for calls in evidence.blocks for call in calls]
        moves = evidence.check_blocks(lambda call: call.trains and not call.unmoved_bytes)
        saved = sum(call.saved_bytes for call in calls)
        unmoved = sum(call.unmoved_bytes for call in calls)
        least = saved_tensors.MIN_MOVED_BYTES
        note = (
            f"{evidence.format_share(moves)} keep nothing of {least} bytes or more on the device: "
        )
        note += f"of {saved / 2**20:.1f} MiB kept for the backward pass "
        note += f"{unmoved / 2**20:.1f} stay there"
        note += f"; a forward pass copied {self.moved / 2**20:.3f} MiB to the host"
        return Observation(bool(moves) and all(moves), note)


def unpack(packed: Any) -> Tensor:
    """Returns the tensor of which `pack` made `packed`, on its device."""
    if isinstance(packed, Tensor):
        return packed
    device, copy = packed
    tensor = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=device)
    return tensor.copy_(copy, non_blocking=True)
