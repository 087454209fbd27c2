"""The order of a streamed set is a pure function, and readers lose no sample and read none twice,
however ranks and workers divide it."""

import pickle
import random
import re
from itertools import islice

import pytest
import torch

from common.text import format_bytes
from data.loader import LatentTensors, draw_samples
from data.order import ChunkOrder, RankPositions, StreamOrder
from data.resident import ChunkedSet
from data.streamed import StreamDataset, StreamedLatents, choose_stream_count
from tests.harness.batches import (
    assert_same,
    chunked,
    join,
    resident,
    sort_by_position,
    streamed,
    take,
)
from tests.harness.refusals import expect_refusal
from tests.harness.sets import draw_random_samples, save_random_set


def find_sample(order, position):
    """Finds (block, row) of the sample at a position, from the definition alone."""
    window, offset = order.locate(position)
    rows = [
        (block, row + i) for block, row, count in order.find_blocks(window) for i in range(count)
    ]
    assert len(rows) == window.size
    return rows[int(order.draw_permutation(window)[offset])]


@pytest.mark.parametrize("seed", range(25))
def test_every_sample_comes_once_in_each_epoch(seed):
    draw = random.Random(seed)
    blocks = [draw.randint(1, 4) for _ in range(draw.randint(1, 7))]
    counts = [draw.randint(1, 9) for _ in range(sum(blocks))]
    streams = draw.randint(1, 9)
    order = StreamOrder(blocks, counts, seed, streams=streams, window=draw.randint(1, 12))
    samples = [(block, row) for block, count in enumerate(counts) for row in range(count)]
    stream = [find_sample(order, position) for position in range(2 * order.count)]
    first = stream[: order.count]
    second = stream[order.count :]
    assert sorted(first) == sorted(second) == samples
    assert first != second or len(samples) <= 12


def test_a_worker_that_is_spawned_reads_the_same(folder):
    """On macOS a worker gets the data set as a pickle."""
    loader = streamed(folder, batch_size=7)
    dataset = StreamDataset(loader.order, loader.blocks, loader.rank_positions, 14)
    latents, positions, _ = next(iter(dataset))
    other_latents, other_positions, _ = next(iter(pickle.loads(pickle.dumps(dataset))))
    assert torch.equal(latents, other_latents)
    assert positions == other_positions
    assert sorted(positions) == list(range(14, 21))


def test_windows_end_at_different_times():
    """Otherwise all streams would read at once."""
    order = StreamOrder([40], [64] * 40, seed=0, streams=8, window=32)
    lengths = []
    for stream in range(8):
        row = 1
        while order.locate(stream + 8 * row)[0].number == 0:
            row += 1
        lengths.append(row)
    assert len(set(lengths)) == 8


def test_a_window_is_shuffled(folder):
    ids = next(streamed(folder, streams=1, window=101, batch_size=101)).ids
    assert (ids.diff() == 1).sum() < 20, "blocks have four samples in order"


def test_ranks_own_whole_streams_where_the_numbers_divide():
    streams = [RankPositions(12, rank, 2, streams=12).find_streams() for rank in range(2)]
    assert streams == [range(6), range(6, 12)]


def test_the_chunks_of_an_epoch_have_every_sample_once():
    order = ChunkOrder([3, 9, 1, 5, 7], seed=0, chunk_size=12)
    for epoch in range(2):
        blocks = [block for chunk in order.find_epoch(epoch) for block in chunk.blocks]
        assert sorted(blocks) == [0, 1, 2, 3, 4]
        for position in range(25):
            chunk, offset = order.locate(25 * epoch + position)
            assert chunk.first + offset == position
            assert 0 <= offset < chunk.size <= 12


