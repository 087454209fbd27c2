"""Packs the columns of n samples to rows of bytes, and unpacks them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from jaxtyping import UInt8
from torch import Tensor

Rows = UInt8[Tensor, "n bytes"]
"""Samples, or texts, as bytes: all columns of one in each row."""


def join_rows(columns: list[Tensor]) -> Rows:
    """Joins tensors with n rows each to the bytes of these rows."""
    flat = [column.reshape(len(column), math.prod(column.shape[1:])) for column in columns]
    return torch.cat([values.view(torch.uint8) for values in flat], dim=1)


def split_rows(
    rows: Rows, template: Mapping[str, Tensor], names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Splits rows that `join_rows` joined; `template` maps the names of the columns to one row of
    each. Returns name -> column for the columns `names` (None: all). The rows may have further
    bytes."""
    columns = {}
    end = 0
    for name, row in template.items():
        start = end
        end += row.nbytes
        if names is None or name in names:
            # Copy the part, also if it is contiguous, as a single row is: a view in a larger dtype
            # must begin at a multiple of its size.
            part = rows[:, start:end].clone(memory_format=torch.contiguous_format)
            columns[name] = part.flatten().view(row.dtype).view(len(rows), *row.shape[1:])
    return columns
