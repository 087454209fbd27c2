"""Triton kernel of the draws (draws.py): the same integers, and normals within rounding.

For each number the kernel computes a Philox block of four 32-bit words and uses only one of the
four, because arithmetic is cheap compared with the launch.
"""

# Switch the checks below off in this file. Pyright does not know that the launch of a kernel turns
# numbers into tl.constexpr. Nor does it know that Triton decides an `if` over constants when it
# compiles the kernel, so that a name assigned under such an `if` exists wherever it is used.
# pyright: reportArgumentType=false
# pyright: reportCallIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
KINDS = {"bits": 0, "uniform": 1, "normal": 2}


@triton.jit
def philox_word(word, purpose, low, high, key_low, key_high):
    """Returns the random 32-bit word at index `word` of a sample's draw for `purpose`, as uint32.
    `low` and `high` are the lower and upper 32 bits of the sample's stream position, `key_low` and
    `key_high` those of the seed; all arguments are tensors of one shape."""
    c0 = (word // 4).to(tl.uint32)
    c1 = purpose
    c2 = low
    c3 = high
    k0 = key_low
    k1 = key_high
    for _ in tl.static_range(10):
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = second.to(tl.uint32)
        c3 = first.to(tl.uint32)
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    lane = word % 4
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))


@triton.jit
def to_uniform(bits):
    """Maps 32 random bits to a uniform fp32 number in (0, 1)."""
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def compute_cos_and_sin(u):
    """Computes cos(2πu) and sin(2πu) for u in (0, 1): writes the angle as a number of quarter turns
    plus a remainder r, and takes Taylor polynomials in r, up to r⁹. CUDA's own cosine is not used,
    because it needs local memory on the stack, which is slow."""
    quarter = tl.floor(4.0 * u + 0.5)
    r = (4.0 * u - quarter) * 1.5707963267948966
    q = r * r
    sine = r * (
        1.0 + q * (-1.6666667e-1 + q * (8.3333333e-3 + q * (-1.9841270e-4 + q * 2.7557319e-6)))
    )
    cosine = 1.0 + q * (-0.5 + q * (4.1666667e-2 + q * (-1.3888889e-3 + q * 2.4801587e-5)))
    turn = quarter.to(tl.int32) % 4
    swapped = turn % 2 == 1
    x = tl.where(swapped, sine, cosine)
    y = tl.where(swapped, cosine, sine)
    return tl.where((turn == 1) | (turn == 2), -x, x), tl.where(turn >= 2, -y, y)


@triton.jit(do_not_specialize=["purpose", "key_low", "key_high"])
def counter_noise_kernel(
    POSITION, OUT, purpose, key_low, key_high, words, half, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    zero = tl.zeros([BLOCK], tl.uint32)
    position = tl.load(POSITION + b)
    low = zero + (position & 0xFFFFFFFF).to(tl.uint32)
    high = zero + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    purposes = zero + purpose.to(tl.uint32)
    k0 = zero + key_low.to(tl.uint32)
    k1 = zero + key_high.to(tl.uint32)

    bits = philox_word(i, purposes, low, high, k0, k1)
    out = OUT + b * words + i
    if KIND == 0:
        tl.store(out, bits.to(tl.int64), mask=i < words)
    elif KIND == 1:
        tl.store(out, to_uniform(bits), mask=i < words)
    else:
        # Box–Muller makes two normals from two random words: word i gives the radius, word half + i
        # the angle. Normal i is radius·cos(angle), normal half + i is radius·sin(angle).
        radius = tl.sqrt(-2.0 * tl.log(to_uniform(bits)))
        x, y = compute_cos_and_sin(to_uniform(philox_word(i + half, purposes, low, high, k0, k1)))
        tl.store(out, radius * x, mask=(i < half) & (i < words))
        tl.store(out + half, radius * y, mask=(i < half) & (i + half < words))


def launch(kind: str, seed: int, purpose: int, position: Tensor, words: int) -> Tensor:
    """Launches the kernel; returns the draws (B, words): int64 if `kind` is "bits", fp32 if it is
    "uniform" or "normal"."""
    half = -(-words // 2)
    count = half if kind == "normal" else words
    out = torch.empty(
        len(position),
        words,
        dtype=torch.int64 if kind == "bits" else torch.float32,
        device=position.device,
    )

    if out.numel():
        counter_noise_kernel[(len(position), triton.cdiv(count, BLOCK))](
            position.contiguous(),
            out,
            int(purpose),
            seed & 0xFFFFFFFF,
            (seed >> 32) & 0xFFFFFFFF,
            words,
            half,
            KIND=KINDS[kind],
            BLOCK=BLOCK,
        )
    return out
