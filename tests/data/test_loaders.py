"""Every loader: the same stream always."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from data.digits import DigitLatents
from data.loader import Batch, LatentLoader, LatentSpec, LatentTensors, sampled
from data.order import EpochOrder
from data.resident import InMemoryLatents, ResidentLatents
from data.streamed import StreamedLatents
from data.synthetic import SyntheticLatents
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.words import CPU
from training.config.build import build
from training.config.compose import compose

Make = Callable[..., LatentLoader]


@pytest.fixture(scope="module")
def latent_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 29 + 16 training samples in two shards and 7 held-out ones, with posteriors and
    mirrored latents."""
    folder = tmp_path_factory.mktemp("latents")
    parts = (("train", 29), ("train", 16), ("held_out", 7))
    save_latent_set(
        folder, [(split, random_samples(count, seed)) for seed, (split, count) in enumerate(parts)]
    )
    return folder


LOADERS = [
    "digits",
    "synthetic",
    "resident",
    "int8",
    "chunks",
    "webdataset",
    "webdataset, 2 workers",
]


@pytest.fixture(params=LOADERS)
def make(request: pytest.FixtureRequest, latent_folder: Path) -> Make:
    """`make(batch_size=…, …)` builds the loader under test."""

    def start(**changes: int) -> LatentLoader:
        settings = {"batch_size": 10, "seed": 0, "device": CPU} | changes
        if request.param == "digits":
            return DigitLatents(**settings)
        if request.param == "synthetic":
            return SyntheticLatents(
                channels=2, height=4, width=6, num_classes=5, count=37, **settings
            )
        if request.param.startswith("webdataset"):
            workers = 2 if "workers" in request.param else 0
            return StreamedLatents(
                path=str(latent_folder), streams=6, window=4, num_workers=workers, **settings
            )
        if request.param == "int8":
            return ResidentLatents(path=str(latent_folder), storage="int8", **settings)
        # for two chunks of about 15 samples
        room = 30 * 240 / 2**30 if request.param == "chunks" else None
        return ResidentLatents(path=str(latent_folder), device_memory_gib=room, **settings)

    return start


def joined(batches: list[Batch]) -> Batch:
    return Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))


def take(loader: LatentLoader, batches: int) -> Batch:
    """The next batches as one."""
    return joined(list(islice(loader, batches)))


def assert_same(first: Batch, second: Batch) -> None:
    for name, a, b in zip(Batch._fields, first, second, strict=True):
        assert torch.equal(a, b), name


def by_position(batch: Batch) -> Batch:
    order = batch.position.argsort()
    return Batch(*(tensor[order] for tensor in batch))


# Every loader


def test_spec_describes_the_batches(make: Make):
    loader = make()
    for batch in (next(loader), next(loader.held_out(4))):
        size = len(batch.ids)
        assert batch.latents.shape == (
            size,
            loader.spec.channels,
            loader.spec.height,
            loader.spec.width,
        )
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
        assert_same(next(single), by_position(joined([next(loader) for loader in ranks])))


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
    loader = make(batch_size=loader_count(make))
    trained = next(loader).latents
    for latent in joined(list(loader.held_out(8))).latents:
        assert (trained - latent).abs().flatten(1).amax(1).min() > 0.1


def loader_count(make: Make) -> int:
    return make().spec.count


def test_another_seed_gives_another_order(make: Make):
    assert not torch.equal(take(make(seed=0), 3).ids, take(make(seed=1), 3).ids)


def test_the_fingerprint_tells_sets_apart(latent_folder: Path, tmp_path: Path):
    def fingerprint(path: Path, normalisation: str = "channel") -> str:
        return ResidentLatents(
            path=str(path), normalisation=normalisation, batch_size=1, seed=0, device=CPU
        ).spec.fingerprint

    save_latent_set(tmp_path, [("train", random_samples(5, seed=0))])
    prints = [
        fingerprint(latent_folder),
        fingerprint(latent_folder, "scale_shift"),
        fingerprint(tmp_path),
    ]
    shared: dict = {"path": str(latent_folder), "batch_size": 1, "seed": 0, "device": CPU}
    prints.append(ResidentLatents(**shared, storage="int8").spec.fingerprint)
    prints += [StreamedLatents(**shared, **order).spec.fingerprint for order in ({}, {"window": 7})]
    assert len(set(prints)) == 6


