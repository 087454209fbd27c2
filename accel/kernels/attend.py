"""Softmax attention with a chosen backend of PyTorch.

Shapes: B samples, K heads, L tokens, P head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel.evidence import FLEX_NAME

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
    groups: Int[Tensor, "L"] | None = None,
) -> Float[Tensor, "B K L P"]:
    """Computes `softmax(q·kᵀ / √P)·v`. `backend` is a key of `BACKENDS`, "flex" (FlexAttention), or
    "auto" (PyTorch chooses).

    `groups[l]` is the index of the group of token l: a token attends only to the tokens of its
    group. All backends but "flex" compute every score, and mask the scores between different
    groups; on a GPU "flash" and "cudnn" accept no mask, so they do not work with `groups`. Without
    `groups` each token attends to all tokens.

    A named backend that does not support the inputs raises PyTorch's RuntimeError; PyTorch never
    falls back to another backend. q, k and v must have stride 1 along P, because otherwise every
    backend but "math" copies them.
    """
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if backend == "flex":
        return attend_by_flex(q, k, v, groups)

    mask = None if groups is None else groups[:, None] == groups
    if backend == "auto":
        return F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, mask)


def attend_by_flex(q: Tensor, k: Tensor, v: Tensor, groups: Tensor | None) -> Tensor:
    """Calls FlexAttention, always as compiled code: without compilation it stores all L × L scores.

    If the caller is being compiled, FlexAttention is compiled with it. Otherwise this function
    calls a compiled version, even if evaluation has switched all other code to eager mode by
    `torch.compiler.set_stance`.
    """
    if torch.compiler.is_compiling():
        return attend_in_groups(q, k, v, groups)
    with torch.profiler.record_function(FLEX_NAME), torch.compiler.set_stance("default"):
        return compile_flex()(q, k, v, groups)


def attend_in_groups(q: Tensor, k: Tensor, v: Tensor, groups: Tensor | None) -> Tensor:
    """Calls FlexAttention, which skips blocks of 128 × 128 scores whose tokens share no group.

    Each call computes again which blocks to skip, by L² integer comparisons in compiled code; so no
    mask of blocks has to be stored and moved to the right device.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    block_mask = None
    if groups is not None:

        def is_seen(_sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return groups[query] == groups[key]

        tokens = len(groups)
        block_mask = create_block_mask(is_seen, None, None, tokens, tokens, device=groups.device)
    return flex_attention(q, k, v, block_mask=block_mask)  # pyright: ignore[reportReturnType]


@functools.cache
def compile_flex() -> Callable[..., Tensor]:
    """Returns `attend_in_groups` compiled; compiles it at the first call of the process only."""
    # Set fullgraph, so that code which cannot be compiled raises an error; without fullgraph,
    # FlexAttention in such code runs uncompiled.
    return torch.compile(attend_in_groups, fullgraph=True)
