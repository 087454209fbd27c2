"""Data parallelism over several processes, by torch.distributed: each process takes its share of
every batch.

`ddp` (Li et al. 2020, https://arxiv.org/abs/2006.15704): every process has the whole model; during
the backward pass, an all-reduce averages the gradients. `fsdp` (FSDP2, `fully_shard`): parameters,
gradients, optimizer moments and EMA weights are sharded over all processes; each block all-gathers
its parameters for its forward pass and again for its backward pass. `hsdp`: like fsdp within each
group of `shard_degree` processes; each group holds one replica of the model. Data parallelism costs
communication: with fsdp two all-gathers and a reduce-scatter for each block and step, with ddp an
all-reduce of all gradients. Its speed is not measured yet.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel.evidence import Evidence
from accel.machine import is_available
from accel.sharding import gather_objects, get_world_size
from accel.technique import (
    AnyStep,
    Model,
    Observation,
    Planning,
    Saving,
    Technique,
    Value,
    blocks_of,
    switch_off,
)

# Name of the argument that says whether DDP synchronises buffers: `forward_sync_buffers` since
# torch 2.13, `broadcast_buffers` before.
SYNC_BUFFERS_ARGUMENT = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"
)
REDUCTIONS = {"ddp": "allreduce", "fsdp": "reducescatter", "hsdp": "reducescatter"}
"""Value of `parallel.mode` -> key, in `COLLECTIVES`, of the collective operation that reduces
gradients in this mode."""
COLLECTIVES = {
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
}


class DataParallel(Technique):
    key = "parallel"
    summary = "`runtime.parallel.mode`: `ddp`, `fsdp`, `hsdp`, for several processes"
    examples = tuple({"parallel": mode} for mode in REDUCTIONS)
    options: ClassVar = {
        "shard_degree": None,
        "reshard_after_forward": True,
        "reduce_dtype": "fp32",
        "bucket_cap_mb": 25,
        "gradient_as_bucket_view": True,
        "cpu_offload": False,
    }
    used_in = ("training",)
    planning = Planning(
        savings=(
            Saving({"parallel.mode": "fsdp"}, "two gathers a block", 55),
            Saving(
                {"parallel.mode": "fsdp", "parallel.cpu_offload": True}, "updates on the host", 85
            ),
        ),
        on_fake_device=switch_off,
    )
    off = "none"
    wrapped: Any
    # Several processes add up the gradients of a batch in another order than one process, so the
    # loss may differ from that of one process by this fraction.
    loss_rtol = 1e-4

    def __init__(self, value: Any, device: torch.device, **options: Any) -> None:
        if value == "auto":
            value = "ddp" if get_world_size() > 1 else "none"
        super().__init__(value, device, **options)

    @classmethod
    def make_override(cls, value: Value, option: str = "mode") -> str:
        return super().make_override(value, f"parallel.{option}")

    def find_obstacle(self) -> str | None:
        if not is_available("several processes", dist.is_initialized()):
            return "There is one process only; start several with torchrun."
        degree = self.option["shard_degree"]
        if self.value == "hsdp" and get_world_size() % (degree or 1):
            return f"shard_degree={degree} does not divide {get_world_size()} processes."
        if self.value == "ddp" and self.reduces_in_bf16 and self.device.type != "cuda":
            return (
                "Gradients of ddp travel in bf16 over NCCL only, which needs NVIDIA GPUs; use "
                "reduce_dtype=fp32."
            )
        return None

    @property
    def reduces_in_bf16(self) -> bool:
        """Whether the processes reduce gradients in bf16: half the bytes of fp32 to communicate."""
        return self.option["reduce_dtype"] == "bf16"

    @property
    def shards(self) -> bool:
        """Whether the mode shards the parameters: fsdp and hsdp do, ddp does not."""
        return self.enabled and self.value != "ddp"

    def make_mesh(self) -> DeviceMesh:
        """Makes the device mesh of all processes. The mesh has one dimension for fsdp, (shard), and
        two for hsdp, (replicate, shard). By default hsdp shards over the GPUs of a node."""
        world = get_world_size()
        device = self.device.type
        if self.value == "fsdp":
            return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
        node_size = torch.cuda.device_count() if device == "cuda" else world
        degree = self.option["shard_degree"] or min(world, node_size)
        names = ("replicate", "shard")
        return init_device_mesh(device, (world // degree, degree), mesh_dim_names=names)

    def on_model(self, model: Model) -> Model:
        self.model = model
        if not self.shards:
            return model

        # Let only autocast choose dtypes: FSDP must not cast a block's inputs, because one of them
        # is the residual stream, which stays fp32.
        precision = fsdp.MixedPrecisionPolicy(
            reduce_dtype=torch.bfloat16 if self.reduces_in_bf16 else None, cast_forward_inputs=False
        )
        offload = fsdp.OffloadPolicy()
        if self.option["cpu_offload"]:
            offload = fsdp.CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        mesh = self.make_mesh()

        # FSDP warns because a block returns its gate as a view. Ignore this warning, because no
        # code writes to the gate.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        for part in (*blocks_of(model), model):
            fsdp.fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=self.option["reshard_after_forward"],
                mp_policy=precision,
                offload_policy=offload,
            )
        return model

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.value == "ddp":
            names = ("bucket_cap_mb", "gradient_as_bucket_view")
            options = {name: self.option[name] for name in names}
            # Do not synchronise buffers, because the buffers of our models never change.
            options[SYNC_BUFFERS_ARGUMENT] = False
            devices = [torch.cuda.current_device()] if self.device.type == "cuda" else None
            self.wrapped = nn.parallel.DistributedDataParallel(
                self.model, device_ids=devices, **options
            )
            if self.reduces_in_bf16:
                self.wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
            step.forward = self.wrapped
        if self.enabled:
            step.synchronise = self.synchronise  # pyright: ignore[reportAttributeAccessIssue]
        return step

    @contextmanager
    def synchronise(self, last: bool) -> Iterator[None]:
        """Returns a context for the forward and backward pass of one micro-batch. `last`: whether
        this micro-batch is the last one of its step; the processes reduce gradients only in the
        last one."""
        if self.shards:
            self.model.set_requires_gradient_sync(last)
        with nullcontext() if self.shards or last else self.wrapped.no_sync():
            yield

    @contextmanager
    def surround_evaluation(self) -> Iterator[None]:
        """Reshards the parameters after evaluation.

        If `reshard_after_forward` is off, a forward pass without a backward pass leaves the
        parameters gathered. Without resharding, the next step trains with the parameters of
        evaluation, which are averages.
        """
        yield
        if self.shards:
            for part in self.model.modules():
                if isinstance(part, fsdp.FSDPModule):
                    part.reshard()

    # What would still say "on" if this did nothing? The wrapper around the model: it may
    # communicate nothing. So count the collectives that reduce gradients in this mode, and compare
    # the gradients' norms, which differ where a process goes on with its own gradients.
    def observe(self, evidence: Evidence) -> Observation:
        numbers = {
            key: sum(n for op, n in evidence.ops.items() if key in op.lower().replace("_", ""))
            for key in COLLECTIVES
        }
        counts = ", ".join(f"{n} {COLLECTIVES[key]}" for key, n in numbers.items() if n)
        note = f"{counts or 'no collectives'} in one step of {get_world_size()} processes"
        if not self.enabled:
            return Observation(self.off if get_world_size() == 1 else "not synchronised", note)
        reduces = numbers[REDUCTIONS[str(self.value)]] > 0
        norms = gather_objects(max([float(update.norm) for update in evidence.updates], default=0))
        if max(norms) > 1.001 * min(norms):
            reduces = False
            note += f"; the norms of their gradients differ: {norms}"
        return Observation(str(self.value) if reduces else False, note)
