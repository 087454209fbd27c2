"""Pictures that are not square: every command keeps rows and columns apart."""

import pytest
import torch

from sampling.load import load_run
from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.export.__main__ import ExportConfig, export
from scripts.export.folder import MODELLING, TRANSFORMER
from tests.harness.combinations import FAMILIES
from tests.harness.denoisers import make_inputs
from tests.harness.exported import open_part
from tests.harness.outcomes import read_lines
from tests.harness.sets import PIXELS, save_latent_set

SHAPE = (2, 12, 8)


def plant(count):
    """Pictures whose first channel grows from row to row, and the second from column to column."""
    axes = [torch.linspace(-1, 1, side) for side in SHAPE[1:]]
    picture = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    return {"latents": picture.half().repeat(count, 1, 1, 1), "labels": torch.arange(count) % 2}


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    facts = {"flips": False, "kind": "sample", "encoder": PIXELS, "encoder_sha256": None}
    facts |= {"class_names": ["a", "b"], "mean": [0.0, 0.0], "std": [0.5, 0.5]}
    save_latent_set(folder, [("train", plant(32)), ("held_out", plant(8))], **facts)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_command_keeps_rows_and_columns(family, latents, photos, run, run_dir, tmp_path):
    words = [f"model={family}_xs", "data=resident", f"data.path={latents}", "optim.lr=1e-2"]
    words += ["schedule.warmup_samples=0", "save_every=20", "sample_every=20", "eval_every=20"]
    words += ["sampling.steps=4", "sampling.guidance=1"]
    run(*words, "total_samples=160")
    run(*words, "total_samples=400")
    assert [line["step"] for line in read_lines(run_dir)] == list(range(1, 51))

    trained = load_run(run_dir, device="cpu")
    (expected,) = plant(1)["latents"].float()
    for latent in trained.sample_latents(["a", "b"]):
        for ours, planted in zip(latent, expected, strict=True):
            assert torch.corrcoef(torch.stack([ours.flatten(), planted.flatten()]))[0, 1] > 0.8

    settings = {"count": 8, "batch_size": 8, "device": "cpu", "reference": str(photos)}
    (result,) = evaluate_run(EvaluateConfig(run_dir=str(run_dir), **settings))
    assert result["protocol"]["reference"]["resize"].endswith("12×8")

    folder = export(ExportConfig(run_dir=str(run_dir), out=str(tmp_path / "out")))
    theirs = open_part(folder / "transformer", MODELLING, TRANSFORMER)
    inputs = make_inputs(trained.model)
    with torch.no_grad():
        assert torch.equal(theirs(*inputs), trained.model(*inputs))
