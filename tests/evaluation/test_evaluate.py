"""The figures of a run, during it and after it: the same from the loop, from the command and from
two processes."""

import json
import os
import shutil
from multiprocessing import get_context
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from PIL import Image

from common.config.compose import compose
from common.config.schema import FdConfig
from common.distributed.ranks import SINGLE
from common.files import read_object
from evaluation import evaluator as comparing
from evaluation.distances import collect_stats, compute_figures
from evaluation.evaluator import Evaluator, make_folder_source
from models.autoencoders import PixelAutoencoder
from sampling import draw
from sampling.draw import ResumableChunks
from scripts.evaluate import EvaluateConfig, evaluate_run
from tests.harness.draws import kill_at_piece
from tests.harness.outcomes import read_lines
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU, TINY_MODEL
from tests.harness.zygote import find_free_port
from train import train
from training.drawing import SampleStream
from training.inputs import build_loader

DIGITS = {"_target_": "data.digits.DigitLatents"}
RUN = [
    "total_samples=128",
    "batch_size=32",
    "optim.lr=2e-2",
    "schedule.warmup_samples=0",
    "eval_every=2",
    "fd_every=2",
    "sample_every=0",
    "save_every=2",
    "keep_checkpoints=1",
    "keep_best=fd_encoder",
    "fd.count=200",
    "ema.half_life_samples=500",
    "ema.ramp=10",
    "sampling.steps=2",
    "runtime.precision=fp32",
    *TINY_MODEL,
]
CHUNKS = {"count": 1100, "batch_size": 64, "steps": 1, "features": ["encoder"]}
"""Settings of an evaluation in three pieces."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps of a tiny model on digits, which measured its distances at the second and the
    fourth. Read only."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    summary = train(compose([*RUN, f"run_dir={folder}"]))

    # distances do not count as time of training
    seconds = sum(line["distances_s"] for line in read_lines(folder))
    assert summary["maintenance_seconds"] > seconds > 0
    return folder


def evaluate(out, run_dir, /, **changes):
    settings = {"count": 200, "batch_size": 16, "device": "cpu"}
    settings |= {"out": out and str(out), "run_dir": run_dir and str(run_dir)}
    results = evaluate_run(EvaluateConfig(**settings | changes))
    return results[0] if len(results) == 1 else results


@pytest.fixture(scope="module")
def result(trained, tmp_path_factory):
    """The evaluation of `trained`."""
    return evaluate(tmp_path_factory.mktemp("result") / "out", trained)


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory):
    """The features' figures of an evaluation in three pieces that nothing interrupts."""
    return evaluate(tmp_path_factory.mktemp("whole") / "out", trained, **CHUNKS)["features"]


def test_halves_of_the_digits_give_the_floor_and_noise_a_large_figure():
    """tests/house/test_digits.py finds samples of a trained model between the two."""
    spec = build_loader(DIGITS, 0, 64, CPU).spec
    cfg = FdConfig(reference_count=50_000)
    evaluator = Evaluator(cfg, spec, DIGITS, PixelAutoencoder(), CPU, SINGLE)
    assert evaluator.source.facts["kind"] == "reconstructions"
    (batches,) = evaluator.source.images([range(1617)])
    digits = torch.cat(list(batches))
    assert len(digits) == evaluator.source.facts["count"] == 1617

    originals = evaluator.collect_originals(spec, DIGITS, SINGLE)
    assert [part["encoder"].all.count for part in originals] == [1617, 180]

    def compare(images):
        stats = collect_stats(map(evaluator.compute_features, images.split(300)))
        return compute_figures(stats, evaluator.reference, *originals)

    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, digits.shape, dtype=torch.uint8, generator=draw)
    same, other = map(compare, (digits, noise))
    for name in ("encoder", "random"):
        of_digits = same[name]
        of_noise = other[name]
        assert abs(of_digits["fd"]) < 1e-6
        for share in ("precision", "recall", "copied"):
            assert of_digits[share] == 1.0
        assert of_noise["copied"] == 0.0
        assert of_noise["precision"] < 0.1
        assert 0.0 < of_digits["floor_fd"] < of_noise["fd"] / 20
        assert abs(of_digits["floor_kd"]) < of_noise["kd"] / 20


