"""The order of a streamed set as a pure function, and its readers: nothing lost, nothing twice, at
any division."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.loader import LatentTensors, sampled
from data.order import ChunkOrder, RankPositions, StreamOrder
from data.resident import ChunkedLatents, ResidentLatents
from data.streamed import StreamDataset, StreamedLatents, fitting_streams
from tests.data.test_loaders import assert_same, by_position, joined
from tests.harness.sets import random_samples, save_latent_set
from tests.harness.words import CPU


def random_set(draw: random.Random) -> tuple[list[int], list[int]]:
    """Blocks of each shard, and samples of each block."""
    blocks = [draw.randint(1, 4) for _ in range(draw.randint(1, 7))]
    return blocks, [draw.randint(1, 9) for _ in range(sum(blocks))]


def sample_at(order: StreamOrder, position: int) -> tuple[int, int]:
    """(block, row) of the sample at a position, from the definition alone."""
    window, offset = order.locate(position)
    rows = [(block, row + i) for block, row, rows in order.blocks_of(window) for i in range(rows)]
    assert len(rows) == window.size
    return rows[int(order.permutation(window)[offset])]


@pytest.mark.parametrize("seed", range(25))
def test_every_sample_comes_once_in_each_epoch(seed: int):
    draw = random.Random(seed)
    blocks, counts = random_set(draw)
    order = StreamOrder(
        blocks, counts, seed, streams=draw.randint(1, 9), window=draw.randint(1, 12)
    )
    everything = {(block, row) for block, count in enumerate(counts) for row in range(count)}
    epochs = [[sample_at(order, e * order.count + p) for p in range(order.count)] for e in range(2)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch))
        assert set(epoch) == everything
    if len(everything) > 12:
        assert epochs[0] != epochs[1]


def test_a_worker_that_is_spawned_reads_the_same(folder: Path):
    """As on macOS: it is sent the data set as a pickle."""
    loader = streamed(folder, batch_size=7)
    given = StreamDataset(loader.order, loader.blocks, loader.of_rank, 14)
    batches = [next(iter(each)) for each in (given, pickle.loads(pickle.dumps(given)))]
    assert torch.equal(batches[0][0], batches[1][0])
    assert batches[0][1] == batches[1][1]
    assert sorted(batches[0][1]) == list(range(14, 21))


def test_windows_end_at_different_times():
    """Or all streams would read at once."""
    order = StreamOrder([40], [64] * 40, seed=0, streams=8, window=32)
    ends = Counter(order.locate(p)[1] for p in range(8))
    rows = [
        next(n for n in range(99) if order.locate(s + 8 * (n + 1))[0].number > 0) for s in range(8)
    ]
    assert len(set(rows)) == 8
    assert ends == {0: 8}


def test_shuffling_reaches_as_far_as_streams_and_windows_do():
    order = StreamOrder([10] * 10, [8] * 100, seed=0, streams=16, window=16)
    first = {order.locate(p)[0].stream for p in range(16)}
    assert first == set(range(16))  # a batch of 16 has one of each stream
    assert not torch.equal(order.permutation(order.locate(0)[0]), torch.arange(16))


@pytest.mark.parametrize("batch", [6, 12, 24, 30])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_every_batch_without_gap_or_overlap(batch: int, ranks: int):
    for start in (0, batch, 7 * batch):
        each = [RankPositions(batch // ranks, rank, ranks, streams=12) for rank in range(ranks)]
        taken = [
            [p for stream in range(12) for p in of_rank.positions(start, stream)]
            for of_rank in each
        ]
        assert [len(t) for t in taken] == [batch // ranks] * ranks
        assert sorted(p for t in taken for p in t) == list(range(start, start + batch))


def test_ranks_own_whole_streams_where_the_numbers_divide():
    streams = [RankPositions(12, rank, 2, streams=12).own_streams() for rank in range(2)]
    assert streams == [range(6), range(6, 12)]
    # In smaller batches consecutive positions come to the same: rank 0 never needs a stream of rank
    # 1.
    smaller = [RankPositions(3, rank, 2, streams=12) for rank in range(2)]
    used = [
        {s for start in range(0, 60, 6) for s in range(12) if rank.positions(start, s)}
        for rank in smaller
    ]
    assert used[0] & used[1] == set()


@pytest.mark.parametrize("seed", range(10))
def test_the_chunks_of_an_epoch_have_every_sample_once(seed: int):
    draw = random.Random(seed)
    _, counts = random_set(draw)
    order = ChunkOrder(counts, seed, chunk_size=max(counts) + draw.randint(0, 20))
    for epoch in range(2):
        chunks = order.of_epoch(epoch)
        assert sorted(block for chunk in chunks for block in chunk.blocks) == list(
            range(len(counts))
        )
        assert all(
            chunk.size == sum(counts[b] for b in chunk.blocks) <= order.chunk_size
            for chunk in chunks
        )
        for p in range(order.count):
            chunk, offset = order.locate(epoch * order.count + p)
            assert chunk.first + offset == p
            assert 0 <= offset < chunk.size


SIZES = (29, 16, 3, 41, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five shards of unequal size: nothing divides anything."""
    path = tmp_path_factory.mktemp("set")
    train = [("train", random_samples(size, seed)) for seed, size in enumerate(SIZES)]
    save_latent_set(path, [*train, ("held_out", random_samples(5, 9))])
    return path


