"""Random numbers without state: every draw is a hash of (seed, purpose, stream position).

The hash is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
http://www.thesalmons.org/john/random123/). On a GPU one kernel computes a draw (kernels_triton.py):
it gives the same integers as the definition here, and the same normals within rounding.

The stream position of a sample is the number of samples before its batch plus its index in the
global batch, so draws do not depend on the world size, on resumes or on the order of evaluation.

Shapes: B samples, W 32-bit words a sample.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from enum import IntEnum

import torch
from jaxtyping import Float, Int
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


class Purpose(IntEnum):
    """Uses of random numbers; each use has independent numbers at every stream position. The hash
    contains the use's number, so a changed number changes the random numbers of every run. Earlier
    versions used the number 7 for the times of held-out samples."""

    NOISE = 0
    TIME = 1
    LABEL_DROP = 2
    MIRROR = 3
    POSTERIOR = 4
    DROP_PATH = 5
    EVAL_NOISE = 6
    SAMPLE = 8
    SYNTHETIC = 9
    SAMPLE_STEP = 10
    ROUNDING = 11
    CAPTION = 12


def multiply(a: Int[Tensor, "..."], m: int) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."]]:
    """Returns the high and the low 32 bits of a·m, both in int64; a and m are below 2³². The int64
    product may overflow to a negative number, but its 64 bits are those of the true product."""
    product = a * m
    return (product >> 32) & MASK, product & MASK


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes ten rounds of Philox4x32 on a counter of four 32-bit words and a key of two 32-bit
    words; returns four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = multiply(c0, MULTIPLIERS[0])
        high1, low1 = multiply(c2, MULTIPLIERS[1])
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = (k0 + WEYL[0]) & MASK
        k1 = (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


# The functions draw_bits, draw_uniform and draw_normal define the draws. Each returns W = `words`
# numbers for each of the B samples, whose stream positions are in `position`.
def draw_bits(seed: int, purpose: int, position: Tensor, words: int) -> Int[Tensor, "B W"]:
    lanes = -(-words // 4)
    c0 = torch.arange(lanes, device=position.device).expand(len(position), lanes)
    c1 = torch.full_like(c0, purpose)
    c2 = (position & MASK).unsqueeze(1).expand_as(c0)
    c3 = ((position >> 32) & MASK).unsqueeze(1).expand_as(c0)
    key = (seed & MASK, (seed >> 32) & MASK)
    return torch.stack(philox((c0, c1, c2, c3), key), dim=-1).flatten(1)[:, :words]


def draw_uniform(seed: int, purpose: int, position: Tensor, words: int) -> Float[Tensor, "B W"]:
    return ((draw_bits(seed, purpose, position, words) >> 9).float() + 0.5) * 2.0**-23


def draw_normal(seed: int, purpose: int, position: Tensor, words: int) -> Float[Tensor, "B W"]:
    half = -(-words // 2)
    u = draw_uniform(seed, purpose, position, 2 * half)
    radius = torch.sqrt(-2.0 * torch.log(u[:, :half]))
    angle = 2.0 * math.pi * u[:, half:]
    return torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)), dim=1)[:, :words]


DEFINITIONS = {"bits": draw_bits, "uniform": draw_uniform, "normal": draw_normal}
HAS_TRITON = importlib.util.find_spec("triton") is not None


def draw(kind: str, seed: int, purpose: int, position: Tensor, words: int) -> Tensor:
    """Draws `words` independent numbers per sample, (B, W); `kind` is "bits", "uniform" or
    "normal".

    "bits" are uniform 32-bit integers, as int64 in [0, 2³²); "uniform" and "normal" are fp32, as
    `counter_uniform` and `counter_normal` describe them. The key of Philox is (low 32 bits of the
    seed, high 32 bits); the counter is (index of the number // 4, purpose, low 32 bits of the
    position, high 32 bits).
    """
    if position.is_cuda and HAS_TRITON:
        from accel.kernels.counter_noise.kernels_triton import launch

        with torch.cuda.device_of(position):
            return launch(kind, seed, purpose, position, words)
    return DEFINITIONS[kind](seed, purpose, position, words)


def counter_uniform(
    seed: int, purpose: int, position: Int[Tensor, "B"], words: int = 1
) -> Float[Tensor, "B W"]:
    """Draws `words` uniform fp32 numbers in (0, 1) per sample: odd multiples of 2⁻²⁴, so neither 0
    nor 1 occurs."""
    return draw("uniform", seed, purpose, position, words)


def counter_normal(
    seed: int, purpose: int, position: Int[Tensor, "B"], shape: Sequence[int] = ()
) -> Float[Tensor, "B ..."]:
    """Draws standard normal fp32 numbers of shape (B, *shape) by Box–Muller; no number exceeds 5.8
    in magnitude."""
    return draw("normal", seed, purpose, position, math.prod(shape)).reshape(len(position), *shape)
