"""The default command must learn to draw the digit that its label names."""

import re

import numpy as np
import pytest

from common.config.compose import compose
from common.config.schema import Solver
from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.sample import SampleConfig, sample_run
from tests.harness.captions import DIGITS, UNSEEN, save_digits
from tests.harness.words import slow
from train import train


def train_run(folder, *words):
    return train(compose([f"run_dir={folder}", *words]))


def measure_recognised(folder, first=0, count=100, **settings):
    """Draws samples of a run; returns the share whose digit a classifier, fitted on the real
    digits, recognises. `first` is the digit of label 0, or prompt 0; ten labels or prompts on the
    digits begin again."""
    from sklearn.datasets import load_digits
    from sklearn.svm import SVC

    words = {"run_dir": str(folder), "count": count, "seed": 1, "out": f"{folder}_samples"}
    samples = np.load(sample_run(SampleConfig(**words, **settings)))
    drawn = samples["arr_0"][..., 0].reshape(-1, 64) / 255.0 * 16.0
    classifier = SVC(gamma=0.001).fit(*load_digits(return_X_y=True))
    return float((classifier.predict(drawn) == samples["labels"] % 10 + first).mean())


@pytest.mark.parametrize(
    ("words", "eval_loss", "share"),
    [(["total_samples=15360", "sample_every=0"], 0.62, 0.7), slow([], 0.52, 0.95)],
)
def test_the_default_run_draws_digits_that_a_classifier_recognises(
    words, eval_loss, share, tmp_path
):
    folder = tmp_path / "digits"
    assert train_run(folder, *words)["eval_loss"] < eval_loss
    assert measure_recognised(folder) >= share
    cfg = EvaluateConfig(
        run_dir=str(folder),
        count=600,
        steps=10,
        solver=Solver.ab2,
        guidance=1.0,
        out=str(tmp_path / "figures"),
        seed=1,
    )
    # Noise has more than 20 floors: tests/evaluation/test_evaluate.py. The floor is that of halves,
    # which a good model may pass.
    for distances in evaluate_run(cfg)[0]["features"].values():
        assert 0.5 * distances["floor_fd"] < distances["fd"] < 6 * distances["floor_fd"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mamba_xs", "ssd_mlp_xs", "dit_xs"])
def test_every_family_learns_to_draw_digits(model, tmp_path):
    train_run(tmp_path / model, f"model={model}", "sample_every=0")
    assert measure_recognised(tmp_path / model) >= 0.9


@pytest.mark.slow
def test_a_model_of_five_digits_learns_the_others_with_few_weights(tmp_path):
    base = tmp_path / "five"
    others = tmp_path / "others"
    words = ["total_samples=51200", "sample_every=0"]
    train_run(base, *words, "model=ssd_mlp_xs", "data.classes=[0,1,2,3,4]")
    adapter = ["adapter=lora", "adapter.rank=4", "optim.lr=4e-3", f"init_from={base}"]
    summary = train_run(others, *words, *adapter, "model=pretrained", "data.classes=[5,6,7,8,9]")
    evidence = summary["ledger"]["adapter"]["evidence"]
    trained, total = re.search(r"(\d+) of (\d+) parameters train", evidence).groups()
    assert int(trained) < 0.05 * int(total)
    assert measure_recognised(others, first=5) >= 0.9


@pytest.mark.slow
def test_prompts_of_unseen_templates_draw_their_digits(tmp_path, run_dir):
    """The words of the digits were seen in other sentences."""
    words = ["data=resident", f"data.path={save_digits(tmp_path / 'set')}", "model=dit_xs"]
    words += ["model.conditioning=text", "model.text_tokens=true", "sample_every=0"]
    train_run(run_dir, *words)
    prompts = tmp_path / "prompts.txt"
    lines = [template.format(digit) for template in UNSEEN for digit in DIGITS]
    prompts.write_text("\n".join(lines))
    assert measure_recognised(run_dir, count=1000, prompts=str(prompts)) >= 0.9