def streamed(folder: Path, **changes: object) -> StreamedLatents:
    settings = {
        "batch_size": 12,
        "seed": 0,
        "device": CPU,
        "streams": 6,
        "window": 5,
        "num_workers": 0,
    } | changes
    return StreamedLatents(path=str(folder), **settings)  # pyright: ignore[reportArgumentType]


# more workers than this machine has cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_readers_gives_one_stream(folder: Path, ranks: int, workers: int):
    """Disjoint, complete, the same; after a resume in the middle too, at another number of both."""
    whole = streamed(folder)
    loaders = [
        streamed(folder, batch_size=12 // ranks, rank=rank, world_size=ranks, num_workers=workers)
        for rank in range(ranks)
    ]
    for _ in range(3):
        assert_same(next(whole), by_position(joined([next(loader) for loader in loaders])))
    state = loaders[-1].state_dict()
    other = streamed(folder, num_workers=(workers + 1) % 3)
    other.load_state_dict(state)
    assert_same(next(whole), next(other))


def test_resuming_is_exact_at_every_cut(folder: Path):
    whole = list(islice(streamed(folder, batch_size=10), 21))  # two epochs of 101 samples
    for cut in range(21):
        loader = streamed(folder, batch_size=10)
        loader.load_state_dict({"samples_seen": 10 * cut})
        assert_same(next(loader), whole[cut])


def test_order_does_not_depend_on_reading_ahead(folder: Path):
    plain = streamed(folder)
    ahead = streamed(folder, num_workers=2, prefetch_factor=7)
    for _ in range(12):
        assert_same(next(plain), next(ahead))


@pytest.mark.parametrize(("persistent", "starts"), [(True, [0]), (False, [0, 108, 204])])
def test_workers_live_for_the_run_or_for_an_epoch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool, starts: list[int]
):
    """PyTorch's `persistent_workers`; the samples are the same."""
    began: list[int] = []
    start = StreamedLatents.start_reading

    def noted(self: StreamedLatents) -> Any:
        began.append(self.samples_seen)
        return start(self)

    monkeypatch.setattr(StreamedLatents, "start_reading", noted)
    loader = streamed(folder, persistent_workers=persistent)
    found = [next(loader) for _ in range(25)]  # 300 samples: three epochs of 101 have begun
    assert began == starts
    for batch, expected in zip(found, streamed(folder), strict=False):
        assert_same(batch, expected)


def test_streams_and_windows_are_part_of_the_order(folder: Path):
    first = next(streamed(folder)).ids
    assert not torch.equal(first, next(streamed(folder, streams=5)).ids)
    assert not torch.equal(first, next(streamed(folder, window=3)).ids)


@pytest.mark.parametrize(
    ("blocks", "streams"), [(1, 1), (2, 1), (20, 4), (196, 32), (256, 64), (1000, 64)]
)
def test_streams_follow_the_number_of_blocks(blocks: int, streams: int):
    """So that an epoch reads a block little more than once: two streams share the block between
    them."""
    assert fitting_streams(None, blocks, a_stream=1, allowed_gib=1.0) == streams
    order = StreamOrder([blocks], [8] * blocks, seed=0, streams=streams, window=8)
    reads = 0
    last = None
    for window in sorted({order.locate(position)[0] for position in range(order.count)}):
        touched = [block for block, _, _ in order.blocks_of(window)]
        kept = window.number and touched[0] == last  # a stream keeps its last block
        reads += len(touched) - bool(kept)
        last = touched[-1]
    assert blocks <= reads <= 1.25 * blocks


