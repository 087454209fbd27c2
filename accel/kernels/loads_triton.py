"""Loads of tiles that reach past the edge of a tensor, for the Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def load_or_zero(pointers, mask):
    """Loads the values at `pointers` where `mask` is true; returns 0 elsewhere."""
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_fp32(pointers, mask):
    """Loads as `load_or_zero` does, and casts the values to fp32."""
    return load_or_zero(pointers, mask).to(tl.float32)
