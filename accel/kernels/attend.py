"""Softmax attention by a chosen backend of PyTorch.

Shapes: B samples, K heads, L tokens, P head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel.evidence import FLEX

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attend(
    q: Float[Tensor, "B K L P"],
    k: Float[Tensor, "B K L P"],
    v: Float[Tensor, "B K L P"],
    backend: str = "auto",
) -> Float[Tensor, "B K L P"]:
    """`softmax(q·kᵀ / √P)·v`. `backend` is one of `BACKENDS`, "flex", or "auto" for PyTorch's own
    choice.

    A named backend that does not take the inputs is a RuntimeError of PyTorch's, never another
    backend. The channels of a head must be neighbours in memory: every backend but `math` would
    copy q, k or v otherwise.
    """
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if backend == "auto":
        return F.scaled_dot_product_attention(q, k, v)
    if backend == "flex":
        return flex(q, k, v)
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlexAttention; compiled, unless it is being compiled with what surrounds it. Uncompiled it
    stores all scores.

    It stays compiled where everything else is told to run eagerly, as in evaluation.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention(q, k, v)  # pyright: ignore[reportReturnType]
    with torch.profiler.record_function(FLEX), torch.compiler.set_stance("default"):
        return compiled_flex()(q, k, v)


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # which raises where it would run uncompiled
    return torch.compile(flex_attention, fullgraph=True)
