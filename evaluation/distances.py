"""Distances between two sets of features: Fréchet, kernel, precision and recall. All of them
compute in fp64.

Letters: N M samples of the two sets, B of a batch, D features.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from common.errors import UserError

SUBSETS = 100
SUBSET_SIZE = 1000
CHUNK_ELEMENTS = 2**24
"""Distances held at once: 128 MiB in fp64."""
NEAREST = 0.05
"""The share of a set whose nearest distances count as those of copies."""
ROUNDING = 1e-12
"""The error of a squared distance, relative to the squared length of features."""
NEGATIVE = 1e-9
"""An eigenvalue below minus this, relative to the largest, is none that rounding made."""


class Moments:
    """Count, mean and covariance of features that arrive in batches, on the CPU in fp64.

    Batches are merged by deviations from their means (Chan, Golub & LeVeque 1983), so a large mean
    costs no digits.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self.mean: Float[Tensor, "D"] = torch.zeros(dim, dtype=torch.float64)
        self.scatter: Float[Tensor, "D D"] = torch.zeros(dim, dim, dtype=torch.float64)
        """Sum of the outer products of deviations from the mean."""

    def add(self, features: Float[Tensor, "B D"]) -> None:
        """Takes in a batch of any float type on any device; ValueError for another width, or a NaN
        or infinity."""
        if not len(features):
            return
        batch = checked(features, len(self.mean)).cpu().double()
        count = self.count + len(batch)
        mean = batch.mean(0)
        deviations = batch - mean
        step = mean - self.mean
        self.scatter += deviations.T @ deviations + torch.outer(step, step) * (
            self.count * len(batch) / count
        )
        self.mean = self.mean + step * (len(batch) / count)
        self.count = count

    @property
    def covariance(self) -> Float[Tensor, "D D"]:
        """With N - 1 in the denominator; ValueError for fewer than two samples."""
        if self.count < 2:
            raise UserError(f"a covariance needs two samples or more, there are {self.count}.")
        return self.scatter / (self.count - 1)


def too_few(count: int, dim: int) -> str | None:
    """Why `count` samples of `dim` features give no Fréchet distance worth reading, in one
    sentence; None if they do.

    With N <= 2·D the estimated covariance is (nearly) singular, and the distance is mostly bias.
    """
    if count > 2 * dim:
        return None
    return (
        f"fd of {dim} features needs more than {2 * dim} samples, there are {count}; draw more "
        "(count=...), or read kd, which has no such bias."
    )


def frechet(a: Moments, b: Moments) -> float:
    """Fréchet distance of the Gaussians with the moments `a` and `b` (Heusel et al. 2017, eq. 6),
    squared as usual.

    |mu1 - mu2|² + tr S1 + tr S2 - 2 tr((S1^½ S2 S1^½)^½): the symmetric form, whose eigenvalues are
    real. In squared units of the features. ValueError where `too_few` says so of either, where the
    widths differ, and where a covariance has a clearly negative eigenvalue.
    """
    if len(a.mean) != len(b.mean):
        raise UserError(f"fd compares equal features, not {len(a.mean)} with {len(b.mean)}.")
    if sentence := too_few(min(a.count, b.count), len(a.mean)):
        raise UserError(sentence)
    first = a.covariance
    second = b.covariance
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * clamped(values, values[-1]).sqrt()) @ vectors.T
    product = root @ second @ root
    overlaps = torch.linalg.eigvalsh((product + product.T) / 2)
    overlap = clamped(overlaps, values[-1] * second.trace()).sqrt().sum()
    return float((a.mean - b.mean).square().sum() + first.trace() + second.trace() - 2 * overlap)


def clamped(eigenvalues: Float[Tensor, "D"], largest: Tensor) -> Float[Tensor, "D"]:
    """Negative eigenvalues as small as rounding makes beside `largest` become 0; ValueError for
    others and for NaN."""
    if not bool((eigenvalues >= -NEGATIVE * largest.abs()).all()):
        raise UserError(
            f"a covariance has the eigenvalue {float(eigenvalues.min()):.3g} beside "
            f"{float(largest):.3g}, so it is none; compute the features again."
        )
    return eigenvalues.clamp(min=0.0)