def test_the_memory_of_windows_is_bounded_and_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    """A stream takes two windows of 5 samples and a block of 4."""
    loader = streamed(folder, streams=None, host_memory_gib=1.0)
    assert loader.order.streams == 4  # of 26 blocks
    a_stream = 14 * max(place.block.size / place.block.samples for place in loader.blocks.places)
    said = capsys.readouterr().out
    assert "4 streams, windows of 5" in said
    assert (
        f"in each process windows take up to {4 * a_stream / 2**20:.2f} MiB and reading about"
        in said
    )
    assert streamed(folder, streams=None, host_memory_gib=3.1 * a_stream / 2**30).order.streams == 2
    assert streamed(folder, streams=3, host_memory_gib=3.1 * a_stream / 2**30).order.streams == 3
    for streams, sentence in (
        (6, "6 streams, .* or lower data.streams"),
        (None, "1 streams, .* or lower data.window"),
    ):
        with pytest.raises(
            ValueError, match=f"data.host_memory_gib=1e-09 is too little for {sentence}"
        ):
            streamed(folder, host_memory_gib=1e-9, streams=streams)


def test_a_resumed_run_keeps_its_streams(folder: Path):
    began = streamed(folder, streams=5)
    first = next(began)
    second = next(began)
    resumed = streamed(folder, streams=None)
    resumed.load_state_dict({"samples_seen": 12, "streams": 5})
    assert_same(next(resumed), second)
    resumed.load_state_dict({"samples_seen": 0, "streams": 5})
    assert_same(next(resumed), first)
    with pytest.raises(
        ValueError, match=r"data.streams=6, but the run began with 5; leave data.streams out"
    ):
        streamed(folder).load_state_dict(began.state_dict())
    resumed.load_state_dict({"samples_seen": 12})  # of an earlier version, whose default this was
    assert resumed.order.streams == 64


def test_streamed_samples_are_those_of_the_set(folder: Path):
    loader = streamed(folder, batch_size=101)
    batch = next(loader)
    parts = [random_samples(size, seed) for seed, size in enumerate(SIZES)]
    whole = LatentTensors(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    raw = sampled(whole.rows(batch.ids), loader.seed, batch.position)
    assert torch.equal(batch.latents, loader.normalise(raw))
    assert torch.equal(batch.labels, whole.labels[batch.ids])
    assert torch.equal(batch.ids.sort().values, torch.arange(101))


def chunked(folder: Path, chunk_size: int = 15, **changes: object) -> ResidentLatents:
    room = 2 * chunk_size * 240 / 2**30  # two chunks of samples of 240 bytes
    settings = {"batch_size": 10, "seed": 0, "device": CPU, "device_memory_gib": room} | changes
    return ResidentLatents(path=str(folder), **settings)  # pyright: ignore[reportArgumentType]


def test_a_set_that_does_not_fit_comes_in_chunks_and_says_why(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    loader = chunked(folder)
    assert isinstance(loader.loader, ChunkedLatents)
    said = capsys.readouterr().out
    assert "a window of" in said
    assert "are allowed (as given)" in said
    ResidentLatents(path=str(folder), batch_size=2, seed=0, device=CPU)
    assert "all of it on the device" in capsys.readouterr().out


def test_chunks_resume_exactly_at_every_cut_and_keep_their_size(folder: Path):
    whole = list(islice(chunked(folder), 21))
    state = chunked(folder).state_dict()
    for cut in range(21):
        loader = chunked(folder, chunk_size=40 if cut % 2 else 15)
        loader.load_state_dict(state | {"samples_seen": 10 * cut})
        assert_same(next(loader), whole[cut])


def test_a_chunk_too_small_for_a_block_is_refused(folder: Path):
    with pytest.raises(
        ValueError, match=r"a window of 2 samples holds not even one block of 4; raise data.device"
    ):
        chunked(folder, chunk_size=2)


def test_a_run_is_not_resumed_in_the_other_mode(folder: Path):
    loader = ResidentLatents(path=str(folder), batch_size=2, seed=0, device=CPU)
    with pytest.raises(ValueError, match=r"started with a window of the set.*device_memory_gib"):
        loader.load_state_dict({"samples_seen": 4, "window": 15})


def test_int8_states_its_error_and_keeps_to_it(folder: Path, capsys: pytest.CaptureFixture[str]):
    exact = ResidentLatents(path=str(folder), batch_size=101, seed=0, device=CPU)
    small = ResidentLatents(path=str(folder), batch_size=101, seed=0, device=CPU, storage="int8")
    stated = (
        float(capsys.readouterr().out.partition("int8 moves a latent by ")[2].partition("%")[0])
        / 100
    )
    raw, rounded = (rows(loader) for loader in (exact, small))
    error = (raw - rounded).square().mean((0, 2, 3)).sqrt() / torch.tensor(exact.spec.std)
    assert 0.0 < stated < 0.02
    assert abs(error.max().item() - stated) < 1e-4
    largest = raw.abs().amax((2, 3), keepdim=True)
    assert ((raw - rounded).abs() <= largest / 254 * 1.001).all()


def rows(loader: ResidentLatents) -> Tensor:
    return loader.loader.train.rows(torch.arange(101)).floating().float()  # pyright: ignore[reportAttributeAccessIssue]
