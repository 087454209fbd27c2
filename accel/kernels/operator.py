"""How our operators become PyTorch's: one registration for all of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.errors import UserError

LIBRARY = torch.library.Library("fastlatent", "FRAGMENT")


class Operator(NamedTuple):
    """The two ways to compute an operator; both take the arguments of its schema."""

    definition: Callable[..., Any]
    kernel: Callable[..., Any] | None
    """None: the definition calls other operators of ours, on a GPU too."""


MOST_SAMPLES = 65_535
"""Samples, or chunks of samples, of a launch: CUDA's limit of a grid's second and third
dimension."""
OPERATORS: dict[str, Operator] = {}
"""Every registered operator by name; accel/trial.py compares its two ways."""


def register(
    schema: str,
    definition: Callable[..., Any],
    fake: Callable[..., Any],
    launcher: str | None = None,
) -> None:
    """Defines `fastlatent::<schema>`: `definition` computes it on a CPU, `launcher` on a GPU,
    `fake` gives its shapes.

    `launcher` is "<module of accel.kernels>.<function>"; it is imported at the first launch, for it
    needs Triton. None is for a definition that calls other operators of ours.
    """
    name = schema.partition("(")[0]
    module, _, function = (launcher or "").partition(".")

    def on_gpu(*arguments: Any) -> Any:
        if arguments[0].shape[0] > MOST_SAMPLES:
            raise UserError(
                f"{name} got {arguments[0].shape[0]:,} samples, or chunks of samples, and its "
                f"kernel takes at most {MOST_SAMPLES:,} in a launch; use a smaller batch_size, or "
                "more accumulation_steps."
            )
        launch = getattr(importlib.import_module(f"accel.kernels.{module}"), function)
        with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
            return launch(*arguments)

    OPERATORS[name] = Operator(definition, on_gpu if launcher else None)
    LIBRARY.define(schema)
    LIBRARY.impl(name, definition, "CPU")
    LIBRARY.impl(name, on_gpu if launcher else definition, "CUDA")
    torch.library.register_fake(f"fastlatent::{name}", fake, lib=LIBRARY)


def heads_together(t: Tensor) -> Tensor:
    """`t` (B, L, groups, width) with each token's values in one stretch of memory; tokens may be
    apart."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()
