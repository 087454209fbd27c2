"""Keeps the tensors that the forward pass saves in host memory until the backward pass needs them.

With gradient checkpointing these tensors are the inputs of the blocks, otherwise all saved
activations.

The technique costs two copies of the saved bytes in every step, to the host and back, through
page-locked memory, without prefetching. In return it frees these bytes on the device. Its speed on
a GPU is not measured yet. Weights stay on the device, also those that fsdp gathers for a block,
because fsdp itself can free them and gather them again. The technique uses hooks on saved tensors.
torch's `CheckpointPolicy.MUST_CPU_OFFLOAD` is not enough: it moves the results of chosen
operations, but not the inputs of a block that is recomputed as a whole. Reference:
https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel import saved_tensors
from accel.evidence import Evidence
from accel.sharding import find_gathered_storages, find_storages
from accel.technique import AnyStep, Observation, Planning, Saving, Technique


def decorate_copies(technique: OffloadActivations, decorate: Callable[..., Any]) -> None:
    technique.copy_to_host = decorate(technique.copy_to_host)


class OffloadActivations(Technique):
    key = "offload_activations"
    summary = "tensors saved for the backward pass wait in host memory"
    loss_rtol = 0.0
    used_in = ("training",)
    without_gpu = "This run is on {device}, whose memory is the host's."
    planning = Planning(
        savings=(
            Saving(
                {"offload_activations": True},
                "saved tensors cross to the host and back in each step",
                90,
            ),
        ),
        decorate_copies=decorate_copies,
    )
    gathered: Set[int] | None = None
    """Addresses of the storages into which FSDP gathers sharded parameters; None until the first
    forward pass."""
    model_storages: Set[int] = frozenset()
    """Addresses of all storages that belong to the model, and so are never copied to the host:
    those of its parameters and buffers, and those in `gathered`."""
    moved = 0
    """Bytes that the latest forward pass copied to the host."""
    copies: dict[Any, Tensor]
    """(storage, layout, version) of a saved tensor -> its copy in host memory. Several operations
    of a forward pass may save the same tensor, which is then copied once. Each forward pass empties
    the mapping at its end."""

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
        """The pack hook of `saved_tensors_hooks`: returns (device, copy in host memory), or the
        detached tensor if it stays on the device."""
        storage = tensor.untyped_storage()
        small = tensor.nbytes < saved_tensors.MIN_MOVED_BYTES or 0 in tensor.stride()
        elsewhere = tensor.device.type != self.device.type
        if small or elsewhere or storage._cdata in self.model_storages:
            return tensor.detach()

        # Identify the storage in the key by a weak reference. The reference does not keep the
        # memory alive, but while the reference exists, no other storage gets the same address.
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (StorageWeakRef(storage), *layout, tensor._version)
        if key not in self.copies:
            self.copies[key] = self.copy_to_host(tensor)
            self.moved += tensor.nbytes
        return tensor.device, self.copies[key]

    def copy_to_host(self, tensor: Tensor, /) -> Tensor:
        """Copies a tensor to host memory. The copy has the strides of the tensor, because compiled
        code of the backward pass expects these strides."""
        copy = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda
        )
        return copy.copy_(tensor.detach(), non_blocking=True)

    # What would still say "on" if this did nothing? A count of copies by the hooks in this file:
    # autograd may keep the tensors on the device too. So read the blocks' probes: they inspect the
    # object that autograd keeps for each tensor, and the caches of checkpointing, which no hook
    # sees.
    def observe(self, evidence: Evidence) -> Observation:
        if not self.enabled:
            return Observation(False, "saved tensors stay on the device")
        calls = evidence.block_calls
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
    """The unpack hook: returns, on its device, the saved tensor for which `pack` returned
    `packed`."""
    if isinstance(packed, Tensor):
        return packed
    device, copy = packed
    tensor = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=device)
    return tensor.copy_(copy, non_blocking=True)
