"""Optional libraries, imported where they are needed first; one sentence where they are missing."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from types import ModuleType


def optional(module: str, package: str, wanted_by: str) -> ModuleType:
    """Imports `module` quietly; ValueError, in a sentence, without the `package`."""
    logging.getLogger("torchao").setLevel(logging.ERROR)  # "Failed to load _C": on a machine without a GPU, always
    pytree = logging.getLogger("torch.utils._pytree")
    level = pytree.level
    pytree.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{wanted_by} needs the package {package} ({error}); pip install {package}, or choose another value."
        ) from error
    finally:
        pytree.setLevel(level)


def bitsandbytes_optim() -> ModuleType:
    return optional("bitsandbytes.optim", "bitsandbytes", "optim=adamw_8bit")


def torchao_optim() -> ModuleType:
    return optional("torchao.optim", "torchao", "optim=adamw_4bit or adamw_fp8")
