"""Files of version 0.1.0 are still understood: its latents verify, its weights sample.

Commit 8f2c73c made `tests/assets/version1` on 2026-11-22 (torch 2.13.0): twelve images through an
autoencoder with random weights, eight steps of a tiny model with the checkpoint of step 4, and four
samples from that.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from common.files import ROOT
from scripts.sample import SampleConfig, sample_run
from scripts.verify_latents import VerifyConfig, verify

ASSETS = ROOT / "tests" / "assets" / "version1"


@pytest.fixture
def version1(tmp_path):
    return Path(shutil.copytree(ASSETS, tmp_path / "version1"))


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
