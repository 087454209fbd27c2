"""Silences libraries, and disables TF32, for a block of code."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Suppresses log messages and warnings of the code in the `with` block. For example, torchao
    warns on import that it cannot load some kernels, but fastlatent uses none of these kernels."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def silence_stderr() -> Iterator[None]:
    """Discards what the process writes to its standard error in the `with` block, where libraries
    in C report damaged files."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def disable_tf32() -> Iterator[None]:
    """In the `with` block, fp32 matrix products and convolutions compute in full fp32, not in
    TF32."""
    precision = torch.get_float32_matmul_precision()
    allow_tf32 = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = allow_tf32
