"""Optional libraries, imported where they are needed first; one sentence where they are missing."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from common.errors import UserError


@contextmanager
def quiet() -> Iterator[None]:
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


def optional(module: str, wanted_by: str) -> ModuleType:
    """Imports `module` quietly; ValueError, in a sentence, where its package is missing."""
    package = module.partition(".")[0]
    try:
        with quiet():
            return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{wanted_by} needs the package {package} ({error}); pip install {package}, or choose "
            "another optim."
        ) from error


def bitsandbytes_optim() -> ModuleType:
    return optional("bitsandbytes.optim", "optim=adamw_8bit")


def torchao_optim() -> ModuleType:
    return optional("torchao.optim", "optim=adamw_4bit or adamw_fp8")
