"""The promises that every loader keeps: one stream at any batch size, world size and resume; and
augmentation as a function of seed and position."""

import json
import threading

import pytest
import torch

from common.config.build import build
from common.config.compose import compose
from data.digits import DigitLatents
from data.loader import LatentLoader, LatentTensors, draw_samples
from data.spec import LatentSpec
from data.synthetic import SyntheticLatents, imitate_set
from tests.harness import batches
from tests.harness.batches import assert_same, chunked, join, resident, sort_by_position, take
from tests.harness.captions import save_captioned_set
from tests.harness.refusals import expect_refusal
from tests.harness.sets import draw_random_samples, save_random_set
from tests.harness.words import CPU

SIDES = {"channels": 2, "height": 4, "width": 6, "num_classes": 5}
LOADERS = {
    "digits": lambda path, **settings: DigitLatents(device=CPU, **settings),
    "synthetic": lambda path, **settings: SyntheticLatents(
        count=37, device=CPU, **SIDES, **settings
    ),
    **batches.LOADERS,
}


@pytest.fixture(scope="module")
def latent_folder(tmp_path_factory):
    """A set of 29 + 16 training samples in two shards and 7 held-out ones, with posteriors and
    mirrored latents."""
    return save_random_set(tmp_path_factory.mktemp("latents"), 29, 16, held_out=7)


@pytest.fixture(scope="module")
def captioned_folder(tmp_path_factory):
    """The same samples with captions."""
    return save_captioned_set(tmp_path_factory.mktemp("captioned"), 29, 16, held_out=7)


CAPTIONED = [f"{name} with captions" for name in ("resident", "chunks", "webdataset")]


@pytest.fixture(params=[*LOADERS, *CAPTIONED])
def make(request, latent_folder, captioned_folder):
    """`make(batch_size=…, …)` builds the loader under test."""
    name, captions, _ = request.param.partition(" with captions")
    folder = captioned_folder if captions else latent_folder
    settings = {"batch_size": 10, "seed": 0} | ({"text": "tokens"} if captions else {})

    def start(**changes):
        loader = LOADERS[name](folder, **settings | changes)
        assert (loader.captions is not None) == bool(captions)
        return loader

    return start


