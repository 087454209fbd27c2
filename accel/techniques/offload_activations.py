"""What the forward pass keeps for the backward pass waits in host memory.

With gradient checkpointing that is the blocks' inputs alone, without it everything.

What it costs: the bytes kept cross to the host and back in every step, through page-locked memory;
nothing is fetched ahead of time. What it buys: their bytes on the device. Speed on a GPU: not
measured yet. By hooks on saved tensors rather than torch's `CheckpointPolicy.MUST_CPU_OFFLOAD`,
which moves results of chosen operations but not the inputs of a block that is recomputed as a
whole.
Reference:
https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel import saved_tensors
from accel.evidence import Evidence
from accel.technique import AnyStep, Model, Observation, Technique


class OffloadActivations(Technique):
    key = "offload_activations"
    summary = "what is kept for the backward pass waits in host memory"
    loss_rtol = 0.0

    without_gpu = "This run is on {device}, whose memory is the host's."
    parameters: Sequence[Tensor] = ()
    own: Set[int] = frozenset()
    copies: dict[Any, Tensor]
    """(storage, layout, version) -> its copy, in one forward pass. Several operations keep the same
    tensor."""

    def on_model(self, model: Model) -> Model:
        self.parameters = [*model.parameters(), *model.buffers()]
        return model

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.enabled:
            forward = step.forward

            @functools.wraps(forward)
            def offloaded_forward(*args: Any, **kwargs: Any) -> Any:
                self.own = {p.untyped_storage()._cdata for p in self.parameters}
                self.copies = {}
                try:
                    with saved_tensors.moved(self.pack, unpack):
                        return forward(*args, **kwargs)
                finally:
                    self.copies.clear()

            step.forward = offloaded_forward
        return step

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        small = tensor.nbytes < saved_tensors.LEAST_MOVED or 0 in tensor.stride()
        if small or tensor.device.type != self.device.type or storage._cdata in self.own:
            return tensor.detach()
        # A reference to the storage that does not keep its memory, and whose address nothing else
        # gets meanwhile.
        layout = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (StorageWeakRef(storage), *layout, tensor._version)
        if key not in self.copies:
            self.copies[key] = self.to_host(tensor)
        return tensor.device, self.copies[key]

    def to_host(self, tensor: Tensor, /) -> Tensor:
        """A copy in host memory with the same strides, which a compiled backward pass relies on."""
        room = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=tensor.is_cuda
        )
        return room.copy_(tensor.detach(), non_blocking=True)

    # What would still say "on" if this did nothing? The hooks' own count would, so the probes of
    # the blocks look at what autograd holds in the place of each tensor, and into caches that no
    # hook sees.
    def observe(self, evidence: Evidence) -> Observation:
        if not self.enabled:
            return Observation(False, "what is kept stays on the device")
        calls = [call for calls in evidence.blocks for call in calls]
        found = evidence.where(lambda call: call.trains and not call.left)
        kept = sum(call.saved_bytes for call in calls)
        left = sum(call.left for call in calls)
        least = saved_tensors.LEAST_MOVED
        note = f"{evidence.share(found)} keep nothing of {least} bytes or more on the device: of "
        note += f"{kept / 2**20:.1f} MiB kept for the backward pass {left / 2**20:.1f} stay there"
        return Observation(bool(found) and all(found), note)


def unpack(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, held = kept
    room = torch.empty_strided(held.shape, held.stride(), dtype=held.dtype, device=device)
    return room.copy_(held, non_blocking=True)