def test_resident_reads_all_shards_in_order(latent_folder: Path):
    loader = ResidentLatents(path=str(latent_folder), batch_size=1, seed=0, device=CPU)
    first, second, held_out = (
        random_samples(count, seed) for seed, count in enumerate((29, 16, 7))
    )
    for part, ids in ((first, range(29)), (second, range(29, 45)), (held_out, range(7))):
        part["ids"] = torch.tensor(ids)
    inner = loader.loader
    assert isinstance(inner, InMemoryLatents)
    for name, tensor in vars(inner.train).items():
        assert torch.equal(tensor, torch.cat([first[name], second[name]])), name
    for name, tensor in vars(inner.held_out_split).items():
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
    data = compose(["data=synthetic"]).cfg.data
    for key in ("channels", "height", "width", "num_classes", "count"):
        with pytest.raises(ValueError, match=f"data.{key}=0 must be at least 1"):
            build(data | {key: 0}, "data", batch_size=1, seed=0, device=CPU)


# Order


def test_order_is_a_pure_function_of_the_position():
    stream = EpochOrder(5, seed=3, device=CPU).ids(0, 23)
    for epoch in range(4):
        assert stream[5 * epoch : 5 * epoch + 5].sort().values.tolist() == [0, 1, 2, 3, 4]
    asked_backwards = EpochOrder(5, seed=3, device=CPU)
    for start in reversed(range(23)):
        for count in (1, 4, 23 - start):
            assert torch.equal(
                asked_backwards.ids(start, count)[: 23 - start], stream[start : start + count]
            )


def test_a_batch_may_be_larger_than_several_epochs():
    assert EpochOrder(1, seed=0, device=CPU).ids(2, 6).tolist() == [0] * 6


# Mirroring and posterior


def in_memory(seed: int = 0, **tensors: Tensor) -> InMemoryLatents:
    """A loader over `tensors` that normalises nothing."""
    split = LatentTensors(labels=torch.zeros(len(tensors["latents"]), dtype=torch.long), **tensors)
    channels, height, width = tensors["latents"].shape[1:]
    spec = LatentSpec(
        channels,
        height,
        width,
        1,
        len(split.labels),
        ["one"],
        mean=[0.0] * channels,
        std=[1.0] * channels,
    )
    return InMemoryLatents(spec, split, split, batch_size=8, seed=seed, device=CPU)


def gather(loader: InMemoryLatents, ids: Tensor, position: Tensor) -> Tensor:
    """Raw latents of any samples at any positions."""
    return sampled(loader.train.rows(ids), loader.seed, position)


def test_mirroring_depends_on_seed_and_position_only():
    latents = torch.arange(1.0, 17.0).view(16, 1, 1, 1)
    loader, other_seed = (in_memory(seed, latents=latents, mirrored=-latents) for seed in (0, 1))
    position = torch.arange(2000)
    flips = [gather(loader, torch.full((2000,), i), position).flatten() < 0 for i in (0, 5)]
    assert torch.equal(*flips)
    assert not torch.equal(
        flips[0], gather(other_seed, torch.zeros(2000, dtype=torch.long), position).flatten() < 0
    )
    assert abs(flips[0].float().mean() - 0.5) < 0.05
    stream = take(loader, 20)
    assert torch.equal(stream.latents.abs().flatten(), stream.ids + 1.0)
    assert torch.equal(stream.latents.flatten() < 0, flips[0][:160])


def test_held_out_is_neither_mirrored_nor_sampled():
    latents = torch.arange(1.0, 17.0).view(16, 1, 1, 1)
    loader = in_memory(latents=latents, mirrored=-latents, std=latents, mirrored_std=latents)
    assert torch.equal(joined(list(loader.held_out(5))).latents, latents)


