"""Compares two sets of features in fp64: Fréchet and kernel distance, precision, recall, and the
share of copies.

Letters: N and M samples of the two sets, B samples of a batch, D features, S subsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from common.errors import UserError

KD_SUBSETS = 100
KD_SUBSET_SIZE = 1000
CHUNK_ELEMENTS = 2**24
"""Largest number of pairwise distances or kernel values in memory at a time: 128 MiB in fp64."""
FIRST_SAMPLES = 10_000
"""Number of samples, from the start of each set, that all figures except the Fréchet distance
use."""
NEIGHBOURS = 3
NEAREST_SHARE = 0.05
"""Quantile level of the test for copies. The threshold is this quantile of the distances from each
held-out image to its nearest training image; a generated sample is a likely copy if its nearest
training image is no farther away than the threshold."""
DISTANCE_ROUNDING = 1e-12
"""Allowance for rounding that is added to the squared threshold of the test for copies, as a
fraction of the mean squared length of the centred training features."""
EIGENVALUE_ROUNDING = 1e-9
"""Largest absolute value of a negative eigenvalue that the code treats as a rounded 0, as a
fraction of the largest eigenvalue; a covariance has no negative eigenvalues."""
COPIES_WARNING_FACTOR = 3.0
"""A warning reports copies only if their share exceeds this multiple of the expected share."""


class Moments:
    """Accumulates count, mean and covariance of batches of features, on the CPU in fp64.

    `add` merges batches by their means and the deviations from these (Chan, Golub & LeVeque 1983),
    so large means do not reduce the precision.
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self.mean: Float[Tensor, "D"] = torch.zeros(dim, dtype=torch.float64)
        self.scatter: Float[Tensor, "D D"] = torch.zeros(dim, dim, dtype=torch.float64)
        """Sum over all samples of the outer product of a sample's deviation from the mean with
        itself."""

    def add(self, features: Float[Tensor, "B D"]) -> None:
        """Adds a batch of any float type from any device.

        Raises UserError if the features have another width than `dim`, a NaN or an infinity.
        """
        if features.ndim != 2 or features.shape[1] != len(self.mean):
            raise UserError(
                f"features of shape {tuple(features.shape)} do not fit: rows of {len(self.mean)} "
                "are needed."
            )
        if not features.isfinite().all():
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
        between = torch.outer(step, step) * (self.count * len(batch) / count)
        self.scatter += deviations.T @ deviations + between
        self.mean += step * (len(batch) / count)
        self.count = count

    @property
    def covariance(self) -> Float[Tensor, "D D"]:
        """The covariance of all samples, with N - 1 in the denominator; there must be two samples
        or more."""
        return self.scatter / (self.count - 1)


def explain_too_few(count: int, dim: int) -> str | None:
    """Returns why `count` samples of `dim` features are too few for a Fréchet distance, or None if
    they suffice.

    With N <= 2·D the estimated covariance is (nearly) singular, and the distance is mostly bias.
    """
    if count > 2 * dim:
        return None
    return (
        f"fd of {dim} features needs more than {2 * dim} samples, there are {count}; draw more "
        "(count=...), or read kd, which has no such bias."
    )