def test_an_epoch_has_every_id_once_at_a_batch_size_that_does_not_divide_it(make):
    loader = make(batch_size=16)
    count = loader.spec.count
    assert count % 16
    stream = take(loader, -(-2 * count // 16))
    assert torch.equal(stream.position, torch.arange(len(stream.position)))
    first, second = stream.ids[: 2 * count].view(2, count)
    for epoch in (first, second):
        assert torch.equal(epoch.sort().values, torch.arange(count))
    assert not torch.equal(first, second)


def test_the_stream_is_the_same_at_another_batch_size(make):
    assert_same(take(make(batch_size=24), 4), take(make(batch_size=6), 16))


def test_two_ranks_together_give_the_batches_of_one(make):
    single = make(batch_size=12)
    ranks = [make(batch_size=6, rank=rank, world_size=2) for rank in range(2)]
    for _ in range(10):
        assert_same(next(single), sort_by_position(join(map(next, ranks))))


def test_resuming_within_an_epoch_is_exact(make):
    loader = make(batch_size=7)
    take(loader, 9)
    resumed = make(batch_size=7)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert_same(take(loader, 8), take(resumed, 8))


def test_held_out_gives_each_sample_once_in_a_fixed_order(make):
    loader = make()
    first = join(loader.held_out(3))
    assert torch.equal(first.ids, torch.arange(len(first.ids)))
    assert len(first.ids) >= 3
    take(loader, 5)
    assert_same(first, join(loader.held_out(2)))


def test_held_out_samples_are_not_trained_on(make):
    loader = make(batch_size=make().spec.count)
    trained = next(loader).latents
    for latent in join(loader.held_out(8)).latents:
        assert (trained - latent).abs().flatten(1).amax(1).min() > 0.1


def test_another_seed_gives_another_order(make):
    assert not torch.equal(take(make(seed=0), 3).ids, take(make(seed=1), 3).ids)


def test_nothing_held_out_gives_no_batches(tmp_path):
    save_random_set(tmp_path, 5)
    assert list(resident(tmp_path).held_out(2)) == []


def test_digits_are_normalised():
    latents = next(DigitLatents(batch_size=1617, seed=0, device=CPU)).latents
    assert abs(latents.mean()) < 1e-4
    assert abs(latents.std() - 1.0) < 1e-4


def test_synthetic_refuses_an_empty_set():
    data = compose(["data=synthetic"]).cfg.data
    for key in (*SIDES, "count"):
        with expect_refusal(f"data.{key}=0 must be at least 1"):
            build(data | {key: 0}, "data", batch_size=1, seed=0, device=CPU)


def test_random_latents_have_the_shape_of_the_set_that_they_imitate():
    settings = {"batch_size": 3, "seed": 0, "device": CPU}
    spec = SyntheticLatents(**SIDES, **settings).spec
    assert take(imitate_set(spec, 8, **settings), 1).latents.shape == (3, 2, 4, 6)


# Mirroring and posterior

STEPS = torch.arange(1.0, 17.0).view(16, 1, 1, 1)


def draw_often(tensors, sample, count, seed=0):
    """Draws a sample of `tensors` at the first `count` positions, raw."""
    labels = torch.zeros(len(tensors["latents"]), dtype=torch.long)
    rows = LatentTensors(labels=labels, **tensors).gather(torch.full((count,), sample))
    return draw_samples(rows, seed, torch.arange(count))


def test_mirroring_depends_on_seed_and_position_only():
    flips, other_sample, other_seed = (
        draw_often({"latents": STEPS, "mirrored": -STEPS}, sample, 2000, seed).flatten() < 0
        for sample, seed in ((0, 0), (5, 0), (0, 1))
    )
    assert torch.equal(flips, other_sample)
    assert not torch.equal(flips, other_seed)
    assert abs(flips.float().mean() - 0.5) < 0.05


def test_posterior_has_the_stored_mean_and_std():
    """A mirrored latent is drawn from its own."""
    mean = torch.tensor([[-3.0, 5.0], [1.0, 2.0]]).view(2, 2, 1, 1)
    std = torch.tensor([[0.5, 2.0], [0.1, 4.0]]).view(2, 2, 1, 1)
    mirrored, mirrored_std = mean + 500.0, 10.0 * std
    tensors = {"latents": mean, "std": std, "mirrored": mirrored, "mirrored_std": mirrored_std}
    for i in range(2):
        drawn = draw_often(tensors, i, 40_000)
        flipped = drawn[:, 0].flatten() > 250
        for noise in (
            ((drawn - mean[i]) / std[i])[~flipped],
            ((drawn - mirrored[i]) / mirrored_std[i])[flipped],
        ):
            assert noise.mean(0).abs().max() < 5 / len(noise) ** 0.5
            assert (noise.var(0) - 1.0).abs().max() < 5 * (2 / len(noise)) ** 0.5


# Normalising


def test_denormalise_inverts_normalise():
    spec = LatentSpec(3, 4, 5, 1, 1, ["one"], mean=[-2.0, 0.0, 7.5], std=[0.1, 1.0, 30.0])
    raw = torch.randn(6, 3, 4, 5) * 3.0
    normalised = LatentLoader(spec, batch_size=1, seed=0, device=CPU).normalise(raw)
    torch.testing.assert_close(spec.denormalise(normalised), raw)
    torch.testing.assert_close(normalised[:, 2], (raw[:, 2] - 7.5) / 30.0)


def test_scale_shift_is_the_convention_of_diffusers(latent_folder):
    loader = resident(latent_folder, normalisation="scale_shift")
    raw = draw_random_samples(29, 0)["latents"]
    torch.testing.assert_close(loader.normalise(raw), (raw.float() - 0.25) * 0.5)


def test_the_thread_that_fills_the_next_chunk_ends_before_the_process(latent_folder):
    """A copy that outlives the CUDA context would end a finished run with an error."""
    samples = chunked(latent_folder).samples
    read_block = samples.train.read
    reading = threading.Event()
    released = threading.Event()
    numbers = []

    def read_slowly(number):
        numbers.append(number)
        reading.set()
        released.wait()
        return read_block(number)

    samples.train.read = read_slowly
    assert len(samples.order.find_epoch(3)[0].blocks) > 1
    samples.start_filling(3 * samples.order.count)
    reading.wait()
    assert samples.stop.atexit

    # `stop` waits for the block that is being read and starts no further one
    threading.Timer(0.2, released.set).start()
    samples.stop()
    assert not any(thread.is_alive() for thread in samples.readers.threads)
    assert len(numbers) == 1
