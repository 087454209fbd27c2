"""What libraries are told: to keep quiet while they are imported, and to multiply in full fp32; and
one sentence where an optional one is missing."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from common.errors import UserError


@contextmanager
def silence_libraries() -> Iterator[None]:
    """Without what libraries say when they are imported: torchao, that kernels fail to load which
    nothing here uses."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def import_optional(module: str, wanted_by: str) -> ModuleType:
    """Imports `module` quietly; ValueError, in a sentence, where its package is missing."""
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
    """Inside, products of matrices and convolutions are full fp32, without TF32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