def test_the_figure_of_a_run_is_that_of_the_command_and_its_own(trained, result, tmp_path):
    """The loop draws from the averages it holds, the command from those of a checkpoint. The tiny
    model has seen 128 samples, so its averages are far from its weights. 200 samples are enough for
    64 features of the encoder, and not for 256 random ones."""
    _, last = read_lines(trained)
    assert "fd_random" not in last
    assert result["protocol"]["weights"]["kind"] == "ema"
    figures = result["features"]
    for name in ("encoder", "random"):
        assert figures[name]["kd"] == pytest.approx(last[f"kd_{name}"], rel=1e-4)
    assert figures["encoder"]["fd"] == pytest.approx(last["fd_encoder"], rel=1e-5)
    assert figures["random"]["fd"] is None
    protocol = read_object(trained / "fd_protocol.json")
    assert protocol["features"] == result["protocol"]["features"]
    assert protocol["floors"]["encoder"]["floor_fd"] == figures["encoder"]["floor_fd"]
    weights = trained / "checkpoints" / "step-4" / "model.safetensors"
    raw = evaluate(tmp_path / "raw", None, weights=str(weights), features=["encoder"])
    assert raw["protocol"]["weights"]["kind"] == "model"
    assert abs(raw["features"]["encoder"]["fd"] / figures["encoder"]["fd"] - 1) > 0.01


def test_the_count_that_is_needed_is_said_before_samples_are_drawn(trained, tmp_path, capsys):
    evaluate(tmp_path / "few", trained, count=100, steps=1, features=["encoder"])
    output = capsys.readouterr().out
    note = output.index(
        "note: encoder: fd of 64 features needs more than 128 samples, there are 100"
    )
    assert note < output.index("100 samples from")


def test_the_best_checkpoint_is_kept_by_the_distance_that_was_asked_for(trained):
    best = min(read_lines(trained), key=lambda line: line["fd_encoder"])["step"]
    checkpoints = {file.name for file in (trained / "checkpoints").glob("step-*")}
    assert checkpoints == {f"step-{best}", "step-4"}
    with expect_refusal("keep_best=fd_random: fd of 256 features needs more than 512"):
        train(compose([*RUN, f"run_dir={trained}-other", "keep_best=fd_random"]))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["keep_best=fd_random", "fd_every=0"],
            "keep_best=fd_random needs that figure at every checkpoint",
        ),
        (["keep_best=fd_random", "fd_every=3", "save_every=4"], "divisor of save_every=4"),
        (
            ["keep_best=fd_inception"],
            "choose eval_loss, fd_encoder, fd_random, kd_encoder, kd_random",
        ),
    ],
)
def test_a_figure_that_no_checkpoint_has_cannot_choose_the_best(words, sentence):
    with expect_refusal(sentence):
        compose(words)


def test_the_result_says_all_that_the_figures_depend_on(trained, tmp_path, capsys):
    settings = {"labels": [3], "steps": 3, "seed": 2}
    result = evaluate(tmp_path / "out", trained, **settings)
    assert read_object(tmp_path / "out.json") == json.loads(json.dumps(result))
    figures = result["features"]
    assert "fd of 256 features needs more than 512 samples" in figures["random"]["why"]
    assert figures["random"]["why"] in capsys.readouterr().out
    protocol = result["protocol"]
    assert protocol.items() >= {**settings, "count": 200, "solver": "heun", "shift": 1.0}.items()
    keys = "guidance guidance_interval precision data autoencoder quantisation rows neighbours"
    assert protocol.keys() >= {*keys.split(), "reference", "features", "weights"}
    assert protocol["reference"].keys() >= {"kind", "sha256", "count", "resize"}
    assert len(protocol["weights"]["sha256"]) == 64
    assert not list(tmp_path.glob("*.parts"))


def test_a_killed_command_goes_on_to_the_same_figures(trained, whole, tmp_path):
    """It dies in the second of three pieces."""
    out = tmp_path / "samples"
    kill_at_piece(
        lambda number, folder: number == 1 and folder.suffix == ".parts",
        lambda: evaluate(out, trained, **CHUNKS),
    )
    assert len(list((tmp_path / "samples.parts").glob("*.safetensors"))) == 1
    assert evaluate(out, trained, **CHUNKS)["features"] == whole


def evaluate_share(call):
    """Evaluates as one of two processes that torchrun starts."""
    rank, port, out, trained = call
    facts = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT={port}"
    os.environ.update(word.split("=") for word in facts.split())
    return evaluate(out, trained, **CHUNKS)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_come_to_the_same_figures(trained, whole, tmp_path):
    port = find_free_port()
    calls = [(rank, port, tmp_path / "two", trained) for rank in (0, 1)]
    with get_context("fork").Pool(2) as pool:
        # one that fails ends the other, too
        none, result = sorted(pool.imap_unordered(evaluate_share, calls), key=len)
    assert result["features"]["encoder"] == pytest.approx(whole["encoder"], rel=1e-9)
    assert none == []


