"""Files of version 0.1.0 are still understood: its latents verify, its run resumes, its weights
sample.

Commit 8f2c73c made `tests/assets/version1` on 2026-11-22 (torch 2.13.0): twelve images through an
autoencoder with random weights, eight steps of a tiny model with the checkpoint of step 4, and four
samples from that.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from common.files import ROOT
from scripts.sample import SampleConfig, sample_run
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.words import CPU
from train import train
from training.checkpoint.load import is_same_set, read_state_file
from training.components import build_loader
from training.config.compose import compose

ASSETS = ROOT / "tests" / "assets" / "version1"
COMMAND = json.loads((ASSETS / "run" / "environment.json").read_text())["argv"]
# The runtime `fast` of version 0.1.0 had no fused kernels.
KERNELS_OFF = [f"runtime.fused_{op}=false" for op in ("add_norm", "scan", "conv", "swiglu", "rope")]


@pytest.fixture
def version1(tmp_path):
    return Path(shutil.copytree(ASSETS, tmp_path / "version1"))


def compose_run(version1):
    folders = [f"run_dir={version1 / 'run'}", f"data.path={version1 / 'set'}"]
    words = [word for word in COMMAND[1:] if not word.startswith(("run_dir=", "data.path="))]
    return compose([*words, *folders, *KERNELS_OFF])


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_its_run_resumes_and_ends_as_it_did(version1, capsys):
    train(compose_run(version1))
    # The sentence names the evaluation only: no setting has changed since.
    sentence = "step-4 at step 4; since then eval_loss draws t differently"
    assert sentence in capsys.readouterr().out
    lines = read_lines(version1 / "run" / "metrics.jsonl")
    expected = read_lines(ASSETS / "expected_metrics.jsonl")
    # Version 0.1.0 took the last step of a cosine to 0 at a rate of 0. Now that step learns, after
    # its loss was taken.
    assert expected[-1].pop("lr") == 0.0
    assert lines[-1].pop("lr") > 0
    names = ("samples", "loss", "grad_norm", "lr", "skipped")
    for line, then in zip(lines, expected, strict=True):
        then = {name: then[name] for name in names if name in then}
        assert {name: line[name] for name in names if name in line} == pytest.approx(then, rel=1e-5)


def test_its_fingerprint_is_that_of_the_same_set_only(version1):
    """The fingerprint of version 0.1.0 leaves the statistics out, so the checkpoint's copy of them
    decides."""
    checkpoint = next((version1 / "run" / "checkpoints").glob("step-*"))
    manifest = version1 / "set" / "manifest.json"
    raw = json.loads(manifest.read_text())
    for factor in (1, 2):
        manifest.write_text(json.dumps(raw | {"std": [factor * value for value in raw["std"]]}))
        loader = build_loader(compose_run(version1).cfg.data, 0, 4, CPU)
        run = {
            "data": {"fingerprint": loader.spec.fingerprint, "seed": 0},
            "spec": loader.spec.as_dict(),
        }
        assert is_same_set(read_state_file(checkpoint), run) is (factor == 1)


def test_its_weights_sample_as_they_did(version1, tmp_path):
    given = {
        "count": 4,
        "steps": 4,
        "guidance": 1.5,
        "solver": "heun",
        "shift": 1.0,
        "device": "cpu",
    }
    for source in (
        {"run_dir": str(version1 / "run")},
        {"weights": str(next(version1.rglob("ema.safetensors")))},
    ):
        expected = np.load(ASSETS / "expected_samples.npz")
        given |= {"labels": expected["labels"].tolist(), "out": str(tmp_path / "out")}
        found = np.load(sample_run(SampleConfig(**source, **given, encoder=str(version1 / "vae"))))
        assert np.abs(found["arr_0"].astype(int) - expected["arr_0"]).max() <= 1


def test_its_latents_verify(version1):
    assert verify(VerifyConfig(path=str(version1 / "set"), count=0)) == []
