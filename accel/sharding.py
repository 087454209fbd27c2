"""Helpers for tensors that are sharded over several processes, and for decisions that must be the
same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

MAX_NORM_ELEMENTS = 2**18
"""Number of elements above which `total_norm` sums a tensor in chunks on the CPU. Up to this number
of elements PyTorch's own norm is right to 4 digits on the CPU; for the largest matrix of the model
`dit_xl` it is 3 % too small."""


def get_world_size() -> int:
    """Returns the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first_rank() -> bool:
    return get_world_size() == 1 or dist.get_rank() == 0


def gather_objects(item: Any) -> list[Any]:
    """Gathers one picklable object from each rank. Returns on every rank the list of all objects,
    indexed by rank."""
    items: list[Any] = [item] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(items, item)
    return items


def to_local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard if `tensor` is sharded (a DTensor); otherwise returns `tensor`
    unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """Gathers the whole tensor on every rank if `tensor` is sharded (a DTensor); otherwise returns
    `tensor` unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def find_storages(module: nn.Module) -> set[int]:
    """Finds the addresses of the storages that hold a module's parameters and buffers at the time
    of the call."""
    tensors = (*module.parameters(), *module.buffers())
    return {to_local(tensor.detach()).untyped_storage()._cdata for tensor in tensors}


def find_gathered_storages(model: nn.Module) -> set[int]:
    """Finds the addresses of the storages into which FSDP2 gathers parameters; empty without FSDP2.

    FSDP2 reuses these storages in each step. Call this on all ranks: it gathers the parameters of
    one FSDP module after the other.
    """
    addresses: set[int] = set()
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
            addresses |= find_storages(part)
            part.reshard()
    return addresses


def list_grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Lists the gradients of those parameters that have one."""
    return [p.grad for p in parameters if p.grad is not None]


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Computes the 2-norm of all tensors together, in fp32 or wider; 0 without tensors.

    On the CPU large tensors are summed in chunks of `MAX_NORM_ELEMENTS`.
    """
    parts: list[Tensor] = []
    for t in tensors:
        large = (
            t.device.type == "cpu" and not isinstance(t, DTensor) and t.numel() > MAX_NORM_ELEMENTS
        )
        parts += t.reshape(-1).split(MAX_NORM_ELEMENTS) if large else [t]
    # PyTorch rounds the norm of a tensor to the tensor's dtype, so compute the norms of 16-bit
    # tensors in fp32.
    if any(t.dtype in (torch.bfloat16, torch.float16) for t in parts):
        return torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32))
        )
    return to_full(torch.nn.utils.get_total_norm(parts)) if parts else torch.zeros(())


def slice_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns that part of an unsharded tensor which this rank holds if the tensor is sharded as
    `like` is. If `tensor` is sharded already, returns its shard on this rank."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return to_local(tensor)
    shape, offset = locate_shard(like)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, min(start, tensor.shape[dim]), length)
    return tensor


def locate_shard(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the shape of this rank's shard, and the index of the shard's first element in the
    whole tensor; both have an entry for each dimension."""
    from torch.distributed.tensor import _utils

    return _utils.compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )


def find_first_row(tensor: DTensor) -> int | None:
    """Returns the index of the first row of this rank's shard, for a tensor that is sharded by
    rows; None if a lower rank holds a copy of the same shard."""
    coordinate = cast("list[int]", tensor.device_mesh.get_coordinate())
    for place, placement in zip(coordinate, tensor.placements, strict=True):
        replicated = isinstance(placement, Replicate)
        assert replicated or placement.is_shard(0)
        if replicated and place:
            return None
    return locate_shard(tensor)[1][0]


def add_up(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns the sum of the tensors of all processes that share the sharded parameter `like`;
    `tensor` itself if `like` is not sharded."""
    if not isinstance(like, DTensor):
        return tensor
    mesh = like.device_mesh
    places = [Partial() if place.is_shard() else place for place in like.placements]
    part = DTensor.from_local(tensor.to(mesh.device_type), mesh, places)
    return part.full_tensor().to(tensor.device)


def divide_anew(part: Tensor, like: Tensor, *, old: int, new: int, count: int) -> Tensor:
    """Divides a stack of `count` tensors, of the shape of the sharded parameter `like`, anew among
    the processes that share `like`.

    `part` is this process's part of the stack while it is divided along the dimension `old`. The
    function returns the part that this process has when the stack is divided along `new`; `part`
    itself if `like` is not sharded. An all-to-all exchanges the parts; on CPUs PyTorch gathers all
    of them instead.
    """
    if not isinstance(like, DTensor):
        return part
    mesh = like.device_mesh
    before, after = (
        [Shard(dim) if place.is_shard() else place for place in like.placements]
        for dim in (old, new)
    )
    shape = torch.Size([count, *like.shape])
    stride = (like.numel(), *like.stride())
    whole = DTensor.from_local(part.to(mesh.device_type), mesh, before, shape=shape, stride=stride)
    return whole.redistribute(placements=after).to_local().to(part.device)


def shard_like(tensor: Any, like: Any) -> Any:
    """Shards an unsharded tensor as `like` is sharded. Returns `tensor` unchanged if `like` is not
    sharded or has another shape."""
    both = isinstance(tensor, Tensor) and isinstance(like, DTensor)
    if not both or tensor.shape != like.shape:
        return tensor
    part = slice_like(tensor, like).to(like.device, copy=True)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def replicate_like(scalar: Tensor, tensors: list[Tensor]) -> Tensor:
    """Makes a scalar a replicated DTensor on the mesh of `tensors`, so that one operation can take
    the scalar and these tensors. Returns `scalar` unchanged if they are not sharded."""
    like = tensors[0]
    if not isinstance(like, DTensor):
        return scalar
    mesh = like.device_mesh
    return DTensor.from_local(scalar, mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_true_on_any_rank(flag: bool, device: torch.device) -> bool:
    """Returns whether `flag` is true on any rank. All ranks must call this function, because it
    runs an all-reduce."""
    if get_world_size() == 1:
        return flag
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())
