"""Loaders, shards and the manifest: the same stream always, and every mistake refused by name."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load
from torch import Tensor

from data.digits import DigitLatents
from data.images import decode_image, list_images
from data.in_memory import InMemoryLatents, LatentTensors
from data.loader import Batch, LatentSpec
from data.order import EpochOrder
from data.resident import ResidentLatents
from data.shards import ShardWriter, file_sha256
from data.synthetic import SyntheticLatents
from tests.helpers import CPU, random_samples, save_latent_set, write_shard

Make = Callable[..., InMemoryLatents]


@pytest.fixture(scope="module")
def latent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 29 + 16 training samples in two shards and 7 held-out ones, with posteriors and mirrored latents."""
    folder = tmp_path_factory.mktemp("latents")
    parts = (("train", 29), ("train", 16), ("held_out", 7))
    save_latent_set(folder, [(split, random_samples(count, seed)) for seed, (split, count) in enumerate(parts)])
    return folder


@pytest.fixture(params=["digits", "synthetic", "resident"])
def make(request: pytest.FixtureRequest, latent_folder: Path) -> Make:
    """`make(batch_size=…, …)` builds the loader under test."""

    def start(**changes: int) -> InMemoryLatents:
        settings = {"batch_size": 10, "seed": 0, "device": CPU} | changes
        if request.param == "digits":
            return DigitLatents(**settings)
        if request.param == "synthetic":
            return SyntheticLatents(channels=2, height=4, width=6, num_classes=5, count=37, **settings)
        return ResidentLatents(path=str(latent_folder), **settings)

    return start


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def take(loader: InMemoryLatents, batches: int) -> Batch:
    """The next batches as one."""
    return joined(list(islice(loader, batches)))


def assert_same(first: Batch, second: Batch) -> None:
    for name, a, b in zip(Batch._fields, first, second, strict=True):
        assert torch.equal(a, b), name


# Every loader


def test_spec_describes_the_batches(make: Make):
    loader = make()
    for batch in (next(loader), next(loader.held_out(4))):
        size = len(batch.ids)
        assert batch.latents.shape == (size, loader.spec.channels, loader.spec.height, loader.spec.width)
        assert batch.latents.dtype == torch.float32
        assert batch.labels.shape == batch.position.shape == (size,)
        assert batch.labels.dtype == batch.ids.dtype == batch.position.dtype == torch.long
        assert len(loader.spec.class_names) == loader.spec.num_classes
        assert batch.labels.min() >= 0
        assert batch.labels.max() < loader.spec.num_classes


def test_labels_belong_to_their_ids(make: Make):
    batch = take(make(), 12)
    label_of = dict(zip(batch.ids.tolist(), batch.labels.tolist(), strict=True))
    assert [label_of[i] for i in batch.ids.tolist()] == batch.labels.tolist()
    assert len(set(batch.labels.tolist())) > 1


