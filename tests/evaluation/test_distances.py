"""Distances between sets of images agree with the published formulas."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from evaluation import distances
from evaluation.distances import (
    Moments,
    collect_stats,
    compare_neighbours,
    compute_figures,
    explain_too_few,
    find_copies,
    frechet_distance,
    kernel_distance,
    squared_mmd,
)
from tests.harness.refusals import expect_refusal


def draw_features(count, dim=12, mean=1000.0, seed=0):
    """Draws features in fp64 whose covariance differs from seed to seed."""
    draw = torch.Generator().manual_seed(seed)
    noise = torch.randn(dim + count, dim, generator=draw, dtype=torch.float64)
    mixing = torch.eye(dim, dtype=torch.float64) + 0.3 * noise[:dim]
    return mean + 0.1 * seed + noise[dim:] @ mixing


def collect(*pieces):
    moments = Moments(pieces[0].shape[1])
    for piece in pieces:
        moments.add(piece)
    return moments


def estimate(features):
    return features.numpy().mean(0), np.cov(features.numpy(), rowvar=False)


A = draw_features(700)
B = draw_features(900, seed=1)


def test_frechet_is_the_published_formula_where_the_mean_is_large():
    (mean, covariance), (other_mean, other) = map(estimate, (A, B))
    overlap = sqrtm(covariance @ other).real
    right = ((mean - other_mean) ** 2).sum() + np.trace(covariance + other - 2 * overlap)
    assert frechet_distance(collect(A), collect(B)) == pytest.approx(right, rel=1e-6)


def test_frechet_is_that_of_torch_fidelity(fidelity):
    from torch_fidelity.metric_fid import fid_statistics_to_metric

    statistics = [dict(zip(("mu", "sigma"), estimate(x), strict=True)) for x in (A, B)]
    right = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert frechet_distance(collect(A), collect(B)) == pytest.approx(right, rel=1e-6)


def make_gaussian(mean, variances):
    moments = Moments(len(mean))
    moments.count = 1001
    moments.mean = torch.tensor(mean, dtype=torch.float64)
    moments.scatter = 1000 * torch.tensor(variances, dtype=torch.float64).diag()
    return moments


def test_frechet_of_known_gaussians():
    a = make_gaussian([0.0, 3.0, 1.0], [4.0, 0.0, 1.0])
    b = make_gaussian([1.0, 1.0, 1.0], [9.0, 4.0, 0.0])
    means = 1 + 4
    stds = (2 - 3) ** 2 + (0 - 2) ** 2 + (1 - 0) ** 2
    assert frechet_distance(a, b) == pytest.approx(means + stds, abs=1e-12)
    assert frechet_distance(a, a) == pytest.approx(0.0, abs=1e-7)
    good = make_gaussian([0.0, 0.0], [1.0, 1.0])
    broken = make_gaussian([0.0, 0.0], [1.0, -1e-3])
    with expect_refusal("eigenvalue"):
        frechet_distance(good, broken)


def test_moments_do_not_depend_on_the_pieces():
    features = draw_features(500)
    mean, covariance = map(torch.from_numpy, estimate(features))
    for rows in (features, features.flip(0)):
        moments = collect(*rows.split([1, 2, 300, 0, 97, 100]))
        assert moments.count == 500
        torch.testing.assert_close(moments.mean, mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(moments.covariance, covariance, rtol=1e-11, atol=1e-12)


def test_frechet_refuses_what_says_nothing():
    assert explain_too_few(513, 256) is None
    sentence = explain_too_few(512, 256)
    assert "fd of 256 features needs more than 512 samples, there are 512; draw more" in sentence
    with expect_refusal(r"shape \(25, 4\)"):
        collect(A, draw_features(25, dim=4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad):
    features = draw_features(30)
    features[3, 4] = bad
    with expect_refusal("NaN or infinity"):
        collect(features)


# Kernel distance


def mmd(x, y):
    """The squared MMD of all samples, as one subset."""
    members = [torch.ones(1, len(rows), dtype=torch.float64) for rows in (x, y)]
    return float(squared_mmd(x.double(), y.double(), *members))


def test_squared_mmd_by_hand():
    """One feature: k(0, 1) = k(0, 2) = 1; the kernels between the sets are 1, 1, 1 and (1·2 + 1)³ =
    27."""
    x = torch.tensor([[0.0], [1.0]])
    y = torch.tensor([[0.0], [2.0]])
    assert mmd(x, y) == 1 + 1 - 2 * 30 / 4


def test_kernel_distance_is_that_of_torch_fidelity(fidelity):
    from torch_fidelity.metric_kid import kernel_mmd

    a = draw_features(100, mean=0.0)
    b = draw_features(100, mean=0.0, seed=1)
    assert mmd(a, b) == pytest.approx(kernel_mmd(a.numpy(), b.numpy()), rel=1e-9)


def test_kernel_distance_is_unbiased_and_depends_on_its_seed():
    draw = torch.Generator().manual_seed(0)

    def normal(count):
        return torch.randn(count, 8, generator=draw)

    equal = torch.tensor([kernel_distance(normal(60), normal(50), seed=i)[0] for i in range(30)])
    assert abs(equal.mean()) < 3 * equal.std() / 30**0.5
    assert equal.min() < 0 < equal.max()
    a, b = (normal(200), normal(200))
    first, again, other = (kernel_distance(a, b, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(("counts", "size"), [((2000, 1500), 750), ((2000, 2500), 1000)])
def test_subsets_are_never_the_whole_set(counts, size, monkeypatch):
    def check_members(a, b, *members):
        for rows in members:
            assert set(rows.unique().tolist()) == {0.0, 1.0}
            assert rows.sum(1).tolist() == [size] * 100
        assert len(members[0].unique(dim=0)) > 1
        return torch.ones(100)

    monkeypatch.setattr(distances, "squared_mmd", check_members)
    a, b = (torch.arange(count).float()[:, None] for count in counts)
    assert kernel_distance(a, b)[0] == 1.0


def test_subsets_have_the_distances_that_they_have_alone(monkeypatch):
    monkeypatch.setattr(distances, "CHUNK_ELEMENTS", 70)  # a row or two at a time
    a = torch.randn(20, 3).double()
    b = torch.randn(30, 3).double()
    u, v = (torch.rand(5, n).argsort(1).argsort(1).lt(9).double() for n in (20, 30))
    alone = [mmd(a[rows.bool()], b[columns.bool()]) for rows, columns in zip(u, v, strict=True)]
    assert squared_mmd(a, b, u, v).tolist() == pytest.approx(alone, rel=1e-9)


# Precision and recall


@pytest.mark.parametrize("elements", [distances.CHUNK_ELEMENTS, 5])  # 5: a row at a time
def test_precision_and_recall_by_hand(elements, monkeypatch):
    """One neighbour: the balls of the real ones reach 1, 1, 1 and 8, those of the fakes 3, 3, 1 and
    1."""
    monkeypatch.setattr(distances, "CHUNK_ELEMENTS", elements)
    real = torch.tensor([[0.0], [1.0], [2.0], [10.0]]).double()
    fake = torch.tensor([[0.5], [3.5], [19.0], [20.0]]).double()
    for offset in (0.0, 1e6):
        shares = compare_neighbours(real + offset, fake + offset, neighbours=1)
        assert shares == {"precision": 0.5, "recall": 0.75}


def test_copies_by_hand(monkeypatch):
    """Held-out images lie 1 to 20 from their nearest training image; the threshold is at 1.95."""
    monkeypatch.setattr(distances, "CHUNK_ELEMENTS", 5)
    training = torch.tensor([[0.0], [1000.0]])
    held_out = torch.arange(1.0, 21.0)[:, None]
    fake = torch.tensor([[-1.9], [2.1], [999.0], [500.0]])
    assert find_copies(training + 1e6, held_out + 1e6, fake + 1e6) == (0.5, 0.05)


@pytest.mark.parametrize("bursts", [1, 4])
def test_a_memorised_set_is_flagged_and_one_of_near_duplicates_is_not(bursts):
    """Training, held-out and fresh images are shots of the same 500 objects, near duplicates; the
    training set has `bursts` shots of each. A copy is nearer to an image than shots of one object
    are to each other."""
    shots = draw_features(500, 8) + 0.1 * torch.randn(6, 500, 8)
    *training, held_out, fresh = shots[4 - bursts :]
    copies = training[0] + 0.02 * torch.randn(500, 8)
    shares = []
    for fake, warned in ((fresh, False), (copies, True)):
        sets = [fake, torch.cat(training), torch.cat(training), held_out]
        figures = compute_figures(*(collect_stats([{"space": rows}]) for rows in sets))["space"]
        shares.append(figures["copied"])
        assert ("and 0.05 is expected" in figures.get("why", "")) == warned
    assert shares == pytest.approx([0.05, 1.0], abs=0.04)


def test_without_held_out_images_copies_are_not_judged():
    stats = collect_stats([{"space": A}])
    (figures,) = compute_figures(stats, stats, {}, {}).values()
    assert figures["copied"] is None
    assert "held-out" in figures["why"]