SIZES = (29, 16, 3, 41, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five shards of unequal size: nothing divides anything."""
    return save_random_set(tmp_path_factory.mktemp("set"), *SIZES, held_out=5)


# worker processes may outnumber the cores
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("ranks", "workers", "streams"), [(1, 4, 6), (2, 0, 5), (2, 2, 12), (3, 1, 8), (4, 3, 6)]
)
def test_any_number_of_readers_gives_one_stream(folder, ranks, workers, streams):
    """A resume at other numbers of ranks and workers continues it."""
    whole = streamed(folder, streams=streams)
    settings = {"batch_size": 12 // ranks, "world_size": ranks, "num_workers": workers}
    settings["streams"] = streams
    loaders = [streamed(folder, rank=rank, **settings) for rank in range(ranks)]
    for _ in range(3):
        assert_same(next(whole), sort_by_position(join(map(next, loaders))))
    resumed = streamed(folder, streams=streams, num_workers=(workers + 1) % 3)
    resumed.load_state_dict(loaders[-1].state_dict())
    assert_same(next(whole), next(resumed))


@pytest.mark.parametrize("open_set", [streamed, chunked])
def test_resuming_is_exact_at_every_cut(folder, open_set):
    whole = list(islice(open_set(folder, batch_size=10), 21))  # two epochs of 101 samples
    state = open_set(folder).state_dict()
    for cut, batch in enumerate(whole):
        loader = open_set(folder, batch_size=10)
        loader.load_state_dict(state | {"samples_seen": 10 * cut})
        assert_same(next(loader), batch)


@pytest.mark.parametrize(("persistent", "starts"), [(True, [0]), (False, [0, 108, 204])])
def test_workers_live_for_the_run_or_for_an_epoch(folder, monkeypatch, persistent, starts):
    """`persistent_workers` of PyTorch changes no sample."""
    actual_starts = []
    start_reading = StreamedLatents.start_reading

    def start_and_note(self):
        actual_starts.append(self.samples_seen)
        return start_reading(self)

    monkeypatch.setattr(StreamedLatents, "start_reading", start_and_note)
    stream = take(streamed(folder, persistent_workers=persistent), 25)
    assert actual_starts == starts  # 300 samples reach into the third epoch of 101
    assert_same(stream, take(streamed(folder), 25))


@pytest.mark.parametrize(("blocks", "streams"), [(1, 1), (20, 4), (196, 32), (1000, 64)])
def test_streams_follow_the_number_of_blocks(blocks, streams):
    """Two streams share the block between them, so each stream must have several blocks for an
    epoch to read a block little more than once."""
    assert choose_stream_count(None, blocks, stream_bytes=1, allowed_gib=1.0) == streams
    order = StreamOrder([blocks], [8] * blocks, seed=0, streams=streams, window=8)
    reads = 0
    last = None
    for window in sorted({order.locate(position)[0] for position in range(order.count)}):
        numbers = [block for block, _, _ in order.find_blocks(window)]
        kept = window.number > 0 and numbers[0] == last  # a stream keeps its last block
        reads += len(numbers) - kept
        last = numbers[-1]
    assert blocks <= reads <= 1.25 * blocks


def test_the_memory_of_windows_is_bounded_and_said(folder, capsys):
    loader = streamed(folder, streams=None, host_memory_gib=1.0)
    assert loader.order.streams == 4  # of 26 blocks

    # a stream holds two windows of 5 samples and a block of 4
    a_stream = 14 * max(place.block.size / place.block.samples for place in loader.blocks.places)
    assert f"windows take up to {format_bytes(4 * a_stream)}" in capsys.readouterr().out
    for streams, expected in ((None, 2), (3, 3)):
        loader = streamed(folder, streams=streams, host_memory_gib=3.1 * a_stream / 2**30)
        assert loader.order.streams == expected
    for streams, advice in ((6, "6 streams, .* data.streams"), (None, "1 streams, .* data.window")):
        with expect_refusal(f"data.host_memory_gib=1e-09 is too little for {advice}"):
            streamed(folder, host_memory_gib=1e-9, streams=streams)


def test_a_resumed_run_keeps_its_streams(folder):
    original = streamed(folder, streams=5)
    batches = list(islice(original, 2))
    resumed = streamed(folder, streams=None)
    for number in (1, 0):
        resumed.load_state_dict({"samples_seen": 12 * number, "streams": 5})
        assert_same(next(resumed), batches[number])
    with expect_refusal(r"data.streams=6, but the run began with 5; leave data.s"):
        streamed(folder).load_state_dict(original.state_dict())


@pytest.mark.parametrize("open_set", [resident, chunked, streamed])
def test_samples_are_those_of_the_set(folder, open_set):
    loader = open_set(folder, batch_size=10)
    stream = take(loader, 11)  # more than an epoch of 101
    parts = [draw_random_samples(size, seed) for seed, size in enumerate(SIZES)]
    whole = LatentTensors(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    raw = draw_samples(whole.gather(stream.ids), 0, stream.position)
    assert torch.equal(stream.latents, loader.normalise(raw))
    assert torch.equal(stream.condition.labels, whole.labels[stream.ids])
    held_out = draw_random_samples(5, 9)["latents"]
    assert torch.equal(join(loader.held_out(5)).latents, loader.normalise(held_out))


def test_a_set_that_does_not_fit_comes_in_chunks_and_says_why(folder, capsys):
    """A resumed run keeps their size."""
    original = chunked(folder)
    assert isinstance(original.samples, ChunkedSet)
    assert re.search(r"are allowed \(as given\), so a chunk of", capsys.readouterr().out)
    state = original.state_dict()
    resumed = chunked(folder, 40)
    resumed.load_state_dict(state)
    assert_same(take(resumed, 12), take(original, 12))
    with expect_refusal(r"started with a chunk of the set.*device_memory_gib"):
        resident(folder).load_state_dict(state)
    with expect_refusal(r"a chunk of 2 samples holds not even one block of 4; raise data.device"):
        chunked(folder, 2)


def test_int8_states_its_error_and_keeps_to_it(folder, capsys):
    exact = resident(folder)
    samples = [
        loader.whole.train.gather(torch.arange(101)).as_floating().float()
        for loader in (exact, resident(folder, storage="int8"))
    ]
    percent = re.search(r"int8 moves a latent by ([\d.]+)%", capsys.readouterr().out)
    stated = float(percent[1]) / 100
    raw, rounded = samples
    error = (raw - rounded).square().mean((0, 2, 3)).sqrt() / torch.tensor(exact.spec.std)
    assert 0.0 < stated < 0.02
    assert abs(error.max().item() - stated) < 1e-4
    largest = raw.abs().amax((2, 3), keepdim=True)
    assert ((raw - rounded).abs() <= largest / 254 * 1.001).all()