def frechet_distance(a: Moments, b: Moments) -> float:
    """Returns the Fréchet distance of two Gaussians with the moments `a` and `b` (Heusel et al.
    2017, eq. 6). As usual it is the square of the distance, in squared units of the features.

    Both sets must be so large that `explain_too_few` returns None. Raises UserError if a
    covariance has an eigenvalue that is too negative to be a rounded 0.

    With the means mu and the covariances S the distance is |mu1 - mu2|² + tr S1 + tr S2 - 2
    tr((S1^½ S2 S1^½)^½). The matrix in the root is symmetric, so its eigenvalues are real.
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
    """Sets negative eigenvalues to 0 if rounding explains them: if they are at least
    -`EIGENVALUE_ROUNDING` times `largest`.

    Raises UserError if an eigenvalue is more negative than that, or NaN.
    """
    if not (eigenvalues >= -EIGENVALUE_ROUNDING * largest.abs()).all():
        raise UserError(
            f"a covariance has the eigenvalue {float(eigenvalues.min()):.3g} beside "
            f"{float(largest):.3g}, so it is no covariance; compute the features again."
        )
    return eigenvalues.clamp(min=0.0)


def kernel_distance(
    a: Float[Tensor, "N D"], b: Float[Tensor, "M D"], seed: int = 0
) -> tuple[float, float]:
    """Returns mean and standard deviation, over random subsets, of the kernel distance of Bińkowski
    et al. 2018 ("KID").

    The distance is the unbiased squared MMD with the kernel (x·y/D + 1)³, so it may be negative. It
    is computed on 100 pairs of random subsets of 1000 samples. Some tables multiply it by 1000;
    this function does not. If a set has fewer than 2000 samples, a subset has half as many samples
    as the smaller set: larger subsets share most of their samples, which makes the standard
    deviation meaningless. The mean is unbiased for any size of the sets.

    Both sets must have four samples or more.
    """
    fewest = min(len(a), len(b))
    assert fewest >= 4
    size = min(KD_SUBSET_SIZE, fewest // 2)
    generator = torch.Generator().manual_seed(seed)

    def draw_members(count: int) -> Float[Tensor, "S count"]:
        """Draws S random subsets of `size` samples each from a set of `count` samples. Returns one
        row per subset: 1 for each sample in the subset, 0 for all others."""
        rows = torch.zeros(KD_SUBSETS, count, dtype=torch.float64)
        for row in rows:
            row[torch.randperm(count, generator=generator)[:size]] = 1.0
        return rows

    kd = squared_mmd(a.double(), b.double(), draw_members(len(a)), draw_members(len(b)))
    return float(kd.mean()), float(kd.std(correction=0))


def squared_mmd(
    a: Float[Tensor, "N D"],
    b: Float[Tensor, "M D"],
    u: Float[Tensor, "S N"],
    v: Float[Tensor, "S M"],
) -> Float[Tensor, "S"]:
    """Returns an unbiased estimate of the squared maximum mean discrepancy for each of S pairs of
    subsets (Gretton et al. 2012, eq. 3).

    Row s of `u` is 1 for each sample of `a` in subset s, and 0 for all other samples of `a`; row s
    of `v` selects samples of `b` in the same way. Each kernel value is computed once for all S
    subsets, for a chunk of rows of `a` at a time.
    """

    def sum_kernel(x: Tensor, y: Tensor, x_members: Tensor, y_members: Tensor) -> Tensor:
        """Returns (S,): for each of S pairs of subsets, the sum of the kernel over all pairs of a
        sample of `x` that `x_members` selects and a sample of `y` that `y_members` selects."""
        total = x.new_zeros(())
        step = max(1, CHUNK_ELEMENTS // len(y))
        for rows, members in zip(x.split(step), x_members.split(step, dim=1), strict=True):
            kernel = (rows @ y.T / x.shape[1] + 1.0) ** 3
            total = total + ((members @ kernel) * y_members).sum(1)
        return total

    def average_within(x: Tensor, members: Tensor) -> Tensor:
        """Returns (S,): for each subset the average of the kernel over all pairs of two different
        samples of the subset."""
        count = members.sum(1)
        diagonal = members @ (x.square().mean(1) + 1.0) ** 3
        return (sum_kernel(x, x, members, members) - diagonal) / (count * (count - 1.0))

    between = 2.0 * sum_kernel(a, b, u, v) / (u.sum(1) * v.sum(1))
    return average_within(a, u) + average_within(b, v) - between


def compare_neighbours(
    real: Float[Tensor, "N D"], fake: Float[Tensor, "M D"], neighbours: int = NEIGHBOURS
) -> dict[str, float]:
    """Compares nearest distances within and between two sets of samples (Kynkäänniemi et al. 2019).
    Returns two shares in [0, 1], which grow with fewer samples, so compare equal counts:
    `precision`, the share of generated samples that lie in the ball around some real sample, whose
    radius is the distance to the third nearest real sample; and `recall`, the reverse.

    Both sets must have more than `neighbours` samples.
    """
    assert min(len(real), len(fake)) > neighbours
    centre = real.double().mean(0)
    real = real.double() - centre
    fake = fake.double() - centre

    among_real = find_nearest_others(real, neighbours)
    among_fake = find_nearest_others(fake, neighbours)
    # For each sample of one set, find whether it lies in the ball of any sample of the other set.
    to_real = [(d <= among_real[:, -1]).any(1) for d in squared_distances(fake, real)]
    to_fake = [(d <= among_fake[:, -1]).any(1) for d in squared_distances(real, fake)]
    return {
        "precision": compute_share(torch.cat(to_real)),
        "recall": compute_share(torch.cat(to_fake)),
    }


def find_copies(
    training: Float[Tensor, "N D"], held_out: Float[Tensor, "H D"], fake: Float[Tensor, "M D"]
) -> tuple[float, float]:
    """Returns the share of generated samples that are likely copies of training images, and the
    share to expect from a model that copies nothing: 0.05 by definition, more if there are fewer
    than 20 held-out images or if their distances have ties.

    After Meehan, Chaudhuri & Dasgupta 2020 (arXiv 2004.05675), who compare two kinds of distances
    to the nearest training image: those of generated samples and those of held-out images. Here
    the threshold is the 5th percentile of the held-out images' distances.
    """
    centre = training.double().mean(0)
    near, *others = (rows.double() - centre for rows in (training, held_out, fake))
    of_held_out, of_fake = (
        torch.cat([d.amin(1) for d in squared_distances(rows, near)]) for rows in others
    )
    slack = DISTANCE_ROUNDING * near.square().sum(1).mean()
    threshold = of_held_out.quantile(NEAREST_SHARE) + slack
    return compute_share(of_fake <= threshold), compute_share(of_held_out <= threshold)


def compute_share(flags: Tensor) -> float:
    """Returns the share of `flags` that are true, from 0 to 1."""
    return float(flags.double().mean())


def find_nearest_others(rows: Float[Tensor, "N D"], count: int) -> Float[Tensor, "N count"]:
    """Returns the squared distances from each row to the `count` nearest other rows, ascending."""
    # Drop the smallest of the `count` + 1 distances: the distance from the row to itself.
    nearest = [
        d.topk(count + 1, largest=False).values[:, 1:] for d in squared_distances(rows, rows)
    ]
    return torch.cat(nearest)


def squared_distances(
    rows: Float[Tensor, "N D"], columns: Float[Tensor, "M D"]
) -> Iterator[Float[Tensor, "n M"]]:
    """Yields the squared distances (n, M) from each chunk of n `rows` to all `columns`.

    |x|² + |y|² - 2x·y is precise enough, because callers pass rows in fp64 from which they
    subtracted a mean.
    """
    for chunk in rows.split(max(1, CHUNK_ELEMENTS // len(columns))):
        lengths = chunk.square().sum(1, keepdim=True) + columns.square().sum(1)
        yield torch.addmm(lengths, chunk, columns.T, alpha=-2.0)


class FeatureStats:
    """Accumulates the statistics of one set of features from which distances are computed: moments
    of the whole set and of its halves, and the features of the first samples.

    One half has the samples with an even index, the other half those with an odd index. The memory
    that this takes does not grow with the number of samples.
    """

    def __init__(self, dim: int) -> None:
        self.all = Moments(dim)
        self.halves = (Moments(dim), Moments(dim))
        self.first: list[Tensor] = []

    def add(self, features: Float[Tensor, "B D"]) -> None:
        """Adds the features of the next samples of the set."""
        start = self.all.count
        self.all.add(features)
        for parity, half in enumerate(self.halves):
            half.add(features[(parity - start) % 2 :: 2])
        if start < FIRST_SAMPLES:
            self.first.append(features[: FIRST_SAMPLES - start])

    @property
    def rows(self) -> Float[Tensor, "N D"]:
        """The features of the first `FIRST_SAMPLES` samples, or of all if the set has fewer."""
        return torch.cat(self.first)


StatsBySpace = dict[str, FeatureStats]
"""Name of a feature space -> the statistics of a set's features."""