def test_posterior_has_the_stored_mean_and_std():
    mean = torch.tensor([[-3.0, 5.0], [1.0, 2.0]])
    std = torch.tensor([[0.5, 2.0], [0.1, 4.0]])
    loader = in_memory(latents=mean.view(2, 2, 1, 1), std=std.view(2, 2, 1, 1))
    draws = 20_000
    for i in range(2):
        drawn = gather(loader, torch.full((draws,), i), torch.arange(draws)).view(draws, 2)
        standard = (drawn - mean[i]) / std[i]
        assert standard.mean(0).abs().max() < 5 / draws**0.5
        assert (standard.var(0) - 1.0).abs().max() < 5 * (2 / draws) ** 0.5
        assert abs(standard.prod(1).mean()) < 5 / draws**0.5  # the channels are independent
        # and so are the positions
        assert abs((standard[1:] * standard[:-1]).mean()) < 5 / draws**0.5


def test_posterior_depends_on_seed_and_position_only():
    zero = torch.zeros(3, 2, 2, 2)
    one = torch.ones(3, 2, 2, 2)
    loader, again, other_seed = (in_memory(seed, latents=zero, std=one) for seed in (0, 0, 1))
    position = torch.tensor([7, 100, 3])
    noise = gather(loader, torch.tensor([0, 1, 2]), position)
    assert torch.equal(noise, gather(again, torch.tensor([2, 2, 0]), position))
    assert torch.equal(noise[1:2], gather(loader, torch.tensor([0]), torch.tensor([100])))
    assert not torch.equal(noise, gather(other_seed, torch.tensor([0, 1, 2]), position))


def test_mirrored_latents_are_drawn_from_their_own_posterior():
    one = torch.ones(1, 1, 1, 1)
    loader = in_memory(latents=100 * one, mirrored=-100 * one, std=0.1 * one, mirrored_std=10 * one)
    drawn = gather(loader, torch.zeros(4000, dtype=torch.long), torch.arange(4000)).flatten()
    plain = drawn[drawn > 0]
    mirrored = drawn[drawn < 0]
    assert abs(plain.std() - 0.1) < 0.01
    assert abs(mirrored.std() - 10.0) < 1.0


# Normalising


def test_denormalise_inverts_normalise():
    spec = LatentSpec(3, 4, 5, 1, 1, ["one"], mean=[-2.0, 0.0, 7.5], std=[0.1, 1.0, 30.0])
    raw = torch.randn(6, 3, 4, 5) * 3.0
    torch.testing.assert_close(spec.denormalise(spec.normaliser(CPU)(raw)), raw)
    torch.testing.assert_close(spec.normaliser(CPU)(raw)[:, 2], (raw[:, 2] - 7.5) / 30.0)


def test_scale_shift_is_the_convention_of_diffusers(latent_folder: Path):
    loader = ResidentLatents(
        path=str(latent_folder), normalisation="scale_shift", batch_size=1, seed=0, device=CPU
    )
    raw = random_samples(29, 0)["latents"]
    torch.testing.assert_close(loader.loader.normalise(raw), (raw.float() - 0.25) * 0.5)


def test_the_thread_that_fills_the_next_window_ends_before_the_process(latent_folder: Path):
    """A copy that outlives the CUDA context would end a finished run with an error."""
    room = 30 * 240 / 2**30
    resident = ResidentLatents(
        path=str(latent_folder), device_memory_gib=room, batch_size=10, seed=0, device=CPU
    )
    loader = resident.loader
    own = loader.blocks.read
    reading = threading.Event()
    go_on = threading.Event()
    read = []

    def slow(number: int):
        read.append(number)
        reading.set()
        go_on.wait()
        return own(number)

    loader.blocks.read = slow
    chunk = loader.order.of_epoch(3)[0]
    assert len(chunk.blocks) > 1
    loader.start_filling(chunk)
    reading.wait()
    assert loader.stop.atexit
    threading.Timer(0.2, go_on.set).start()
    loader.stop()  # waits for the block that is being read, and no further one is
    assert not any(thread.is_alive() for thread in loader.readers.threads)
    assert len(read) == 1
