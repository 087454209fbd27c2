"""The README's commands, run one after the other as a newcomer would, shrunk."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from accel.techniques.compilation import Compile
from common.files import ROOT
from precompute_latents import precompute
from sampling.load import load_run
from scripts.bench.__main__ import main as bench
from scripts.doctor import main as doctor
from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.export.__main__ import ExportConfig, export
from scripts.import_weights import WeightsConfig, import_weights
from scripts.plan.__main__ import main as plan
from scripts.report.__main__ import ReportConfig, report
from scripts.sample import SampleConfig, sample_run
from tests.harness.published_models import Shape, random_weights
from tests.harness.sets import save_images, save_tiny_autoencoder
from train import train
from training.config.compose import compose, parse_words

PUBLISHED = Shape(lightning=False, channels=2, rows=8, classes=4, sigma=True)
"""A SiT of the tiny autoencoder's latents."""
SMALL_TRAINING = [
    "batch_size=8",
    "total_samples=16",
    "model.dim=32",
    "model.depth=1",
    "model.head_dim=32",
    "log_every=1",
    "sampling.steps=2",
    "sampling.per_class=1",
    "runtime.on_unavailable=degrade",
    "runtime.compile=false",
]


def blocks(language: str) -> list[str]:
    """The code blocks of the README."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


COMMANDS = [
    line.split("  #")[0].strip() for block in blocks("sh") for line in block.strip().splitlines()
]
EXTENSION = "PYTHONPATH=code "


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    made = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    assert made == {"train", "test"}
    assert made <= targets


def test_every_command_is_one_that_this_test_knows():
    assert all(
        line.removeprefix(EXTENSION).split()[0] in ("make", "python", "torchrun")
        for line in COMMANDS
    )
    assert len(COMMANDS) >= 10


def module(name: str, words: list[str]) -> None:
    """`python -m name words`, shrunk."""
    if name == "scripts.sample":
        npz = sample_run(parse_words(SampleConfig, [*words, "steps=2"], ""))
        assert npz.with_suffix(".png").is_file()
        assert np.load(npz)["arr_0"].shape == (16, 32, 32, 3)
    elif name == "scripts.evaluate":
        few = [*words, "count=20", "steps=1", "batch_size=10"]
        assert evaluate_run(parse_words(EvaluateConfig, few, ""))["features"]["encoder"]["kd"] < 1
    elif name == "scripts.export":
        folder = export(parse_words(ExportConfig, words, ""))
        assert (folder / "vae" / "config.json").is_file()
        told = (folder / "README.md").read_text()
        assert re.search(
            r"It has an adapter of [\d,]+ parameters on weights of sha256 [0-9a-f]{64},", told
        )
        assert "weights=ema.safetensors" not in told, "a file that is not in the folder"
        assert (
            told.index("library_name: diffusers")
            < told.index("## How to sample")
            < told.index("DiffusionPipeline")
        )
    elif name == "scripts.report":
        there = f"other={next(Path('runs').glob('[0-9]'))}"
        words = [there if word.startswith("other=") else word for word in words]
        assert all(file.is_file() for file in report(parse_words(ReportConfig, words, "")))
    elif name == "scripts.plan":
        small = ["data.height=4", "data.width=4", "data.count=2", "model.dim=64", "model.depth=3"]
        plan([*words, *small, *(["gpus=[1,8]"] if words[0] == "scale" else [])])
    elif name == "scripts.doctor":
        assert doctor(words) == 0
    elif words[0] == "gpu":
        bench([*words, "setting=tiny", "only=[doctor]"])
    elif words[0] == "publish":
        # tests/scripts/test_publish.py publishes, not in these docs
        assert list(Path(words[1]).glob("doctor_tiny/*.json"))
    else:
        assert name == "scripts.bench"
        if words != ["ladder"]:  # tests/scripts/test_bench.py climbs it
            bench([*words, "setting=tiny", "steps=1", "repeats=1"])


def test_the_path_from_images_to_samples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Compile, "backend", "aot_eager")
    save_images(tmp_path / "photos", classes=("apple", "pear"), per_class=12)
    encoder = save_tiny_autoencoder("AutoencoderKL", tmp_path / "vae")
    ran = 0
    for line in COMMANDS:
        words = shlex.split(line)[1:]
        if line.startswith(("torchrun", EXTENSION)):
            continue  # tests/training/test_parallel.py starts several processes
        if "--help" in words or "--cfg" in words or words[0] in ("train", "test"):
            continue  # tests/training/test_config.py and the Makefile's own users run these
        program = words[0]
        words = words[1:]
        if program == "precompute_latents.py":
            local = [
                "encoder=local",
                f"encoder.path={encoder}",
                "resolution=32",
                "min_psnr=-100",
                "num_workers=0",
            ]
            precompute(
                compose(
                    [w for w in words if not w.startswith("encoder=")] + local, "precompute_latents"
                )
            )
        elif program == "train.py":
            words = [w for w in words if not w.startswith("runtime.compile")]
            small = (
                ["data.height=8", "data.width=8", "data.count=16"]
                if "data=synthetic" in words
                else []
            )
            taken = [
                w
                for w in SMALL_TRAINING
                if "model=pretrained" not in words or not w.startswith("model.")
            ]
            folder = [] if any(w.startswith("run_dir=") for w in words) else [f"run_dir=runs/{ran}"]
            every = ["save_every=1", "eval_every=1", "sample_every=0"]
            assert train(compose([*words, *folder, *taken, *every, *small]))["steps"] == 2
        elif words[0] == "scripts.import_weights":
            torch.save({"ema": random_weights(PUBLISHED)}, words[1].partition("=")[2])
            local = [f"encoder={encoder}", f"head_dim={PUBLISHED.dim // PUBLISHED.heads}"]
            assert import_weights(parse_words(WeightsConfig, [*words[1:], *local], "")).is_file()
        else:
            assert program == "-m"
            module(words[0], words[1:])
        ran += 1
    assert ran >= 7
    assert "latest fastrun of this model and runtime" in capsys.readouterr().out


def test_the_package_of_ones_own_trains_and_samples(tmp_path, monkeypatch, own_code):
    python = next(block for block in blocks("python") if "nn.Module" in block)
    yaml = blocks("yaml")[0]
    package = tmp_path / "code" / "myproj"
    (package / "conf" / "model").mkdir(parents=True)
    (package / "mixer.py").write_text(python)
    (package / "conf" / "model" / "shift.yaml").write_text(yaml)
    (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(package.parent))
    training, sampling = (shlex.split(line)[2:] for line in COMMANDS if line.startswith(EXTENSION))
    summary = train(
        compose(
            [*training[1:], "total_samples=16", "batch_size=8", "save_every=1", "sample_every=0"]
        )
    )
    assert summary["ledger"]["precision"]["requested"] == "bf16"
    npz = sample_run(parse_words(SampleConfig, [*sampling[2:], "steps=2"], ""))
    assert np.load(npz)["arr_0"].shape == (16, 8, 8, 3)


def test_the_lines_for_a_notebook_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = next(block for block in blocks("python") if "load_run" in block)
    assert len(lines.strip().splitlines()) <= 6
    found: dict[str, object] = {}
    exec(lines.replace("6400", "128"), found)
    assert found["summary"]["steps"] == 2
    assert found["images"].shape == (2, 8, 8, 3)
    for words, said in (
        (["modle=dit_xs"], "did you mean model?"),
        (["model=nothing"], "choose one of conv_b"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)) as caught:
            compose(words)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="11 is no class"):
        load_run("runs/notebook").sample([11])
    for change, said in (
        ({"guidence": 2.0}, "did you mean guidance?"),
        ({"steps": "many"}, "steps=many must be a whole number"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            load_run("runs/notebook").sample([3], **change)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text()))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