def collect_stats(batches: Iterable[Mapping[str, Tensor]]) -> StatsBySpace:
    """Accumulates the statistics of all batches; a batch maps the name of a feature space to
    features. Returns a dict: name of a feature space -> statistics."""
    stats: StatsBySpace = {}
    for batch in batches:
        for name, features in batch.items():
            if name not in stats:
                stats[name] = FeatureStats(features.shape[1])
            stats[name].add(features)
    return stats


def compute_distances(fake: FeatureStats, real: FeatureStats) -> dict[str, Any]:
    """Returns the distances between two sets under the names `fd`, `kd` and `kd_std`. If there are
    too few samples for `fd`, its value is None, and the text `why` gives the reason."""
    kd, spread = kernel_distance(fake.rows, real.rows)
    why = explain_too_few(min(fake.all.count, real.all.count), len(real.all.mean))
    figures = {
        "fd": None if why else frechet_distance(fake.all, real.all),
        "kd": kd,
        "kd_std": spread,
    }
    return figures | ({"why": why} if why else {})


def compute_floor(real: FeatureStats) -> dict[str, Any]:
    """Returns the distances between the two halves of the reference under the names `floor_fd` and
    `floor_kd`. If there are too few samples for `floor_fd`, its value is None, and the text `why`
    gives the reason.

    The bias of the Fréchet distance of n samples falls like 1/n, and a half has only half of the
    reference's samples. So the `fd` of good generated samples against the whole reference may be
    below `floor_fd`.
    """
    reason = explain_too_few(min(half.count for half in real.halves), len(real.all.mean))
    kd, _ = kernel_distance(real.rows[::2], real.rows[1::2])
    figures = {"floor_fd": None if reason else frechet_distance(*real.halves), "floor_kd": kd}
    return figures | ({"why": f"the floor is of halves: {reason}"} if reason else {})


