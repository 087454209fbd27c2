"""Imports libraries without their warnings, explains a missing library to the user, and disables
TF32 for a block of code."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from common.errors import UserError


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


def import_optional(module: str, wanted_by: str) -> ModuleType:
    """Imports `module` without its warnings. Raises UserError if its package is missing; the
    message then says that `wanted_by`, such as "optim=adamw_8bit", needs the package."""
    package = module.partition(".")[0]
    try:
        with silence_libraries():
            return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{wanted_by} needs the package {package} ({error}); pip install {package}, or choose "
            "another optim."
        ) from error


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
