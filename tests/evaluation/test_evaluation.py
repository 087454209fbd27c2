"""Distances between sets of images agree with the published formulas, and every feature space is
what it says."""

from __future__ import annotations

import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from common.files import hash_file
from evaluation import distances, features
from evaluation.distances import (
    Moments,
    compare_neighbours,
    explain_too_few,
    frechet_distance,
    kernel_distance,
    squared_mmd,
)
from evaluation.features import (
    Dinov2Features,
    EncoderFeatures,
    Features,
    InceptionFeatures,
    RandomFeatures,
    build_features,
)
from models.autoencoders import Autoencoder, DiffusersAutoencoder, PixelAutoencoder
from tests.harness.sets import save_tiny_autoencoder
from training.config import build
from training.config.schema import FdConfig

GREY = torch.zeros(1, 1, 8, 8)


def built(*names: str) -> dict[str, Features]:
    """Feature spaces by name, for grey images whose pixels are their latents."""
    return build_features(FdConfig(features=[*names]), PixelAutoencoder(), GREY)


def correlated(count: int, dim: int = 12, mean: float = 1000.0, seed: int = 0) -> Tensor:
    """Features in fp64 with another covariance for each seed."""
    draw = torch.Generator().manual_seed(seed)
    mixing = torch.eye(dim, dtype=torch.float64) + 0.3 * torch.randn(
        dim, dim, generator=draw, dtype=torch.float64
    )
    return mean + 0.1 * seed + torch.randn(count, dim, generator=draw, dtype=torch.float64) @ mixing


def moments(*pieces: Tensor) -> Moments:
    found = Moments(pieces[0].shape[1])
    for piece in pieces:
        found.add(piece)
    return found


def published(
    mean_a: np.ndarray, cov_a: np.ndarray, mean_b: np.ndarray, cov_b: np.ndarray
) -> float:
    """The other form of the trace: square roots of the eigenvalues of S1 S2."""
    overlap = np.sqrt(np.linalg.eigvals(cov_a @ cov_b).astype(complex)).real.sum()
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * overlap)


def of_numpy(features: Tensor) -> tuple[np.ndarray, np.ndarray]:
    return features.numpy().mean(0), np.cov(features.numpy(), rowvar=False)


def forget_torch_fidelity() -> None:
    for name in [name for name in sys.modules if name.startswith("torch_fidelity")]:
        del sys.modules[name]


@pytest.fixture
def fidelity(monkeypatch):
    """torch-fidelity imported; what is used of it here needs no torchvision, so an empty one stands
    in for none."""
    if find_spec("torch_fidelity") is None:
        pytest.skip("torch-fidelity is not installed (pip install 'fastlatent[evaluation]')")
    try:
        import torchvision  # noqa: F401
    except Exception:
        empty = types.ModuleType("torchvision")
        empty.__dict__.update(
            transforms=empty, functional=empty, __getattr__=lambda name: type(name, (), {})
        )
        for name in ("", ".datasets", ".transforms", ".transforms.functional"):
            monkeypatch.setitem(sys.modules, f"torchvision{name}", empty)
    import torch_fidelity

    yield torch_fidelity
    forget_torch_fidelity()


# --- Fréchet ---