def kernel_distance(
    a: Float[Tensor, "N D"], b: Float[Tensor, "M D"], seed: int = 0
) -> tuple[float, float]:
    """Kernel distance of Bińkowski et al. 2018 ("KID" with Inception features): mean and standard
    deviation.

    The unbiased squared MMD with the kernel (x·y/D + 1)³, over 100 random subsets of 1000, so it
    may be below 0. Not multiplied by 1000, as some tables have it. With fewer than 2000 samples the
    subsets are half of the smaller set:
    larger ones would nearly coincide, and their spread would say nothing. The mean is unbiased at
    any size.

    ValueError for fewer than four samples, another width, or a NaN or infinity.
    """
    fewest = min(len(a), len(b))
    if fewest < 4:
        raise UserError(
            f"kd needs four samples or more, there are {fewest}; draw more (count=...)."
        )
    a, b = checked(a).double(), checked(b, a.shape[1]).double()
    size = min(SUBSET_SIZE, fewest // 2)
    generator = torch.Generator().manual_seed(seed)

    def members(count: int) -> Tensor:
        """A row a subset: 1 for its samples, 0 for the others."""
        chosen = torch.stack(
            [torch.randperm(count, generator=generator)[:size] for _ in range(SUBSETS)]
        )
        return (
            torch.zeros(SUBSETS, count, dtype=torch.float64).scatter_(1, chosen, 1.0).to(a.device)
        )

    found = squared_mmd(a, b, members(len(a)), members(len(b)))
    return float(found.mean()), float(found.std(correction=0))


def squared_mmd(
    a: Float[Tensor, "N D"],
    b: Float[Tensor, "M D"],
    u: Float[Tensor, "S N"],
    v: Float[Tensor, "S M"],
) -> Float[Tensor, "S"]:
    """Unbiased estimates of the squared maximum mean discrepancy (Gretton et al. 2012, eq. 3) of S
    pairs of subsets.

    A row of `u` and of `v` is 1 for the samples of a subset and 0 for the others. Each kernel value
    is computed once, a chunk of rows at a time, whatever S.
    """

    def summed(x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor) -> Tensor:
        chunks = torch.arange(len(x), device=x.device).split(max(1, CHUNK_ELEMENTS // len(y)))
        return sum(
            (
                ((of_x[:, rows] @ (x[rows] @ y.T / x.shape[1] + 1.0) ** 3) * of_y).sum(1)
                for rows in chunks
            ),
            torch.zeros((), dtype=x.dtype, device=x.device),
        )

    def within(x: Tensor, of_x: Tensor) -> Tensor:
        own = of_x @ (x.square().mean(1) + 1.0) ** 3
        return (summed(x, x, of_x, of_x) - own) / (of_x.sum(1) * (of_x.sum(1) - 1.0))

    return within(a, u) + within(b, v) - 2.0 * summed(a, b, u, v) / (u.sum(1) * v.sum(1))


def precision_recall(
    real: Float[Tensor, "N D"], fake: Float[Tensor, "M D"], neighbours: int = 3
) -> tuple[float, float]:
    """Improved precision and recall of Kynkäänniemi et al. 2019, both in [0, 1].

    Precision: the share of `fake` no farther from some real sample than that one's `neighbours`-th
    nearest real neighbour. Recall: the same with the sets exchanged. Both grow with fewer samples,
    so compare equal counts.

    ValueError where a set has no more than `neighbours` samples, for another width, or a NaN or
    infinity.
    """
    fewest = min(len(real), len(fake))
    if fewest <= neighbours:
        raise UserError(
            f"precision and recall need more than {neighbours} samples, there are {fewest}."
        )
    real, fake = checked(real).double(), checked(fake, real.shape[1]).double()
    centre = real.mean(0)
    real = real - centre
    fake = fake - centre
    return covered(fake, real, neighbours), covered(real, fake, neighbours)


def copied(real: Float[Tensor, "N D"], fake: Float[Tensor, "M D"]) -> tuple[float, float]:
    """Share of `fake` that lie nearer to a sample of `real` than 95 % of `real` lie to another one,
    and the share of `real` that lie so near, which is what samples that copy nothing come to: 0.05,
    or more where `real` has ties.

    The test of Meehan, Chaudhuri & Dasgupta 2020 (arXiv 2004.05675) compares nearest distances to
    the training set of samples and of images left out of it; here each image of `real` is left out
    once, and the tail is compared.

    ValueError for fewer than two samples of `real`, another width, or a NaN or infinity.
    """
    if len(real) < 2 or not len(fake):
        raise UserError(
            f"copies need two samples of the reference and one other, not {len(real)} and "
            f"{len(fake)}."
        )
    real, fake = checked(real).double(), checked(fake, real.shape[1]).double()
    centre = real.mean(0)
    real = real - centre
    fake = fake - centre
    # the nearest is itself
    own = torch.cat([d.kthvalue(2).values for d in squared_distances(real, real)])
    near = own.quantile(NEAREST) + ROUNDING * real.square().sum(1).mean()
    found = torch.cat([d.amin(1) for d in squared_distances(fake, real)])
    return float((found <= near).double().mean()), float((own <= near).double().mean())


def covered(points: Float[Tensor, "N D"], by: Float[Tensor, "M D"], neighbours: int) -> float:
    """Share of `points` inside a ball around one of `by` that reaches to its nearest `neighbours`
    of `by`."""
    # the nearest is itself
    balls = torch.cat([d.kthvalue(neighbours + 1).values for d in squared_distances(by, by)])
    return float(
        torch.cat([(d <= balls).any(1) for d in squared_distances(points, by)]).double().mean()
    )


def squared_distances(
    rows: Float[Tensor, "N D"], columns: Float[Tensor, "M D"]
) -> Iterator[Float[Tensor, "n M"]]:
    """Squared distances in chunks of rows. In fp64 and about the mean, |x|² + |y|² - 2x·y keeps
    enough digits."""
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // len(columns))):
        lengths = chunk.square().sum(1, keepdim=True) + columns.square().sum(1)
        yield torch.addmm(lengths, chunk, columns.T, alpha=-2.0)


def checked(features: Tensor, dim: int | None = None) -> Tensor:
    """`features` if they are finite rows, of `dim` values where it is given; a ValueError
    otherwise."""
    if features.ndim != 2 or dim not in (None, features.shape[1]):
        raise UserError(
            f"features of shape {tuple(features.shape)} do not fit: rows of {dim or 'values'} are "
            "needed."
        )
    if not bool(features.isfinite().all()):
        raise UserError(
            "features have a NaN or infinity; look at the images that they were made of."
        )
    return features
