"""`scripts.evaluate` with several scales of guidance, and several lengths of averages."""

import shutil
import sys
from pathlib import Path

import pytest
import torch

from common.config.compose import compose, parse_words
from common.distributed.ranks import SINGLE
from common.files import read_object
from models.denoiser import Denoiser
from sampling.draw import DrawConfig, SampleJob
from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.sample import SampleConfig
from tests.harness.draws import kill_at_piece
from tests.harness.refusals import expect_refusal
from tests.harness.words import TINY_MODEL
from train import train
from training.drawing import draw_streams

RUN = """total_samples=128 batch_size=32 optim.lr=2e-2 eval_every=0 sample_every=0 ema.snapshots=4
runtime=eager"""
SETTINGS = "device=cpu count=600 batch_size=16 seed=1 features=[encoder] steps=2 solver=ab2"
SCALES = [1, 1.25, 3.5]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps of a tiny model of digits, with a snapshot at each."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    train(compose([*RUN.split(), *TINY_MODEL, f"run_dir={folder}"]))
    return folder


def evaluate(*words):
    return evaluate_run(parse_words(EvaluateConfig, [*SETTINGS.split(), *words], ""))


@pytest.mark.parametrize("solver", ["euler", "heun", "ab2", "sde"])
@pytest.mark.parametrize("interval", [[0.0, 1.0], [0.1, 0.7]])
def test_scales_share_calls_and_draw_what_each_draws_alone(solver, interval, trained, monkeypatch):
    forward = Denoiser.forward
    sizes = []

    def count(self, x, *args, **options):
        sizes.append(len(x))
        return forward(self, x, *args, **options)

    monkeypatch.setattr(Denoiser, "forward", count)
    settings = {"run_dir": str(trained), "device": "cpu", "batch_size": 16, "steps": 5}
    settings |= {"solver": solver, "guidance_interval": interval}

    def open_job(guidance):
        return SampleJob(DrawConfig(**settings, guidance=guidance), SINGLE)

    job = open_job(SCALES)
    planned = job.count_calls()
    sizes.clear()
    drawn = [latents for _, latents in draw_streams([*job.streams.values()], 3)]
    assert sum(sizes) == 16 * planned
    assert not torch.equal(drawn[0], drawn[1])
    alone = [open_job(scale) for scale in (1.25, 3.5, 1)]
    sizes.clear()
    assert all(map(torch.equal, drawn, [one.stream.draw_batch(3)[1] for one in alone]))
    assert sum(sizes) == 16 * sum(one.count_calls() for one in alone) > 16 * planned


def test_a_killed_sweep_goes_on_to_the_figures_of_single_commands(trained, tmp_path, capsys):
    """It dies when it has all pieces of the first length and none of the second."""
    words = [f"run_dir={trained}", "guidance=[1,1.25]", "length=[0.05,0.1]", f"out={tmp_path}/out"]
    kill_at_piece(lambda number, folder: "0.1" in folder.name, lambda: evaluate(*words))
    assert len(list(tmp_path.glob("*.parts/*.safetensors"))) == 2
    swept = evaluate(*words)
    text = capsys.readouterr().out
    assert "2 of 2 pieces are already there" in text

    files = [result["protocol"]["weights"]["file"] for result in swept]
    assert [file.rpartition("-at-")[0][-4:] for file in files] == ["0.05", "0.05", "-0.1", "-0.1"]
    for result, guidance in zip(swept, (1.25, 1, 1.25, 1), strict=True):
        file = result["protocol"]["weights"]["file"]
        single = evaluate(f"weights={file}", f"guidance={guidance}", f"out={tmp_path}/single")
        assert single == [result]
        assert read_object(tmp_path / "single.json")["features"] == result["features"]

    # One table, and the best value beside the best one without guidance.
    distances = {
        f"{Path(result['protocol']['weights']['file']).stem}, "
        f"guidance={result['protocol']['guidance']:g}": result["features"]["encoder"]["fd"]
        for result in swept
    }
    assert all(f"encoder, {name}" in text for name in distances)
    chosen = [
        min((distance, name) for name, distance in distances.items() if name.endswith(end))
        for end in ("", "guidance=1")
    ]
    best, unguided = (f"{distance:.4g} with {name}" for distance, name in chosen)
    assert f"fd_encoder: lowest {best}; without guidance {unguided}" in text
    assert not list(tmp_path.glob("*.parts"))
    assert "without guidance" in (tmp_path / "out.svg").read_text()


def test_results_of_a_sweep_lie_with_those_of_the_run(trained, tmp_path, monkeypatch, capsys):
    """A second run of the command replaces them. Without matplotlib it prints a sentence in place
    of the plot."""
    folder = shutil.copytree(trained, tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for _ in range(2):
        evaluate(f"run_dir={folder}", "guidance=[1,2]", "count=150")
    assert len(list(folder.glob("evaluation/step-4-*.json"))) == 2
    assert not list(folder.glob("evaluation/*.svg"))
    text = capsys.readouterr().out
    assert "no plot: pip install 'fastlatent[report]'" in text
    assert "150 samples from" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("guidance=[]", "has no value"),
        ("length=[]", "has no value"),
        ("guidance=[1,x]", "guidance=x must be a finite number"),
        ("guidance=nan", "guidance=nan must be a finite number"),
        ("length=[0.1,0.5]", "length=0.5 must be at most 0.2"),
        ("length=0.1 checkpoint=best", "checkpoint=best: .*length-0.1-at-128"),
    ],
)
def test_a_sweep_that_cannot_be_is_said(words, sentence, trained):
    with expect_refusal(sentence):
        evaluate(f"run_dir={trained}", *words.split())


def test_samples_are_drawn_with_one_scale(trained):
    with expect_refusal("guidance"):
        parse_words(SampleConfig, [f"run_dir={trained}", "guidance=[1,2]"], "")
