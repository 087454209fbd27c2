"""Softmax attention with a chosen backend of PyTorch.

Shapes: B samples, K heads, L tokens, T keys before those of the tokens, P head dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from accel.evidence import FLEX_NAME

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
MAX_PRODUCT_TOKENS = 256
"""Largest number of tokens for which "auto" on a CPU computes bf16 attention by products (measured:
docs/kernels.md)."""


def attend(
    q: Float[Tensor, "B K L P"],
    k: Float[Tensor, "B K T+L P"],
    v: Float[Tensor, "B K T+L P"],
    backend: str = "auto",
    groups: Int[Tensor, "L"] | None = None,
    prefix: Bool[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B K L P"]:
    """Computes `softmax(q·kᵀ / √P)·v`. `backend` is a key of `BACKENDS`, "flex" (FlexAttention), or
    "auto": `attend_by_products` for at most `MAX_PRODUCT_TOKENS` tokens in bf16 on a CPU, otherwise
    PyTorch chooses. In fp32 PyTorch's kernel is faster at every length; fp16 was not measured on
    the only CPUs that can train in it.

    `groups[l]` is the index of the group of token l: a token attends only to the tokens of its
    group. All backends but "flex" compute every score, and mask the scores between different
    groups. Without `groups` each token attends to all tokens.

    `prefix` stands for T keys and values before those of the L tokens, to which all tokens attend:
    the tokens of a text. `prefix[b, t]` is false for padding. On a GPU "flash" and "cudnn"
    accept no mask, so they do not work with `groups` or `prefix`.

    A named backend that does not support the inputs raises PyTorch's RuntimeError; PyTorch never
    falls back to another backend. q, k and v must have stride 1 along P, because otherwise every
    backend but "math" copies them.
    """
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if backend == "flex":
        return attend_by_flex(q, k, v, groups, prefix)

    mask = make_mask(groups, prefix, q.shape[2])
    if backend == "auto":
        in_bf16_on_cpu = q.device.type == "cpu" and q.dtype == torch.bfloat16
        if in_bf16_on_cpu and q.shape[2] <= MAX_PRODUCT_TOKENS:
            return attend_by_products(q, k, v, mask)
        return F.scaled_dot_product_attention(q, k, v, mask)
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(q, k, v, mask)


def make_mask(groups: Tensor | None, prefix: Tensor | None, tokens: int) -> Tensor | None:
    """Returns the mask of `groups` and `prefix`, which is true where a token attends to a key:
    (L, L), with a prefix (B, 1, L or 1, T + L); None if neither is given."""
    mask = None if groups is None else groups[:, None] == groups
    if prefix is None:
        return mask
    before = prefix[:, None, None, :]
    if mask is None:
        return F.pad(before, (0, tokens), value=True)
    size = (prefix.shape[0], 1, tokens, -1)
    return torch.cat((before.expand(size), mask.expand(size)), dim=3)


def attend_by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Computes attention by two batched matrix products, in the dtype of q, and stores all scores.
    `mask`, if not None, is the result of `make_mask`.

    The scores are rounded to the dtype of q, which PyTorch's kernels keep in fp32.
    """
    samples_and_heads = q.shape[:2]
    if mask is not None and mask.ndim == 4:
        mask = mask.expand(*samples_and_heads, *mask.shape[2:]).flatten(0, 1)
    q, k, v = (part.flatten(0, 1) for part in (q, k, v))
    bias = q.new_zeros(1) if mask is None else q.new_zeros(mask.shape).masked_fill(~mask, -math.inf)
    scores = torch.baddbmm(
        bias, q, k.transpose(1, 2), beta=int(mask is not None), alpha=q.shape[2] ** -0.5
    )
    return torch.bmm(scores.softmax(-1), v).unflatten(0, samples_and_heads)


def attend_by_flex(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor | None, prefix: Tensor | None
) -> Tensor:
    """Calls FlexAttention, always as compiled code: without compilation it stores all L × L scores.

    If the caller is being compiled, FlexAttention is compiled with it. Otherwise this function
    calls a compiled version, even if evaluation has switched all other code to eager mode by
    `torch.compiler.set_stance`.
    """
    if torch.compiler.is_compiling():
        return attend_in_groups(q, k, v, groups, prefix)
    with torch.profiler.record_function(FLEX_NAME), torch.compiler.set_stance("default"):
        return compile_flex()(q, k, v, groups, prefix)


def attend_in_groups(
    q: Tensor, k: Tensor, v: Tensor, groups: Tensor | None, prefix: Tensor | None
) -> Tensor:
    """Calls FlexAttention, which skips blocks of 128 × 128 scores whose tokens share no group.

    Each call computes again which blocks to skip, by L² integer comparisons in compiled code; so no
    mask of blocks has to be stored and moved to the right device.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # Pad groups and prefix to all keys: Inductor compiles no arithmetic with the index of a key.
    tokens = q.shape[2]
    key_groups = None if groups is None else F.pad(groups, (k.shape[2] - tokens, 0), value=-1)
    shown = None if prefix is None else F.pad(prefix, (0, tokens), value=groups is None)

    def is_seen(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query < 0 if shown is None else shown[sample, key]
        if groups is not None and key_groups is not None:
            seen = seen | (groups[query] == key_groups[key])
        return seen

    block_mask = None
    if groups is not None or prefix is not None:
        samples = None if prefix is None else prefix.shape[0]
        block_mask = create_block_mask(is_seen, samples, None, tokens, k.shape[2], device=q.device)
    return flex_attention(q, k, v, block_mask=block_mask)  # pyright: ignore[reportReturnType]


@functools.cache
def compile_flex() -> Callable[..., Tensor]:
    """Returns `attend_in_groups` compiled; compiles it at the first call of the process only."""
    # Set fullgraph, so that code which cannot be compiled raises an error; without fullgraph,
    # FlexAttention in such code runs uncompiled.
    return torch.compile(attend_in_groups, fullgraph=True)
