"""Data parallelism over several processes, by torch.distributed: each takes its share of every
batch.

`ddp` (Li et al. 2020, https://arxiv.org/abs/2006.15704): every process has the whole model;
gradients are averaged while the backward pass goes on. `fsdp` (FSDP2, `fully_shard`): parameters,
gradients, moments and averages are cut over all processes; a block's parameters are gathered for
its forward and backward pass. `hsdp`: cut over `shard_degree` of them, copied over the rest. What
it costs: communication, and with fsdp two gathers a block. Speed: not measured yet.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accel.evidence import Evidence
from accel.sharding import world_size
from accel.technique import AnyStep, Model, Observation, Technique, blocks_of

BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    else "broadcast_buffers"  # before torch 2.13
)
REDUCTIONS = {"ddp": "all_?reduce", "fsdp": "reduce_?scatter", "hsdp": "reduce_?scatter"}
"""What must be seen of each mode, as part of an operation's name."""


class DataParallel(Technique):
    key = "parallel"
    summary = "`runtime.parallel.mode`: `ddp`, `fsdp`, `hsdp`, for several processes"
    examples = tuple({"parallel": mode} for mode in REDUCTIONS)
    options = (
        *("shard_degree", "reshard_after_forward", "reduce_dtype"),
        *("bucket_cap_mb", "gradient_as_bucket_view", "cpu_offload"),
    )
    off = "none"
    loss_rtol = 1e-4  # sums over a batch in another order

    def __init__(self, value: Any, device: torch.device, **options: Any) -> None:
        world = world_size()
        super().__init__(
            ("ddp" if world > 1 else "none") if value == "auto" else value, device, **options
        )
        self.model: nn.Module | None = None
        self.wrapped: Any = None

    def unavailable(self) -> str | None:
        if not dist.is_available() or not dist.is_initialized():
            return "There is one process only; start several with torchrun."
        if self.value == "hsdp" and world_size() % (self.shard_degree or 1):
            return f"shard_degree={self.shard_degree} does not divide {world_size()} processes."
        if (
            self.value == "ddp"
            and self.option["reduce_dtype"] == "bf16"
            and self.device.type != "cuda"
        ):
            return (
                "Gradients of ddp travel in bf16 over NCCL only, which needs NVIDIA GPUs; use "
                "reduce_dtype=fp32."
            )
        return None

    def without_device(self) -> None:
        self.value = self.off

    @property
    def shard_degree(self) -> int | None:
        return cast("int | None", self.option["shard_degree"])

    def mesh(self) -> DeviceMesh:
        world = world_size()
        if self.value == "fsdp":
            return init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        degree = self.shard_degree or min(
            world, torch.cuda.device_count() if self.device.type == "cuda" else world
        )
        return init_device_mesh(
            self.device.type, (world // degree, degree), mesh_dim_names=("replicate", "shard")
        )

    def on_model(self, model: Model) -> Model:
        self.model = model
        if self.enabled and self.value != "ddp":
            from torch.distributed.fsdp import (
                CPUOffloadPolicy,
                MixedPrecisionPolicy,
                OffloadPolicy,
                fully_shard,
            )

            on_gpu = self.device.type == "cuda"
            narrow = torch.bfloat16 if self.option["reduce_dtype"] == "bf16" else None
            how: dict[str, Any] = {
                "mesh": self.mesh(),
                "reshard_after_forward": self.option["reshard_after_forward"],
                # Autocast decides about dtypes; inputs are left alone, for the residual stream is
                # one and stays fp32.
                "mp_policy": MixedPrecisionPolicy(reduce_dtype=narrow, cast_forward_inputs=False),
                "offload_policy": OffloadPolicy(),
            }
            if self.option["cpu_offload"]:
                how["offload_policy"] = CPUOffloadPolicy(pin_memory=on_gpu)
            # It warns of the gate, which a block returns as a view; nothing writes to that.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            for part in (*blocks_of(model), model):
                fully_shard(part, **how)
        return model

    def on_step(self, step: AnyStep) -> AnyStep:
        if self.value == "ddp" and self.enabled:
            unchanging: dict[str, Any] = {BUFFERS: False}  # our buffers never change
            self.wrapped = nn.parallel.DistributedDataParallel(
                cast("nn.Module", self.model),
                device_ids=[torch.cuda.current_device()] if self.device.type == "cuda" else None,
                **unchanging,
                bucket_cap_mb=cast("float", self.option["bucket_cap_mb"]),
                gradient_as_bucket_view=bool(self.option["gradient_as_bucket_view"]),
            )
            if self.option["reduce_dtype"] == "bf16":
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
                    bf16_compress_hook,
                )

                self.wrapped.register_comm_hook(None, bf16_compress_hook)
            step.forward = self.wrapped
        if self.enabled:
            step.synchronised = self.synchronised  # pyright: ignore[reportAttributeAccessIssue]
        return step

    def synchronised(self, last: bool) -> AbstractContextManager[object]:
        """Surrounds a micro-batch: only the last one of a step communicates its gradients."""
        if self.wrapped is not None:
            return nullcontext() if last else self.wrapped.no_sync()
        return self.gathering(last)

    @contextmanager
    def gathering(self, last: bool) -> Iterator[None]:
        cast("Any", self.model).set_requires_gradient_sync(last)
        yield

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Without a backward pass after it, a forward pass leaves parameters gathered where
        `reshard_after_forward` is
        off: those of evaluation, which the next step would take for its own."""
        yield
        if self.enabled and self.value != "ddp":
            from torch.distributed.fsdp import FSDPModule

            for part in cast("nn.Module", self.model).modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    # What would still say "on" if this did nothing? The wrapper around the model would, so the row
    # counts the collectives that sum gradients in this mode.
    def observe(self, evidence: Evidence) -> Observation:
        found = {
            what: sum(n for name, n in evidence.ops.items() if re.search(what, name.lower()))
            for what in ("all_?reduce", "reduce_?scatter", "all_?gather")
        }
        counts = (
            ", ".join(f"{n} {what.replace('_?', '-')}" for what, n in found.items() if n)
            or "no collectives"
        )
        note = f"{counts} in one step of {world_size()} processes"
        if not self.enabled:
            return Observation(self.off if world_size() == 1 else "not synchronised", note)
        return Observation(str(self.value) if found[REDUCTIONS[str(self.value)]] else False, note)
