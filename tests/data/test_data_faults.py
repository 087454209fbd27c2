"""Faults of latent sets and loaders: each ends in one sentence, or the loader skips the damage and
counts it."""

import multiprocessing
import shutil
import threading
from itertools import islice
from multiprocessing.process import BaseProcess

import pytest
import torch

from common.config.build import build
from common.config.compose import compose
from common.config.paths import refuse_no_weights
from data.digits import DigitLatents
from data.manifest import read_manifest
from data.streamed import StreamDataset
from encoding.decoding import DecodedImages, make_decoding_loader
from tests.harness.batches import LOADERS, assert_same
from tests.harness.outcomes import read_lines
from tests.harness.refusals import expect_refusal
from tests.harness.sets import draw_random_samples, flip_byte, save_latent_set, save_random_set
from tests.harness.steps import tiny_training
from tests.harness.words import CPU

KINDS = ["resident", "chunks", "webdataset", "webdataset, 2 workers"]
SHARD = "train-00001.tar"


def load(kind, path, **changes):
    return LOADERS[kind](path, **{"batch_size": 7} | changes)


@pytest.fixture
def folder(tmp_path):
    """Three training shards of 20, in blocks of four, and a held-out one."""
    return save_random_set(tmp_path / "set", 20, 20, 20, held_out=8)


def find_block(folder, shard, block):
    """Finds the file, the offset and the size of a block."""
    about = read_manifest(folder).shards[shard]
    return folder / about.file, about.blocks[block].offset, about.blocks[block].size


def cut_shard(folder):
    file, offset, size = find_block(folder, 1, 2)
    file.write_bytes(file.read_bytes()[: offset + size // 2])


def flip_bit(folder):
    file, offset, size = find_block(folder, 1, 2)
    flip_byte(file, offset + size - 3)


def delete_shard(folder):
    (folder / SHARD).unlink()


def write_nan(folder):
    """Another tool wrote it: the hash is right, the content is not."""
    samples = [draw_random_samples(20, seed) for seed in range(3)]
    samples[1]["latents"][9, 0, 0, 0] = float("nan")
    shards = [("train", tensors) for tensors in samples]
    save_latent_set(folder, [*shards, ("held_out", draw_random_samples(4, 9))])


DAMAGES = [
    (cut_shard, " of train) ends early", 12),
    (flip_bit, "(samples 28–31 of train) is damaged: its sha256", 4),
    (delete_shard, " of train) is missing", 20),
    (write_nan, "(samples 28–31 of train) holds latents that are not finite", 4),
]
every_damage_and_kind = pytest.mark.parametrize(
    ("kind", "plant", "sentence", "lost"),
    [(kind, *damage) for i, kind in enumerate(KINDS) for damage in (DAMAGES[i - 1], DAMAGES[i])],
)


@every_damage_and_kind
@pytest.mark.fault("damaged or missing shards", "one sentence that names shard and samples")
def test_damage_ends_in_one_sentence(folder, kind, plant, sentence, lost):
    plant(folder)
    with expect_refusal(SHARD) as error:
        list(islice(load(kind, folder), 10))  # more than an epoch
    message = str(error.value)
    assert sentence in message
    assert "run precompute_latents.py again to rebuild it, or set data.on_corrupt=skip" in message


@every_damage_and_kind
def test_or_is_skipped_and_counted(folder, kind, plant, sentence, lost, capsys):
    """Other samples stand in: the stream stays as long as it was, and a resume stays exact."""
    plant(folder)
    loader = load(kind, folder, on_corrupt="skip")
    resumed = load(kind, folder, on_corrupt="skip")
    batches = list(islice(loader, 18))  # two epochs of 60
    epoch = torch.cat([batch.ids for batch in batches])[:60]
    assert len(epoch.unique()) == 60 - lost
    assert all(batch.latents.isfinite().all() for batch in batches)
    resumed.load_state_dict(resumed.state_dict() | {"samples_seen": 35})
    assert_same(next(resumed), batches[5])
    output = capsys.readouterr().out
    assert SHARD in output
    assert f"({lost} so far)" in output


@pytest.mark.parametrize("words", [["data=resident"], ["data=webdataset", "data.num_workers=0"]])
def test_a_run_on_damaged_data_says_so_at_its_end(folder, run, run_dir, words, capsys):
    """Its metrics and its summary keep the count after a resume on the repaired set, because its
    weights have seen the stand-ins."""
    files = {file: file.read_bytes() for file in folder.glob("*.tar")}
    flip_bit(folder)
    held_out, offset, _ = find_block(folder, 3, 1)
    held_out.write_bytes(held_out.read_bytes()[: offset + 100])
    words = [*words, f"data.path={folder}", "data.on_corrupt=skip", "save_every=5", "eval_every=5"]
    words += ["model=conv_xs", "log_every=100"]
    summary = run(*words, "total_samples=80")
    lost = [f"{SHARD} (samples 28–31 of train)", "held_out-00003.tar (samples 4–7 of held_out)"]
    assert summary["skipped_data"] == dict.fromkeys(lost, 4)
    sentence = f"8 samples of 2 damaged blocks were replaced by others: {', '.join(lost)}"
    assert sentence in capsys.readouterr().out

    for file, content in files.items():
        file.write_bytes(content)
    assert run(*words, "total_samples=120")["skipped_data"] == summary["skipped_data"]
    assert read_lines(run_dir)[-1]["skipped_data"] == 8


def test_a_loader_that_fails_leaves_no_worker_behind(folder, monkeypatch):
    workers = []
    start = BaseProcess.start

    def start_and_note(worker):
        workers.append(worker)
        start(worker)

    monkeypatch.setattr(BaseProcess, "start", start_and_note)
    flip_bit(folder)
    with expect_refusal("is damaged"):
        list(islice(load("webdataset, 2 workers", folder), 10))

    # PyTorch terminates a worker that was not asked to end: its code is not 0
    assert [worker.exitcode for worker in workers] == [0, 0]


def test_nothing_left_to_stand_in_is_an_error(folder):
    for file in folder.glob("train*.tar"):
        file.unlink()
    with expect_refusal("not one block can be read"):
        next(load("webdataset", folder, on_corrupt="skip"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"streams": 0}, "data.streams=0 must be at least 1"),
        ({"timeout": 0.0}, "data.timeout=0.0 must be above 0"),
        ({"on_corrupt": "ignore"}, "data.on_corrupt=ignore must be 'error' or 'skip'"),
        ({"path": None}, "data=webdataset needs data.path=<folder of latents>.*data=digits"),
        ({"path": "pipe:curl x"}, "pipes and chained URLs are not opened"),
        ({"path": "simplecache::s3://x"}, "pipes and chained URLs are not opened"),
        ({"path": "http://x/y?a=1#part"}, "data.path=http://x/y has a fragment behind a #; leave"),
    ],
)
def test_settings_that_cannot_be_are_refused(folder, changes, sentence):
    node = compose(["data=webdataset"]).cfg.data | {"path": str(folder)} | changes
    with expect_refusal(sentence):
        build(node, "data", batch_size=2, seed=0, device=CPU)