def test_an_epoch_has_every_id_once_at_a_batch_size_that_does_not_divide_it(make: Make):
    loader = make(batch_size=16)
    count = loader.spec.count
    assert count % 16
    stream = take(loader, -(-2 * count // 16))
    assert torch.equal(stream.position, torch.arange(len(stream.position)))
    for epoch in (stream.ids[:count], stream.ids[count : 2 * count]):
        assert torch.equal(epoch.sort().values, torch.arange(count))
    assert not torch.equal(stream.ids[:count], stream.ids[count : 2 * count])


def test_the_stream_is_the_same_at_another_batch_size(make: Make):
    assert_same(take(make(batch_size=24), 4), take(make(batch_size=6), 16))


def test_two_ranks_together_give_the_batches_of_one(make: Make):
    single = make(batch_size=12)
    ranks = [make(batch_size=6, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(10):
        assert_same(next(single), joined([next(loader) for loader in ranks]))


@pytest.mark.parametrize("batches", [2, 9])
def test_resuming_within_an_epoch_is_exact(make: Make, batches: int):
    loader = make(batch_size=7)
    take(loader, batches)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = make(batch_size=7)
    resumed.load_state_dict(state)
    assert_same(take(loader, 8), take(resumed, 8))


def test_held_out_gives_each_sample_once_in_a_fixed_order(make: Make):
    loader = make()
    first = joined(list(loader.held_out(3)))
    assert torch.equal(first.ids, torch.arange(len(first.ids)))
    assert len(first.ids) >= 3
    take(loader, 5)
    assert_same(first, joined(list(loader.held_out(2))))


def test_held_out_samples_are_not_trained_on(make: Make):
    loader = make()
    trained = {bytes(latent.numpy().tobytes()) for latent in loader.train.latents.float()}
    held_out = [bytes(latent.numpy().tobytes()) for latent in loader.held_out_split.latents.float()]
    assert not trained.intersection(held_out)


def test_another_seed_gives_another_order(make: Make):
    assert not torch.equal(take(make(seed=0), 3).ids, take(make(seed=1), 3).ids)


def test_the_fingerprint_tells_sets_apart(latent_folder: Path, tmp_path: Path):
    def fingerprint(path: Path, normalisation: str = "channel") -> str:
        return ResidentLatents(
            path=str(path), normalisation=normalisation, batch_size=1, seed=0, device=CPU
        ).spec.fingerprint

    save_latent_set(tmp_path, [("train", random_samples(5, seed=0))])
    prints = [fingerprint(latent_folder), fingerprint(latent_folder, "scale_shift"), fingerprint(tmp_path)]
    assert len(set(prints)) == 3


def test_resident_reads_all_shards_in_order(latent_folder: Path):
    loader = ResidentLatents(path=str(latent_folder), batch_size=1, seed=0, device=CPU)
    first, second, held_out = (random_samples(count, seed) for seed, count in enumerate((29, 16, 7)))
    for name, tensor in vars(loader.train).items():
        assert torch.equal(tensor, torch.cat([first[name], second[name]])), name
    for name, tensor in vars(loader.held_out_split).items():
        assert torch.equal(tensor, held_out[name]), name


def test_nothing_held_out_gives_no_batches(tmp_path: Path):
    save_latent_set(tmp_path, [("train", random_samples(5, seed=0))])
    loader = ResidentLatents(path=str(tmp_path), batch_size=2, seed=0, device=CPU)
    assert list(loader.held_out(2)) == []


def test_digits_are_normalised():
    loader = DigitLatents(batch_size=1617, seed=0, device=CPU)
    latents = next(loader).latents
    assert abs(latents.mean()) < 1e-4
    assert abs(latents.std() - 1.0) < 1e-4


def test_synthetic_refuses_an_empty_set():
    for key in ("channels", "height", "width", "num_classes", "count"):
        with pytest.raises(ValueError, match=f"data.{key}=0 must be at least 1"):
            SyntheticLatents(**{"count": 4, key: 0}, batch_size=1, seed=0, device=CPU)


# Images


def encoded(image: Image.Image, **settings: object) -> bytes:
    """The image as a file: PNG, or TIFF where PNG cannot hold it."""
    stream = io.BytesIO()
    image.save(stream, "TIFF" if image.mode == "CMYK" else "PNG", **settings)
    return stream.getvalue()


@pytest.mark.parametrize("size", [(64, 64), (200, 64), (64, 333), (5, 9), (32, 33), (1000, 20)])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
def test_any_image_becomes_a_square(size: tuple[int, int], mode: str):
    pixels = decode_image(encoded(Image.new("RGB", size, (255, 0, 0)).convert(mode)), 32)
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == torch.uint8
    assert (pixels == pixels[:, :1, :1]).all()
    if mode not in ("L", "CMYK"):
        assert pixels[:, 0, 0].tolist() == [255, 0, 0]


def test_the_centre_is_kept():
    image = Image.new("RGB", (300, 100))
    image.paste((0, 255, 0), (100, 0, 200, 100))
    assert (decode_image(encoded(image), 50)[1, 1:-1, 1:-1] > 200).all()


def test_images_are_turned_upright():
    image = Image.new("RGB", (32, 32))
    image.paste((255, 255, 255), (0, 0, 32, 16))  # the upper half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    pixels = decode_image(encoded(image, exif=exif), 32).float()
    assert pixels[:, :, 16:].min() > 250
    assert pixels[:, :, :16].max() < 5


def test_16_bit_grey_is_scaled_and_not_clipped():
    pixels = decode_image(encoded(Image.new("I;16", (32, 32), 0x4000)), 32)
    assert (pixels == 0x40).all()


def test_class_folders_are_listed_by_name(tmp_path: Path):
    for name in ("b/2.png", "b/10.PNG", "a/deep/x.jpeg", "a/notes.txt", "c/readme", "top.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    images = list_images(tmp_path)
    assert [(entry.key, entry.label) for entry in images.entries] == [
        ("a/deep/x.jpeg", 0),
        ("b/10.PNG", 1),
        ("b/2.png", 1),
    ]
    assert images.class_names == ["a", "b"]  # an empty folder is no class
    before = images.sha256()
    (tmp_path / "b" / "2.png").write_bytes(b"123456")
    assert list_images(tmp_path).sha256() != before


# Order


def test_order_is_a_pure_function_of_the_position():
    stream = EpochOrder(5, seed=3, device=CPU).ids(0, 23)
    for epoch in range(4):
        assert stream[5 * epoch : 5 * epoch + 5].sort().values.tolist() == [0, 1, 2, 3, 4]
    asked_backwards = EpochOrder(5, seed=3, device=CPU)
    for start in reversed(range(23)):
        for count in (1, 4, 23 - start):
            assert torch.equal(asked_backwards.ids(start, count)[: 23 - start], stream[start : start + count])


def test_a_batch_may_be_larger_than_several_epochs():
    assert EpochOrder(1, seed=0, device=CPU).ids(2, 6).tolist() == [0] * 6


# Mirroring and posterior


def in_memory(seed: int = 0, **tensors: Tensor) -> InMemoryLatents:
    """A loader over `tensors` that normalises nothing."""
    split = LatentTensors(labels=torch.zeros(len(tensors["latents"]), dtype=torch.long), **tensors)
    channels, height, width = tensors["latents"].shape[1:]
    spec = LatentSpec(
        channels, height, width, 1, len(split.labels), ["one"], mean=[0.0] * channels, std=[1.0] * channels
    )
    return InMemoryLatents(spec, split, split, batch_size=8, seed=seed, device=CPU)


def test_mirroring_depends_on_seed_and_position_only():
    latents = torch.arange(1.0, 17.0).view(16, 1, 1, 1)
    loader, other_seed = (in_memory(seed, latents=latents, mirrored=-latents) for seed in (0, 1))
    position = torch.arange(2000)
    flips = [loader.gather(torch.full((2000,), i), position).flatten() < 0 for i in (0, 5)]
    assert torch.equal(*flips)
    assert not torch.equal(flips[0], other_seed.gather(torch.zeros(2000, dtype=torch.long), position).flatten() < 0)
    assert abs(flips[0].float().mean() - 0.5) < 0.05
    stream = take(loader, 20)
    assert torch.equal(stream.latents.abs().flatten(), stream.ids + 1.0)
    assert torch.equal(stream.latents.flatten() < 0, flips[0][:160])


def test_held_out_is_neither_mirrored_nor_sampled():
    latents = torch.arange(1.0, 17.0).view(16, 1, 1, 1)
    loader = in_memory(latents=latents, mirrored=-latents, std=latents, mirrored_std=latents)
    assert torch.equal(joined(list(loader.held_out(5))).latents, latents)


def test_posterior_has_the_stored_mean_and_std():
    mean, std = torch.tensor([[-3.0, 5.0], [1.0, 2.0]]), torch.tensor([[0.5, 2.0], [0.1, 4.0]])
    loader = in_memory(latents=mean.view(2, 2, 1, 1), std=std.view(2, 2, 1, 1))
    draws = 20_000
    for i in range(2):
        drawn = loader.gather(torch.full((draws,), i), torch.arange(draws)).view(draws, 2)
        standard = (drawn - mean[i]) / std[i]
        assert standard.mean(0).abs().max() < 5 / draws**0.5
        assert (standard.var(0) - 1.0).abs().max() < 5 * (2 / draws) ** 0.5
        assert abs(standard.prod(1).mean()) < 5 / draws**0.5  # the channels are independent
        assert abs((standard[1:] * standard[:-1]).mean()) < 5 / draws**0.5  # and so are the positions


def test_posterior_depends_on_seed_and_position_only():
    zero, one = torch.zeros(3, 2, 2, 2), torch.ones(3, 2, 2, 2)
    loader, again, other_seed = (in_memory(seed, latents=zero, std=one) for seed in (0, 0, 1))
    position = torch.tensor([7, 100, 3])
    noise = loader.gather(torch.tensor([0, 1, 2]), position)
    assert torch.equal(noise, again.gather(torch.tensor([2, 2, 0]), position))
    assert torch.equal(noise[1:2], loader.gather(torch.tensor([0]), torch.tensor([100])))
    assert not torch.equal(noise, other_seed.gather(torch.tensor([0, 1, 2]), position))


def test_mirrored_latents_are_drawn_from_their_own_posterior():
    one = torch.ones(1, 1, 1, 1)
    loader = in_memory(latents=100 * one, mirrored=-100 * one, std=0.1 * one, mirrored_std=10 * one)
    drawn = loader.gather(torch.zeros(4000, dtype=torch.long), torch.arange(4000)).flatten()
    plain, mirrored = drawn[drawn > 0], drawn[drawn < 0]
    assert abs(plain.std() - 0.1) < 0.01
    assert abs(mirrored.std() - 10.0) < 1.0


# Normalising


def test_denormalise_inverts_normalise():
    spec = LatentSpec(3, 4, 5, 1, 1, ["one"], mean=[-2.0, 0.0, 7.5], std=[0.1, 1.0, 30.0])
    raw = torch.randn(6, 3, 4, 5) * 3.0
    torch.testing.assert_close(spec.denormalise(spec.normaliser(CPU)(raw)), raw)
    torch.testing.assert_close(spec.normaliser(CPU)(raw)[:, 2], (raw[:, 2] - 7.5) / 30.0)


def test_scale_shift_is_the_convention_of_diffusers(latent_folder: Path):
    loader = ResidentLatents(path=str(latent_folder), normalisation="scale_shift", batch_size=1, seed=0, device=CPU)
    raw = loader.train.latents
    torch.testing.assert_close(loader.normalise(raw), (raw.float() - 0.25) * 0.5)


# Shards


def test_equal_samples_make_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shards = []
    for folder, parts, clock in (("a", 5, 1e9), ("b", 3, 2e9)):
        (tmp_path / folder).mkdir()
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        shards.append(write_shard(tmp_path / folder / "train-00000.tar", random_samples(11, seed=0), parts=parts))
    assert shards[0] == shards[1]
    assert (tmp_path / "a" / shards[0].file).read_bytes() == (tmp_path / "b" / shards[0].file).read_bytes()
    other = write_shard(tmp_path / "a" / "train-00000.tar", random_samples(11, seed=1))
    assert other.sha256 != shards[0].sha256


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the tar open
def test_plain_webdataset_reads_a_shard(tmp_path: Path):
    import webdataset

    samples = random_samples(11, seed=0)
    write_shard(tmp_path / "train-00000.tar", samples)
    members = list(webdataset.WebDataset(str(tmp_path / "train-00000.tar"), shardshuffle=False))
    assert [member["__key__"] for member in members] == [f"train-00000-{i:06d}" for i in range(3)]
    blocks = [load(member["safetensors"]) for member in members]
    for name, tensor in samples.items():
        assert torch.equal(torch.cat([block[name] for block in blocks]), tensor), name


def test_the_description_of_a_shard_is_true(tmp_path: Path):
    samples = random_samples(11, seed=0)
    shard = write_shard(tmp_path / "train-00000.tar", samples)
    content = (tmp_path / "train-00000.tar").read_bytes()
    assert (shard.count, shard.bytes, shard.sha256) == (11, len(content), file_sha256(tmp_path / shard.file))
    assert [count for _, _, count in shard.blocks] == [4, 4, 3]
    payloads = [load(content[offset : offset + size]) for offset, size, _ in shard.blocks]
    assert torch.equal(torch.cat([payload["labels"] for payload in payloads]), samples["labels"])


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the abandoned file
def test_an_abandoned_writer_leaves_no_shard(tmp_path: Path):
    writer = ShardWriter(tmp_path / "train-00000.tar", "train", block_size=2)
    writer.add(random_samples(5, seed=0))
    assert list(tmp_path.glob("*.tar")) == []
    del writer
    assert list(tmp_path.glob("*.tar")) == []


# Refusals


@pytest.fixture
def small_set(tmp_path: Path) -> Path:
    save_latent_set(tmp_path, [("train", random_samples(9, seed=0)), ("held_out", random_samples(3, seed=1))])
    return tmp_path


def edit_manifest(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(raw | changes))


def refusal(folder: Path | None, **settings: object) -> str:
    """The message with which the set is refused."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        ResidentLatents(path=folder if folder is None else str(folder), batch_size=2, seed=0, device=CPU, **settings)
    return str(caught.value)


def assert_says(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message


AGAIN = "precompute_latents.py again"


def test_no_path_is_refused():
    assert_says(refusal(None), "data.path=<folder of latents>", "precompute_latents.py", "data=digits")


def test_a_folder_without_manifest_is_refused(tmp_path: Path):
    assert_says(refusal(tmp_path), str(tmp_path / "manifest.json"), "data.path", "precompute_latents.py source=")


def test_broken_json_is_refused(small_set: Path):
    (small_set / "manifest.json").write_text('{"channels": 3,')
    assert_says(refusal(small_set), str(small_set / "manifest.json"), "not valid JSON", AGAIN)


def test_another_format_is_refused(small_set: Path):
    edit_manifest(small_set, format=2)
    assert_says(refusal(small_set), str(small_set / "manifest.json"), "format 2", AGAIN)


def test_a_manifest_that_lacks_a_field_is_refused(small_set: Path):
    raw = json.loads((small_set / "manifest.json").read_text())
    del raw["mean"]
    (small_set / "manifest.json").write_text(json.dumps(raw))
    assert_says(refusal(small_set), str(small_set / "manifest.json"), "lacks mean", AGAIN)


def test_a_missing_shard_is_refused(small_set: Path):
    (small_set / "held_out-00001.tar").unlink()
    assert_says(refusal(small_set), str(small_set / "held_out-00001.tar"), "missing (3 samples)", AGAIN)


@pytest.mark.parametrize("place", [0, 700, -1])
def test_one_flipped_byte_is_refused(small_set: Path, place: int):
    file = small_set / "train-00000.tar"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    assert_says(refusal(small_set), str(file), "sha256", "9 samples", "delete it", AGAIN)


def test_another_encoder_is_refused(small_set: Path):
    message = refusal(small_set, encoder="someone/other-vae")
    assert_says(message, "data.encoder=someone/other-vae", str(small_set), "someone/some-vae", "change one of them")
    ResidentLatents(path=str(small_set), encoder="someone/some-vae", batch_size=2, seed=0, device=CPU)


def test_another_latent_scale_is_refused(small_set: Path):
    message = refusal(small_set, latent_scale=0.18215)
    assert_says(message, "data.latent_scale=0.18215", str(small_set), "0.5", "change one of them")
    ResidentLatents(path=str(small_set), latent_scale=0.5, batch_size=2, seed=0, device=CPU)


def test_scale_shift_without_a_scaling_factor_is_refused(small_set: Path):
    edit_manifest(small_set, scaling_factor=None)
    message = refusal(small_set, normalisation="scale_shift")
    assert_says(message, "data.normalisation=scale_shift", str(small_set), "no scaling factor", "use channel")


def test_an_unknown_normalisation_is_refused(small_set: Path):
    message = refusal(small_set, normalisation="whiten")
    assert_says(message, "data.normalisation=whiten", "channel or scale_shift")


@pytest.mark.parametrize("name", ["../train-00000.tar", "/etc/hostname", "deeper/train-00000.tar"])
def test_a_shard_outside_the_folder_is_refused(small_set: Path, name: str):
    shards = json.loads((small_set / "manifest.json").read_text())["shards"]
    shards[0]["file"] = name
    edit_manifest(small_set, shards=shards)
    assert_says(refusal(small_set), str(small_set / "manifest.json"), name, "outside its folder", AGAIN)


@pytest.mark.parametrize(("key", "split", "found"), [("count", "train", 9), ("held_out", "held_out", 3)])
def test_counts_that_do_not_add_up_are_refused(small_set: Path, key: str, split: str, found: int):
    edit_manifest(small_set, **{key: 12})
    assert_says(refusal(small_set), str(small_set), f"{split} shards hold {found} samples", "says 12", AGAIN)


def test_a_tar_with_two_samples_of_one_key_is_refused(tmp_path: Path):
    picture = encoded(Image.new("RGB", (8, 8)))
    for names, said in ((("x.jpg", "x.jpg"), "there twice"), (("x.jpg", "x.png"), "has 2 images")):
        with tarfile.open(tmp_path / "images.tar", "w") as tar:
            for name, content in (*((name, picture) for name in names), ("x.cls", b"0")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
        with pytest.raises(ValueError, match=said):
            list_images(tmp_path)