def compute_figures(
    fake: StatsBySpace, real: StatsBySpace, training: StatsBySpace, held_out: StatsBySpace
) -> dict[str, dict[str, Any]]:
    """Computes all figures of generated samples `fake` against a reference `real`, and `copied`
    against the images of `training`, by those of `held_out`; both may be empty. Returns a dict:
    feature space -> dict from the name of a figure to its value. The text `why`, if present,
    explains a figure that is missing, or warns of copies."""
    rows = {}
    for space in real:
        stats = fake[space]
        fakes = stats.rows
        row = compute_floor(real[space]) | compute_distances(stats, real[space])
        row |= compare_neighbours(real[space].rows, fakes) | {"copied": None}
        warning = "copied needs the run's training and held-out images"
        if space in held_out:
            originals = held_out[space].rows
            row["copied"], expected = find_copies(training[space].rows, originals, fakes)

            # Report copies only if their share exceeds both a multiple of the expected share, and
            # the expected share by more than five standard errors, which chance rarely explains.
            variance = expected * (1 - expected)
            error = math.sqrt(variance * (1 / len(fakes) + 1 / len(originals)))
            warning = ""
            if row["copied"] > max(COPIES_WARNING_FACTOR * expected, expected + 5 * error):
                warning = (
                    f"copied={row['copied']:.2g}, and {expected:.2g} is expected: the model may "
                    "repeat images of the training set"
                )
        if warning:
            row["why"] = f"{row['why']}; {warning}" if "why" in row else warning
        rows[space] = row
    return rows
