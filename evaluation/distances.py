"""Distances between two sets of features: Fréchet, kernel, precision, recall and copies, in fp64.

Letters: N M samples of the two sets, B of a batch, D features, S subsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from common.errors import UserError

KD_SUBSETS = 100
KD_SUBSET_SIZE = 1000
CHUNK_ELEMENTS = 2**24
"""Distances held at once: 128 MiB in fp64."""
FIRST_SAMPLES = 10_000
"""So many first samples of each set enter all figures but the Fréchet distance."""
NEIGHBOURS = 3
NEAREST_SHARE = 0.05
"""The share of a set whose nearest distances count as those of copies."""
DISTANCE_ROUNDING = 1e-12
"""The error of a squared distance, relative to the squared length of features."""
EIGENVALUE_ROUNDING = 1e-9
"""Rounding makes eigenvalues down to minus this, relative to the largest one."""
COPIES_WARNING_FACTOR = 3.0
"""A share of copies is worth a sentence above this multiple of what is expected."""


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
        """Adds a batch of any float type from any device.

        ValueError for another width, or a NaN or infinity.
        """
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise UserError(
                f"features of shape {tuple(features.shape)} do not fit: rows of {len(self.mean)} "
                "are needed."
            )
        if not bool(features.isfinite().all()):
            raise UserError(
                "features have a NaN or infinity; look at the images that they were made of."
            )
        if not len(features):
            return
        batch = features.cpu().double()
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
        """The covariance with N - 1 in the denominator, of two samples or more."""
        return self.scatter / (self.count - 1)


def explain_too_few(count: int, dim: int) -> str | None:
    """Says why `count` samples of `dim` features give no useful Fréchet distance; None if they do.

    With N <= 2·D the estimated covariance is (nearly) singular, and the distance is mostly bias.
    """
    if count > 2 * dim:
        return None
    return (
        f"fd of {dim} features needs more than {2 * dim} samples, there are {count}; draw more "
        "(count=...), or read kd, which has no such bias."
    )


def frechet_distance(a: Moments, b: Moments) -> float:
    """Fréchet distance of the Gaussians with the moments `a` and `b` (Heusel et al. 2017, eq. 6),
    squared as usual, in squared units of the features.

    |mu1 - mu2|² + tr S1 + tr S2 - 2 tr((S1^½ S2 S1^½)^½): the symmetric form, whose eigenvalues are
    real. Neither has `explain_too_few` samples. ValueError where a covariance has a clearly negative
    eigenvalue.
    """
    assert explain_too_few(min(a.count, b.count), len(a.mean)) is None
    first = a.covariance
    second = b.covariance
    values, vectors = torch.linalg.eigh(first)
    root = (vectors * clamp_eigenvalues(values, values[-1]).sqrt()) @ vectors.T
    product = root @ second @ root
    overlaps = torch.linalg.eigvalsh((product + product.T) / 2)
    overlap = clamp_eigenvalues(overlaps, values[-1] * second.trace()).sqrt().sum()
    return float((a.mean - b.mean).square().sum() + first.trace() + second.trace() - 2 * overlap)


def clamp_eigenvalues(eigenvalues: Float[Tensor, "D"], largest: Tensor) -> Float[Tensor, "D"]:
    """Sets negative eigenvalues to 0 that are as small as rounding makes them beside `largest`.

    ValueError for other negative ones and for NaN.
    """
    if not bool((eigenvalues >= -EIGENVALUE_ROUNDING * largest.abs()).all()):
        raise UserError(
            f"a covariance has the eigenvalue {float(eigenvalues.min()):.3g} beside "
            f"{float(largest):.3g}, so it is none; compute the features again."
        )
    return eigenvalues.clamp(min=0.0)


def kernel_distance(
    a: Float[Tensor, "N D"], b: Float[Tensor, "M D"], seed: int = 0
) -> tuple[float, float]:
    """Mean and standard deviation of the kernel distance of Bińkowski et al. 2018 ("KID").

    It is the unbiased squared MMD with the kernel (x·y/D + 1)³ over 100 random subsets of 1000, so
    it may be below 0. Some tables multiply it by 1000; this does not. With fewer than 2000 samples
    the subsets are half of the smaller set: larger ones would nearly coincide, and their spread
    would say nothing. The mean is unbiased at any size.

    Both sets have four samples or more.
    """
    fewest = min(len(a), len(b))
    assert fewest >= 4
    size = min(KD_SUBSET_SIZE, fewest // 2)
    generator = torch.Generator().manual_seed(seed)

    def members(count: int) -> Float[Tensor, "S count"]:
        """A row for each subset: 1 for its samples, 0 for the others."""
        rows = torch.zeros(KD_SUBSETS, count, dtype=torch.float64)
        for row in rows:
            row[torch.randperm(count, generator=generator)[:size]] = 1.0
        return rows

    kd = squared_mmd(a.double(), b.double(), members(len(a)), members(len(b)))
    return float(kd.mean()), float(kd.std(correction=0))


def squared_mmd(
    a: Float[Tensor, "N D"],
    b: Float[Tensor, "M D"],
    u: Float[Tensor, "S N"],
    v: Float[Tensor, "S M"],
) -> Float[Tensor, "S"]:
    """Estimates the squared maximum mean discrepancy of S pairs of subsets without bias.

    It is eq. 3 of Gretton et al. 2012. A row of `u` and of `v` is 1 for the samples of a subset and
    0 for the others. Each kernel value is computed once, a chunk of rows at a time, whatever S is.
    """

    def summed(x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor) -> Tensor:
        """The sum of the kernel over all pairs of a subset of `x` and one of `y`."""
        total = x.new_zeros(())
        step = max(1, CHUNK_ELEMENTS // len(y))
        for rows, members in zip(x.split(step), of_x.split(step, dim=1), strict=True):
            kernel = (rows @ y.T / x.shape[1] + 1.0) ** 3
            total = total + ((members @ kernel) * of_y).sum(1)
        return total

    def within(x: Tensor, of_x: Tensor) -> Tensor:
        """The mean of the kernel over all pairs of two different samples of a subset."""
        count = of_x.sum(1)
        own = of_x @ (x.square().mean(1) + 1.0) ** 3
        return (summed(x, x, of_x, of_x) - own) / (count * (count - 1.0))

    return within(a, u) + within(b, v) - 2.0 * summed(a, b, u, v) / (u.sum(1) * v.sum(1))


class Nearness(NamedTuple):
    """Four shares in [0, 1] that follow from the distances between two sets of samples."""

    precision: float
    """Of the fakes, those no farther from some real one than its third nearest real neighbour."""
    recall: float
    """The same with the sets exchanged."""
    copied: float
    """Of the fakes, those nearer to a real one than 95 % of the real ones are to another one."""
    expected: float
    """What `copied` comes to without copies: 0.05, or more where real ones coincide."""


def compare_neighbours(
    real: Float[Tensor, "N D"], fake: Float[Tensor, "M D"], neighbours: int = NEIGHBOURS
) -> Nearness:
    """Compares nearest distances within and between two sets of samples.

    Precision and recall are those of Kynkäänniemi et al. 2019; both grow with fewer samples, so
    compare equal counts. Meehan, Chaudhuri & Dasgupta 2020 (arXiv 2004.05675) test for copies by
    the distances to the training set of samples and of images left out of it; here each real image
    is left out once, and the tails of the distances are compared.

    Both sets have more than `neighbours` samples.
    """
    assert min(len(real), len(fake)) > neighbours
    centre = real.double().mean(0)
    real = real.double() - centre
    fake = fake.double() - centre

    among_real = find_nearest_others(real, neighbours)
    among_fake = find_nearest_others(fake, neighbours)
    near = (
        among_real[:, 0].quantile(NEAREST_SHARE) + DISTANCE_ROUNDING * real.square().sum(1).mean()
    )

    # whether each fake lies in the ball of a real one, and how far the nearest real one is
    to_real = [((d <= among_real[:, -1]).any(1), d.amin(1)) for d in squared_distances(fake, real)]
    to_fake = [(d <= among_fake[:, -1]).any(1) for d in squared_distances(real, fake)]
    inside, closest = (torch.cat(parts) for parts in zip(*to_real, strict=True))
    return Nearness(
        precision=compute_share(inside),
        recall=compute_share(torch.cat(to_fake)),
        copied=compute_share(closest <= near),
        expected=compute_share(among_real[:, 0] <= near),
    )


def compute_share(flags: Tensor) -> float:
    """The share of flags that are true."""
    return float(flags.double().mean())


def find_nearest_others(rows: Float[Tensor, "N D"], count: int) -> Float[Tensor, "N count"]:
    """Squared distances of each row to its `count` nearest others, ascending."""
    found = [
        d.topk(count + 1, largest=False).values[:, 1:]  # the nearest of all is the row itself
        for d in squared_distances(rows, rows)
    ]
    return torch.cat(found)


def squared_distances(
    rows: Float[Tensor, "N D"], columns: Float[Tensor, "M D"]
) -> Iterator[Float[Tensor, "n M"]]:
    """Yields squared distances in chunks of rows.

    In fp64 and about the mean, |x|² + |y|² - 2x·y keeps enough digits.
    """
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // len(columns))):
        lengths = chunk.square().sum(1, keepdim=True) + columns.square().sum(1)
        yield torch.addmm(lengths, chunk, columns.T, alpha=-2.0)


class FeatureStats:
    """What distances need of one set: moments of all and of both halves, and the first features.

    The halves are the samples of even and of odd number. Memory does not grow with the number of
    samples.
    """

    def __init__(self, dim: int) -> None:
        self.all = Moments(dim)
        self.halves = (Moments(dim), Moments(dim))
        self.first: list[Tensor] = []

    def add(self, features: Float[Tensor, "B D"]) -> None:
        """Appends samples."""
        start = self.all.count
        self.all.add(features)
        for half in (0, 1):
            self.halves[half].add(features[(half - start) % 2 :: 2])
        if start < FIRST_SAMPLES:
            self.first.append(features[: FIRST_SAMPLES - start])

    @property
    def rows(self) -> Float[Tensor, "N D"]:
        """The features of the first `ROWS` samples."""
        return torch.cat(self.first)


def collect_stats(batches: Iterable[Mapping[str, Tensor]]) -> dict[str, FeatureStats]:
    """Sums up features of samples, by space, that arrive in batches."""
    stats: dict[str, FeatureStats] = {}
    for batch in batches:
        for name, features in batch.items():
            if name not in stats:
                stats[name] = FeatureStats(features.shape[1])
            stats[name].add(features)
    return stats


def compute_distances(fake: FeatureStats, real: FeatureStats) -> dict[str, Any]:
    """`fd`, `kd` and `kd_std` between two sets.

    `fd` is None where samples are too few, and `why` says so.
    """
    kd, spread = kernel_distance(fake.rows, real.rows)
    why = explain_too_few(min(fake.all.count, real.all.count), len(real.all.mean))
    found = {
        "fd": None if why else frechet_distance(fake.all, real.all),
        "kd": kd,
        "kd_std": spread,
    }
    return found | ({"why": why} if why else {})


def compute_floor(real: FeatureStats) -> dict[str, Any]:
    """The distances between the halves of the reference, `floor_fd` and `floor_kd`.

    Both halves are smaller than the reference, and the bias of a Fréchet distance falls like 1/n,
    so as many samples as the reference has may come out below `floor_fd`.
    """
    few = explain_too_few(min(half.count for half in real.halves), len(real.all.mean))
    kd, _ = kernel_distance(real.rows[::2], real.rows[1::2])
    found = {"floor_fd": None if few else frechet_distance(*real.halves), "floor_kd": kd}
    return found | ({"why": f"the floor is of halves: {few}"} if few else {})


def compute_figures(
    fake: Mapping[str, FeatureStats], real: Mapping[str, FeatureStats]
) -> dict[str, dict[str, Any]]:
    """All figures of each feature space; `why` tells of those that are left out, and of copies."""
    found = {}
    for space in real:
        stats = fake[space]
        fakes = stats.rows
        reals = real[space].rows
        row = (
            compute_floor(real[space])
            | compute_distances(stats, real[space])
            | compare_neighbours(reals, fakes)._asdict()
        )
        expected = row.pop("expected")

        # a share of copies far above the expected one, and above chance
        variance = expected * (1 - expected)
        error = math.sqrt(variance * (1 / len(fakes) + 1 / len(reals)))
        if row["copied"] > max(COPIES_WARNING_FACTOR * expected, expected + 5 * error):
            many = (
                f"copied={row['copied']:.2g}, and {expected:.2g} is expected: the model may repeat "
                "images of the reference"
            )
            row["why"] = f"{row['why']}; {many}" if "why" in row else many
        found[space] = row
    return found