def save_flat(folder, count):
    folder.mkdir()
    for i in range(count):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / f"{i}.bmp")
    return str(folder)


def test_a_folder_of_images_is_a_reference_and_is_read_once(trained, tmp_path, monkeypatch):
    folder = tmp_path / "images"
    save_flat(folder, 200)
    (folder / "damaged.png").write_bytes(b"no image")
    folder.chmod(0o555)  # a read-only set works
    settings = {"reference": str(folder), "reference_count": 400}
    result = evaluate(tmp_path / "a", trained, **settings)
    facts = result["protocol"]["reference"]
    assert (facts["kind"], facts["count"]) == ("images", 200)
    monkeypatch.setattr(comparing, "DecodedImages", None)  # the reference is not read again
    assert evaluate(tmp_path / "b", trained, **settings)["features"] == result["features"]


def test_other_pixels_are_another_reference(tmp_path):
    """Names and sizes do not change, and the folder needs no classes."""
    cfg = FdConfig(reference=save_flat(tmp_path / "flat", 9))
    first, again = (make_folder_source(cfg, 8, 8).facts for _ in range(2))
    assert first == again
    Image.new("RGB", (8, 8), (99, 0, 0)).save(tmp_path / "flat" / "3.bmp")
    assert make_folder_source(cfg, 8, 8).facts["sha256"] != first["sha256"]


def test_one_run_has_distances_of_one_protocol(trained, run_dir):
    """A resume that would measure otherwise is refused, and the protocol stays."""
    folder = shutil.copytree(trained, run_dir)
    before = (folder / "fd_protocol.json").read_bytes()
    words = [*RUN, f"run_dir={folder}", "total_samples=192"]
    with expect_refusal(r"distances of another protocol: steps was 2, is 3\. Set that back"):
        train(compose([*words, "sampling.steps=3"]))
    assert (folder / "fd_protocol.json").read_bytes() == before
    train(compose(words))
    assert [line["step"] for line in read_lines(folder)] == [2, 4, 6]


def test_samples_that_are_not_finite_have_no_figures(
    trained, tmp_path, run_dir, monkeypatch, capsys
):
    """An 8-bit image of NaN looks like any other. A run warns and goes on, a command stops with a
    sentence."""
    bad = torch.zeros(16).long(), torch.full((16, 1, 8, 8), torch.nan)
    monkeypatch.setattr(SampleStream, "draw_batch", lambda self, number: bad)
    with expect_refusal("draws samples that are not finite"):
        evaluate(tmp_path / "out", trained)
    assert train(compose([*RUN, f"run_dir={run_dir}", "keep_best=eval_loss"]))["steps"] == 4
    assert "warning: samples are not finite" in capsys.readouterr().out
    assert not any("kd_encoder" in line for line in read_lines(run_dir))


def test_what_cannot_be_evaluated_is_said(trained, tmp_path):
    weights = str(tmp_path / "copied.safetensors")
    shutil.copy(trained / "checkpoints" / "step-4" / "ema.safetensors", weights)
    few = save_flat(tmp_path / "few", 3)
    for changes, sentence in (
        ({"run_dir": None, "weights": weights}, "give reference=<folder>"),
        ({"run_dir": None, "weights": weights, "out": None}, "out is not set"),
        ({"features": ["encodr"]}, "features=encodr is unknown"),
        ({"reference": few}, "gives 3 images to compare with; give 8 or more"),
        ({"reference_count": 2}, "reference_count=2 must be at least 8"),
    ):
        with expect_refusal(sentence):
            evaluate(tmp_path / "out", trained, **changes)


def test_a_reference_that_another_process_makes_is_waited_for(tmp_path, monkeypatch):
    """`waits=True` waits for the lock; without it the command is refused."""
    held = ValueError("held")
    lock_folder = Mock(wraps=draw.lock_folder, side_effect=[held, held, DEFAULT, held])
    monkeypatch.setattr(draw, "lock_folder", lock_folder)
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    chunks = ResumableChunks(tmp_path / "waits", {}, 1, 1, SINGLE, waits=True)
    assert chunks.list_missing_chunks() == [0]
    with pytest.raises(ValueError, match="held"):
        ResumableChunks(tmp_path / "refused", {}, 1, 1, SINGLE)