def test_frechet_is_the_published_formula_where_the_mean_is_large():
    a = correlated(700)
    b = correlated(900, seed=1)
    right = published(*of_numpy(a), *of_numpy(b))
    assert frechet_distance(moments(a), moments(b)) == pytest.approx(right, rel=1e-6)
    assert frechet_distance(moments(b), moments(a)) == pytest.approx(right, rel=1e-6)

    def by_n(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return x.numpy().mean(0), np.cov(x.numpy(), rowvar=False, bias=True)

    def in_fp32(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        low = x.float().numpy()
        mean = low.sum(0) / np.float32(len(low))
        return mean, (low.T @ low - len(low) * np.outer(mean, mean)) / np.float32(len(low) - 1)

    for planted in (by_n, in_fp32):
        assert published(*planted(a), *planted(b)) != pytest.approx(right, rel=1e-4), (
            planted.__name__
        )


def test_frechet_is_that_of_torch_fidelity(fidelity):
    from torch_fidelity.metric_fid import fid_statistics_to_metric

    a = correlated(700)
    b = correlated(900, seed=1)
    statistics = [dict(zip(("mu", "sigma"), of_numpy(x), strict=True)) for x in (a, b)]
    right = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert frechet_distance(moments(a), moments(b)) == pytest.approx(right, rel=1e-6)


def test_frechet_of_known_gaussians():
    def gaussian(mean: list[float], variances: list[float]) -> Moments:
        found = Moments(len(mean))
        found.count = 1001
        found.mean = torch.tensor(mean, dtype=torch.float64)
        found.scatter = 1000 * torch.tensor(variances, dtype=torch.float64).diag()
        return found

    a = gaussian([0.0, 3.0, 1.0], [4.0, 0.0, 1.0])
    b = gaussian([1.0, 1.0, 1.0], [9.0, 4.0, 0.0])
    assert frechet_distance(a, b) == pytest.approx(
        1 + 4 + (2 - 3) ** 2 + (0 - 2) ** 2 + (1 - 0) ** 2, abs=1e-12
    )
    assert frechet_distance(a, a) == pytest.approx(0.0, abs=1e-7)
    assert frechet_distance(gaussian([0.0], [0.0]), gaussian([2.0], [0.0])) == 4.0
    good = gaussian([0.0, 0.0], [1.0, 1.0])
    broken = gaussian([0.0, 0.0], [1.0, -1e-3])
    for pair in ((good, broken), (broken, good)):
        with pytest.raises(ValueError, match="eigenvalue"):
            frechet_distance(*pair)


def test_moments_do_not_depend_on_the_pieces():
    features = correlated(500)
    whole = moments(features)
    for order in (torch.arange(500), torch.arange(500).flip(0)):
        pieces = moments(*features[order].split([1, 2, 300, 0, 97, 100]))
        assert pieces.count == 500
        torch.testing.assert_close(pieces.mean, whole.mean, rtol=1e-12, atol=0)
        torch.testing.assert_close(pieces.covariance, whole.covariance, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        whole.covariance.numpy(), np.cov(features.numpy(), rowvar=False), rtol=1e-11, atol=1e-12
    )
    low = moments(features.float())
    assert low.mean.dtype == low.covariance.dtype == torch.float64
    half = moments(torch.randn(64, 4).bfloat16())
    assert half.mean.dtype == torch.float64


def test_frechet_refuses_what_says_nothing():
    assert explain_too_few(513, 256) is None
    assert explain_too_few(512, 256) == (
        "fd of 256 features needs more than 512 samples, there are 512; draw more (count=...), "
        "or read kd, which has no such bias."
    )
    with pytest.raises(ValueError, match=r"shape \(25, 4\)"):
        moments(correlated(25)).add(correlated(25, dim=4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(bad):
    features = correlated(30)
    features[3, 4] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        moments(features)


# --- Kernel distance ---


def mmd(x: Tensor, y: Tensor) -> float:
    """Of all samples."""
    return float(
        squared_mmd(
            x.double(), y.double(), torch.ones(1, len(x)).double(), torch.ones(1, len(y)).double()
        )
    )


def test_squared_mmd_by_hand():
    """One feature: k(0, 1) = k(0, 2) = 1; the kernels between the sets are 1, 1, 1 and (1·2 + 1)³ =
    27."""
    x = torch.tensor([[0.0], [1.0]])
    y = torch.tensor([[0.0], [2.0]])
    assert mmd(x.double(), y.double()) == 1 + 1 - 2 * 30 / 4


def test_kernel_distance_is_that_of_torch_fidelity(fidelity):
    from torch_fidelity.metric_kid import kernel_mmd

    a = correlated(100, mean=0.0)
    b = correlated(100, mean=0.0, seed=1)
    assert mmd(a, b) == pytest.approx(kernel_mmd(a.numpy(), b.numpy()), rel=1e-9)


def test_kernel_distance_is_unbiased_and_grows_with_a_shift():
    draw = torch.Generator().manual_seed(0)

    def normal(count: int) -> Tensor:
        return torch.randn(count, 8, generator=draw)

    equal = torch.tensor([kernel_distance(normal(60), normal(50), seed=i)[0] for i in range(30)])
    assert abs(equal.mean()) < 3 * equal.std() / 30**0.5
    assert equal.min() < 0 < equal.max()
    a = normal(200)
    b = normal(200)
    shifted = [kernel_distance(a, b + shift)[0] for shift in (0.0, 0.5, 1.0)]
    assert equal.abs().max() < shifted[1] < shifted[2]
    assert shifted[0] < shifted[1]
    assert (
        kernel_distance(a, b, seed=1)
        == kernel_distance(a, b, seed=1)
        != kernel_distance(a, b, seed=2)
    )
    assert kernel_distance(a, b)[1] > 0


@pytest.mark.parametrize(
    ("counts", "size"), [((2000, 1500), 750), ((2000, 2500), 1000), ((4, 9), 2)]
)
def test_subsets_are_never_the_whole_set(counts, size, monkeypatch):
    sizes = []

    def seen(a: Tensor, b: Tensor, u: Tensor, v: Tensor) -> Tensor:
        sizes.extend(
            (int(rows.sum()), int(columns.sum())) for rows, columns in zip(u, v, strict=True)
        )
        assert set(u.unique().tolist()) == set(v.unique().tolist()) == {0.0, 1.0}
        assert len(u.unique(dim=0)) > 1
        return torch.zeros(len(u))

    monkeypatch.setattr(distances, "squared_mmd", seen)
    kernel_distance(*(torch.arange(count).float()[:, None] for count in counts))
    assert sizes == [(size, size)] * 100


def test_subsets_have_the_distances_that_they_have_alone(monkeypatch):
    monkeypatch.setattr(distances, "CHUNK_ELEMENTS", 70)  # a row or two at a time
    a = torch.randn(20, 3).double()
    b = torch.randn(30, 3).double()
    u, v = (torch.rand(5, n).argsort(1).argsort(1).lt(9).double() for n in (20, 30))
    alone = [mmd(a[rows.bool()], b[columns.bool()]) for rows, columns in zip(u, v, strict=True)]
    assert squared_mmd(a, b, u, v).tolist() == pytest.approx(alone, rel=1e-9)


# --- Precision and recall ---


def test_precision_and_recall_by_hand():
    """One neighbour: the balls of the real ones reach 1, 1, 1 and 8, those of the fakes 2, 2, 1 and
    1."""
    real = torch.tensor([[0.0], [1.0], [2.0], [10.0]])
    fake = torch.tensor([[0.5], [2.5], [19.0], [20.0]])
    for offset in (0.0, 1e6):
        shifted = real.double() + offset, fake.double() + offset
        assert compare_neighbours(*shifted, neighbours=1)[:2] == (0.5, 0.75)


def test_collapse_lowers_recall_and_outliers_precision(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    real = torch.randn(300, 4, generator=draw)
    good = torch.randn(300, 4, generator=draw)
    precision, recall, *_ = whole = compare_neighbours(real, good)
    assert min(precision, recall) > 0.8
    collapsed = compare_neighbours(real, 0.05 * good)
    assert collapsed[0] > precision
    assert collapsed[1] < 0.1
    outliers = compare_neighbours(real, torch.cat((good[:150], 20 + good[150:])))
    assert outliers[0] == pytest.approx(precision / 2, abs=0.05)
    monkeypatch.setattr(distances, "CHUNK_ELEMENTS", 7 * 300 + 1)
    assert compare_neighbours(real, good) == whole


def test_a_memorised_set_is_flagged():
    """Of a perfect model a twentieth lies so near, as of images left out; each copy among its
    samples adds one."""
    draw = torch.Generator().manual_seed(0)
    real = torch.randn(2000, 8, generator=draw)
    fresh = torch.randn(1000, 8, generator=draw)
    *_, share, expected = compare_neighbours(real, fresh)
    assert expected == 0.05
    assert share == pytest.approx(0.05, abs=0.02)
    fifth = torch.cat((real[:200] + 0.01, fresh[200:]))
    assert compare_neighbours(real, fifth).copied == pytest.approx(0.2 + 0.8 * share, abs=0.01)
    assert compare_neighbours(real + 100.0, real + 100.0).copied == 1.0
    assert compare_neighbours(real, 3.0 * fresh).copied < 0.01
    twice = torch.cat((real[:500], real[:500], real[500:1000]))
    assert compare_neighbours(twice, torch.cat((real[:250], fresh[:250])))[2:] == pytest.approx(
        (0.5, 2 / 3), abs=0.01
    )


# --- Feature spaces ---


def pictures(count: int = 3, side: int = 16) -> Tensor:
    """Smooth and rough parts, other in each channel, and no random number."""
    i = torch.arange(count * side * side * 3)
    return (
        (i * 7 + i % 11 * 13 + i // 97 * 3)
        .remainder(256)
        .to(torch.uint8)
        .view(count, side, side, 3)
    )


def autoencoder(kind: str, tmp_path: Path) -> Autoencoder:
    return (
        PixelAutoencoder()
        if kind == "PixelAutoencoder"
        else DiffusersAutoencoder(str(save_tiny_autoencoder(kind, tmp_path / kind)))
    )


def save_dinov2(folder: Path) -> Path:
    """A tiny DINOv2 with random weights."""
    transformers = pytest.importorskip(
        "transformers", reason="pip install 'fastlatent[evaluation]'"
    )
    shape = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.Dinov2Model(transformers.Dinov2Config(**shape)).save_pretrained(folder)
    return folder


def check_space(space: Features, images: Tensor) -> Tensor:
    """What holds for every space; returns the features."""
    found = space(images)
    assert found.shape == (len(images), space.dim)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert torch.equal(found, space(images))
    alone = torch.cat([space(image[None]) for image in images])
    torch.testing.assert_close(alone, found, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(space(images), found)
    assert found.std(0).max() > 0
    about = space.describe()
    assert json.loads(json.dumps(about)) == about
    assert (about["name"], about["dim"]) == (space.name, space.dim)
    with pytest.raises(AssertionError):
        space(images.float())
    return found


def test_features_are_exact_whatever_the_process_has_set(monkeypatch):
    seen = []

    def flags() -> tuple:
        cudnn = torch.backends.cudnn
        tf32 = torch.get_float32_matmul_precision(), cudnn.allow_tf32
        return *tf32, cudnn.deterministic, cudnn.benchmark, torch.is_grad_enabled()

    class Watching(RandomFeatures):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(flags())
            return super().forward(images)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.set_float32_matmul_precision("high")
    before = flags()
    Watching()(pictures())
    assert seen == [("highest", False, True, False, False)]
    assert flags() == before == ("high", True, False, True, True)


def test_random_features_never_change():
    """Another figure here is another network: count `version` up."""
    space = RandomFeatures()
    images = pictures(side=100)
    found = check_space(space, images)
    assert space.dim == 256
    assert space.describe()["version"] == 1
    pinned = [0.16509, 0.03184, 0.07906, 0.00000, 0.21578, 0.08425, 0.00270, 0.00000]
    torch.testing.assert_close(found[0, ::32], torch.tensor(pinned), rtol=1e-4, atol=1e-5)
    state = torch.get_rng_state()
    assert torch.equal(RandomFeatures()(images), found)
    assert torch.equal(torch.get_rng_state(), state)


def test_random_features_see_colour_layout_and_texture():
    space = RandomFeatures()
    images = pictures(side=64)
    found = space(images)
    blurred = (
        torch.nn.functional.avg_pool2d(images.permute(0, 3, 1, 2).float(), 3, 1, 1)
        .round()
        .to(torch.uint8)
    )
    for changed in (images.flip(-1), images.roll(32, 1), blurred.permute(0, 2, 3, 1)):
        assert (space(changed) - found).norm() > 0.05 * found.norm()


@pytest.mark.parametrize(
    ("kind", "channels", "side", "dim"),
    [
        ("AutoencoderKL", 3, 16, 2 * 8 * 8),
        ("AutoencoderKL", 3, 64, 2 * 11 * 11),
        ("PixelAutoencoder", 1, 8, 64),
        ("PixelAutoencoder", 3, 16, 3 * 9 * 9),
    ],
)
def test_encoder_features(kind, channels, side, dim, tmp_path):
    made_by = autoencoder(kind, tmp_path)
    images = pictures(side=side)
    space = EncoderFeatures(made_by, torch.zeros(1, channels, side, side))
    found = check_space(space, images)
    assert space.dim == dim
    assert space.describe()["sha256"] == made_by.weights_sha256
    assert (found - space(images.flip(-1))).abs().max() > 1e-3 * found.abs().max()
    latents = made_by.encode(images.permute(0, 3, 1, 2).float()[:, :channels] / 127.5 - 1)[
        0
    ].detach()
    cell = -(-latents.shape[-1] // space.grid)
    corner = latents[:, :, :cell, :cell].mean((2, 3))
    torch.testing.assert_close(
        found.view(3, latents.shape[1], -1)[..., 0], corner, rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="use one size"):
        space(pictures(side=side + 4))


def test_grey_images_count_once(tmp_path):
    grey = pictures(200, 4)[..., :1].expand(-1, -1, -1, 3)
    space = EncoderFeatures(PixelAutoencoder(), torch.zeros(1, 1, 4, 4))
    assert torch.linalg.matrix_rank(moments(space(grey)).covariance) == space.dim == 16


def test_dinov2_features(tmp_path):
    folder = save_dinov2(tmp_path / "dino")
    space = Dinov2Features(str(folder))
    images = pictures()
    found = check_space(space, images)
    assert space.dim == 24
    assert space.describe()["sha256"] == hash_file(folder / "model.safetensors")
    from transformers import Dinov2Model

    x = torch.nn.functional.interpolate(
        images.permute(0, 3, 1, 2).float(), (224, 224), mode="bicubic", antialias=True
    ).clamp(0, 255)
    x = (x / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)) / torch.tensor(
        [0.229, 0.224, 0.225]
    ).view(3, 1, 1)
    with torch.no_grad():
        right = Dinov2Model.from_pretrained(folder).eval()(pixel_values=x).pooler_output
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


def test_dinov2_that_is_none(tmp_path, monkeypatch):
    folder = save_dinov2(tmp_path / "dino")
    for path, sentence in (
        (None, "needs dinov2="),
        (str(tmp_path / "nowhere"), "neither an existing folder nor a hub id"),
        (str(tmp_path), "config.json does not exist"),
    ):
        with pytest.raises(ValueError, match=sentence):
            Dinov2Features(path)
    from safetensors.torch import load_file, save_file

    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    save_file(
        {name: tensors[name] for name in list(tensors)[1:]}, weights, metadata={"format": "pt"}
    )
    with pytest.raises(ValueError, match="missing_keys"):
        Dinov2Features(str(folder))
    weights.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read"):
        Dinov2Features(str(folder))
    (folder / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="of type vit"):
        Dinov2Features(str(folder))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ValueError,
        match=r"transformers, which is not installed; pip install 'fastlatent\[evaluation",
    ):
        Dinov2Features(str(folder))


def test_inception_that_is_none(tmp_path, monkeypatch):
    other = tmp_path / "other.pth"
    other.write_bytes(b"other weights")
    for weights, sentence in (
        (None, "needs inception=<file>"),
        (str(tmp_path / "nowhere.pth"), "is not weights-inception"),
        (str(other), "is not weights-inception-2015-12-05-6726825d.pth"),
    ):
        with pytest.raises(ValueError, match=sentence):
            InceptionFeatures(weights)
    monkeypatch.setattr(features, "INCEPTION_SHA256", hash_file(other))
    forget_torch_fidelity()
    monkeypatch.setitem(sys.modules, "torch_fidelity", None)
    with pytest.raises(ValueError, match=r"torch_fidelity, which is not installed; pip install"):
        InceptionFeatures(str(other))
    package = tmp_path / "code" / "torch_fidelity"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    forget_torch_fidelity()
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(
        ValueError, match=r"nms does not exist.*; mostly its torchvision is built for another torch"
    ):
        InceptionFeatures(str(other))


def test_inception_features(fidelity, tmp_path, monkeypatch):
    """With random weights: the real ones are 95 MB of somebody else's server."""
    from torch_fidelity import feature_extractor_inceptionv3 as published

    with monkeypatch.context() as patch:
        patch.setattr(published, "load_state_dict_from_url", lambda *args, **kwargs: {})
        patch.setattr(published.FeatureExtractorInceptionV3, "load_state_dict", lambda *args: None)
        network = published.FeatureExtractorInceptionV3("any", ["2048"])
    file = tmp_path / "weights.pth"
    torch.save(network.state_dict(), file)
    monkeypatch.setattr(features, "INCEPTION_SHA256", hash_file(file))
    images = pictures(2)
    space = InceptionFeatures(str(file))
    found = space(images)
    assert found.shape == (2, space.dim) == (2, 2048)
    assert not found.requires_grad
    torch.testing.assert_close(found, network(images.permute(0, 3, 1, 2))[0])
    torch.testing.assert_close(space(images[:1]), found[:1], rtol=1e-4, atol=1e-6)
    assert space.describe()["sha256"] == hash_file(file)


# --- By name ---


def test_spaces_by_name():
    spaces = built("random", "encoder")
    assert list(spaces) == ["random", "encoder"]
    assert [type(space) for space in spaces.values()] == [RandomFeatures, EncoderFeatures]
    for names, sentence in (
        ([], "must name one space"),
        (["random", "random"], "each once"),
        (["fid"], "features=fid is unknown; choose from encoder, random, inception, dinov2"),
        (["torch.nn.Linear"], "extensions="),
        (["inception"], "needs inception="),
        (["dinov2"], "needs dinov2="),
    ):
        with pytest.raises(ValueError, match=sentence):
            built(*names)


def test_a_space_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "myspaces").mkdir()
    (tmp_path / "myspaces" / "colour.py").write_text(
        "import torch\n"
        "from evaluation.features import Features\n\n\n"
        "class Colour(Features):\n"
        "    name, dim = 'colour', 3\n\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.scale = torch.nn.Parameter(torch.ones(3))\n\n"
        "    def forward(self, images):\n"
        "        return images.float().mean((1, 2)) * self.scale\n\n"
        "    def describe(self):\n"
        "        return {'name': self.name, 'dim': self.dim, 'version': 1}\n\n\n"
        "class Other:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    name = "myspaces.colour.Colour"
    with pytest.raises(ValueError, match="is unknown"):
        built(name)
    monkeypatch.setattr(build, "admitted_packages", {"myspaces"})
    check_space(built(name)[name], pictures())
    for name, sentence in (
        ("myspaces.colour.Other", "no class derived from"),
        ("myspaces.colour.Missing", "no class derived from"),
        ("myspaces.nowhere.Colour", "no module myspaces.nowhere"),
        ("myspaces", "is unknown"),
    ):
        with pytest.raises(ValueError, match=sentence):
            built(name)
