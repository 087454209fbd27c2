"""Tensors that several processes share, and what all of them agree on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

MAX_NORM_ELEMENTS = 2**18
"""Values of which PyTorch's norm on the CPU is right to 4 digits; of `dit_xl`'s largest matrix it
is 3% too small."""


def get_world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first_rank() -> bool:
    return get_world_size() == 1 or dist.get_rank() == 0


def gather_objects(item: Any) -> list[Any]:
    """The items of all processes, in order."""
    found: list[Any] = [item] * get_world_size()
    if get_world_size() > 1:
        dist.all_gather_object(found, item)
    return found


def to_local(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def to_full(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered, on every process; any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def find_storages(module: nn.Module) -> set[int]:
    """The addresses of the storages of its parameters, as they are now, and of its buffers."""
    tensors = (*module.parameters(), *module.buffers())
    return {to_local(tensor.detach()).untyped_storage()._cdata for tensor in tensors}


def find_gathered_storages(model: nn.Module) -> set[int]:
    """The addresses of the storages in which FSDP2 gathers parameters, for it takes the same ones
    each time; none without it. Gathers one part of the model after the other, so all processes call
    this."""
    found: set[int] = set()
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return found
    from torch.distributed import fsdp

    for part in model.modules():
        if isinstance(part, fsdp.FSDPModule):
            part.unshard()
            found |= find_storages(part)
            part.reshard()
    return found


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all of them together, in fp32 or wider; 0 of none. Large ones on the CPU go in
    parts."""
    parts: list[Tensor] = []
    for t in tensors:
        large = (
            t.device.type == "cpu" and not isinstance(t, DTensor) and t.numel() > MAX_NORM_ELEMENTS
        )
        parts += t.reshape(-1).split(MAX_NORM_ELEMENTS) if large else [t]
    # PyTorch's would be rounded to their dtype
    if any(t.dtype in (torch.bfloat16, torch.float16) for t in parts):
        return torch.linalg.vector_norm(
            torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float32))
        )
    return to_full(torch.nn.utils.get_total_norm(parts)) if parts else torch.zeros(())


def slice_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as `like` is; of one that is cut already, its
    part."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return to_local(tensor)
    shape, offset = locate_shard(like)
    for dim, (start, length) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(dim, min(start, tensor.shape[dim]), length)
    return tensor


def locate_shard(tensor: DTensor) -> tuple[Sequence[int], Sequence[int]]:
    """The shape of this process's part of a sharded tensor, and where it begins."""
    from torch.distributed.tensor import _utils

    where = (tensor.device_mesh, tensor.placements)
    return _utils.compute_local_shape_and_global_offset(tensor.shape, *where)


def find_first_row(tensor: DTensor) -> int | None:
    """The first row of this process's part of a tensor sharded by rows; None if another process has
    the same part."""
    coordinate = cast("list[int]", tensor.device_mesh.get_coordinate())
    for place, placement in zip(coordinate, tensor.placements, strict=True):
        copied = isinstance(placement, Replicate)
        assert copied or placement.is_shard(0)
        if copied and place:
            return None
    return locate_shard(tensor)[1][0]


def shard_like(tensor: Any, like: Any) -> Any:
    """A whole tensor as a sharded one such as `like`; anything else as it is."""
    alike = isinstance(tensor, Tensor) and isinstance(like, DTensor) and tensor.shape == like.shape
    if not alike:
        return tensor
    part = slice_like(tensor, like).to(like.device, copy=True)
    return DTensor.from_local(
        part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def replicate_like(scalar: Tensor, tensors: list[Tensor]) -> Tensor:
    """A scalar as a replicated DTensor on the mesh of sharded `tensors`, so that one operation
    takes both."""
    like = tensors[0]
    if not isinstance(like, DTensor):
        return scalar
    mesh = like.device_mesh
    return DTensor.from_local(scalar, mesh, [Replicate()] * mesh.ndim, run_check=False)


def is_true_on_any_rank(flag: bool, device: torch.device) -> bool:
    """True if any process says so."""
    if get_world_size() == 1:
        return flag
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes.item())
