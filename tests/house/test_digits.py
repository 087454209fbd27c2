"""The default command: it must learn to draw the digit that it is asked for."""

from __future__ import annotations

import re

import numpy as np
import pytest

from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.sample import SampleConfig, sample_run
from train import train
from training.config.compose import compose
from training.config.schema import Solver


def recognised(npz, first: int = 0) -> float:
    """Share of the samples that a classifier fitted on the real digits names as asked."""
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    pixels, labels = load_digits(return_X_y=True)
    classifier = SVC(gamma=0.001).fit(pixels, labels)
    samples = np.load(npz)
    drawn = samples["arr_0"][..., 0].reshape(-1, 64) / 255.0 * 16.0
    return float((classifier.predict(drawn) == samples["labels"] + first).mean())


@pytest.mark.parametrize(
    ("words", "eval_loss", "share"),
    [
        (["total_samples=30720", "sample_every=0"], 0.62, 0.7),
        pytest.param([], 0.52, 0.95, marks=pytest.mark.slow),
    ],
    ids=["three tenths of it", "whole"],
)
def test_the_default_run_draws_digits_that_a_classifier_recognises(
    words, eval_loss, share, tmp_path
):
    folder = tmp_path / "digits"
    summary = train(compose([f"run_dir={folder}", *words]))
    assert summary["eval_loss"] < eval_loss
    npz = sample_run(
        SampleConfig(run_dir=str(folder), count=200, seed=1, out=str(tmp_path / "samples"))
    )
    assert recognised(npz) >= share
    cfg = EvaluateConfig(
        run_dir=str(folder),
        count=600,
        steps=10,
        solver=Solver.ab2,
        guidance=1.0,
        out=str(tmp_path / "figures"),
        seed=1,
    )
    # noise has more than 20 floors: tests/evaluation/test_evaluate.py
    for found in evaluate_run(cfg)["features"].values():
        assert found["floor_fd"] < found["fd"] < 6 * found["floor_fd"]


@pytest.mark.slow
def test_a_model_of_five_digits_learns_the_others_with_few_weights(tmp_path):
    words = ["total_samples=51200", "sample_every=0"]
    base = tmp_path / "five"
    others = tmp_path / "others"
    train(compose([*words, "model=ssd_mlp_xs", "data.classes=[0,1,2,3,4]", f"run_dir={base}"]))
    adapted = [
        "adapter=lora",
        "adapter.rank=4",
        "optim.lr=4e-3",
        "model=pretrained",
        f"init_from={base}",
    ]
    summary = train(compose([*words, *adapted, "data.classes=[5,6,7,8,9]", f"run_dir={others}"]))
    told = re.search(r"(\d+) of (\d+) parameters train", summary["ledger"]["adapter"]["evidence"])
    assert told is not None
    assert int(told[1]) < 0.05 * int(told[2])
    npz = sample_run(
        SampleConfig(run_dir=str(others), count=200, seed=1, out=str(tmp_path / "samples"))
    )
    assert recognised(npz, first=5) >= 0.9