def test_a_latent_set_is_no_weights(folder):
    """It has a manifest.json, as a checkpoint has."""
    with expect_refusal(r"init_from=.* has no checkpoints and no state.json .*name a run that has"):
        refuse_no_weights("init_from", str(folder))


@pytest.mark.parametrize("classes", [[0, 0], [10], []])
def test_classes_that_there_are_not_are_refused(classes):
    with expect_refusal(r"data.classes=.* must be digits from 0 to 9, each once"):
        DigitLatents(classes=classes, batch_size=2, seed=0, device=CPU)


@pytest.mark.fault("a worker of the loader killed", "one sentence, within its timeout")
def test_a_killed_worker_is_named(folder):
    loader = load("webdataset, 2 workers", folder)
    next(loader)
    for worker in multiprocessing.active_children():
        worker.kill()
    with expect_refusal(r"a reader of data=webdataset died .*start the same command again"):
        list(islice(loader, 100))


@pytest.mark.fault(
    "/dev/shm too small for the batches of workers", "one sentence at the start, with --shm-size"
)
def test_small_shared_memory_is_refused(folder, monkeypatch):
    usage = shutil.disk_usage("/dev/shm")._replace(free=192 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    sentence = r"need {} MiB of /dev/shm, which has 0\.2 MiB free; .*--shm-size=1g"
    with expect_refusal(sentence.format(r"1\.0")):
        next(load("webdataset, 2 workers", folder))
    images = DecodedImages([None] * 16, 256)
    with expect_refusal(r"that decode images " + sentence.format(r"19\.0")):
        make_decoding_loader(images, [16], workers=2)

    # without workers no batch passes through shared memory
    next(load("webdataset", folder))
    make_decoding_loader(images, [16], workers=0)


@pytest.mark.fault(
    "readers that give no batch any more", "the run ends within runtime.parallel.timeout_minutes"
)
def test_readers_that_stop_are_not_waited_for(folder, monkeypatch):
    """A worker that finds /dev/shm full drops its batch and lives on."""
    released = threading.Event()
    monkeypatch.setattr(StreamDataset, "collect_batch", lambda *arguments: released.wait())
    loader = load("webdataset", folder)
    loader.wait_for_batch_seconds = 0.1
    with expect_refusal(r"gave no batch for 0\.00\d+ minutes .*timeout_minutes"):
        next(loader)
    released.set()


def test_the_patience_of_a_loader_is_that_of_the_run():
    loader = tiny_training("conv", "runtime.parallel.timeout_minutes=0.5").loader
    assert loader.wait_for_batch_seconds == 30.0
