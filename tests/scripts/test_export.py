"""Exported models: a file of code that needs none of ours, and equal bits in diffusers."""

import dataclasses
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from safetensors.torch import save_file

from common.config.compose import compose
from common.files import ROOT, read_object
from models.autoencoders import DiffusersAutoencoder
from sampling.load import load_run
from scripts.export.__main__ import ExportConfig, Format, export
from scripts.export.folder import AUTOENCODER, AUTOENCODING, MODELLING, TRANSFORMER, refuse_own_code
from tests.harness.adapters import FAMILIES, save_base
from tests.harness.denoisers import fill_zero_layers, make_inputs
from tests.harness.exported import load_code, open_part
from tests.harness.published_models import SHAPES, draw_weights, import_published
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_tiny_autoencoder, save_tiny_taef2
from tests.harness.words import CPU, TINY_MODEL, slow
from training.assemble import assemble
from training.checkpoint.files import make_header
from training.weights.pretrained import load_pretrained


def export_to(out, **changes):
    return export(ExportConfig(out=str(out), **changes))


def import_shape(name, folder, vae=None):
    vae = vae or save_tiny_autoencoder("AutoencoderTiny", folder / "vae")
    shape = dataclasses.replace(SHAPES[name], channels=4)
    return str(import_published(folder, draw_weights(shape), vae, shape))


# of QK-norm in 16 bits: it is slower
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", [*FAMILIES, "sit", "lightningdit with qk-norm"])
def test_the_file_of_code_needs_none_of_ours_and_gives_equal_bits(name, tmp_path):
    """Also of imported weights, which go out again."""
    if name in FAMILIES:
        weights = save_base(tmp_path / "base.safetensors", name)
    else:
        weights = import_shape(name, tmp_path)
    folder = export_to(tmp_path / "out", weights=str(weights))
    files = [folder / "transformer" / f"{MODELLING}.py", folder / "pipeline.py"]
    for file in files:
        packages = set(re.findall(r"^ *(?:from|import) (\w+)", file.read_text(), re.MULTILINE))
        assert packages - sys.stdlib_module_names <= {"torch", "diffusers", "numpy", "PIL"}
        assert not re.findall(r"\w*fused\w*|\w*triton\w*", " ".join(vars(load_code(file))))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9"]
    assert subprocess.run([*ruff, *map(str, files)], capture_output=True).returncode == 0
    theirs = open_part(folder / "transformer", MODELLING, TRANSFORMER)
    ours, _ = load_pretrained(weights, CPU)
    inputs = make_inputs(ours)
    with torch.no_grad():
        expected = ours(*inputs)
        assert torch.equal(theirs(*inputs), expected)
        narrow = theirs.to(torch.bfloat16)(*inputs)
    assert narrow.dtype == torch.float32
    assert (narrow - expected).norm() < 0.03 * expected.norm()


def read_latents(folder):
    return read_object(folder / "transformer" / "config.json")["latents"]


def test_stock_diffusers_decodes_wrong_colours_of_taef2_and_is_refused(tmp_path):
    vae = save_tiny_taef2(tmp_path / "taef2")
    plain = save_tiny_autoencoder("AutoencoderTiny", tmp_path / "plain")
    weights = import_shape("sit", tmp_path, vae)
    folder = export_to(tmp_path / "out", weights=weights)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    theirs = open_part(folder / "vae", AUTOENCODING, AUTOENCODER)
    with torch.no_grad():
        expected = DiffusersAutoencoder(str(vae)).decode(latents)
        assert torch.equal(theirs.decode(latents).sample, expected)

    # the pipeline checks a decoder before it draws
    facts = read_latents(folder)
    check = load_code(folder / "pipeline.py").check_decoder
    check(theirs, facts)
    for wrong in (None, AutoencoderTiny.from_pretrained(plain)):
        with pytest.raises(
            ValueError,
            match=r"need taef2 with its global branches. AutoencoderTiny .* wrong colours",
        ):
            check(wrong, facts)

    # a folder without the autoencoder does not suggest to decode in diffusers
    named = export_to(tmp_path / "named", weights=weights, include_autoencoder=False)
    assert "vae=" not in (named / "README.md").read_text()


STOCK = """
import logging
import sys
import warnings
try:
    import models
    sys.exit("our packages can be imported here")
except ModuleNotFoundError:
    pass
import numpy as np
import torch
from diffusers import AutoModel, DiffusionPipeline
folder, plain, out = sys.argv[1:]
for kind, part in ((DiffusionPipeline, {}), (AutoModel, {"subfolder": "transformer"})):
    try:
        kind.from_pretrained(folder, **part)
    except Exception:
        continue
    sys.exit("opened without trust_remote_code")
said = []
warnings.showwarning = lambda *words: said.append(words)
handler = logging.Handler(logging.WARNING)
handler.handle = said.append
logging.getLogger("diffusers").addHandler(handler)
AutoModel.from_pretrained(folder, **part, trust_remote_code=True)
DiffusionPipeline.from_pretrained(plain, trust_remote_code=True)
pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
assert not [words for words in said if "ensure you trust" not in str(words)], said
how = {"guidance_scale": 1.5, "guidance_interval": (0.1, 0.9), "num_inference_steps": 3}
how |= {"internal_guidance": 1.5, "internal_interval": (0.3, 1.0)}
how |= {"shift": 2.0, "seed": 7, "output_type": "np"}
found = {s: pipe(["pear", 0, "plum"], solver=s, **how).images for s in ("heun", "sde")}
noise = pipe(["pear"], output_type="latent", num_inference_steps=1).images
how = {"output_type": "latent", "num_inference_steps": 2}
found["given"] = pipe(["pear"], latents=noise, **how).images.numpy()
assert pipe(1, height=16).images[0].size == (24, 16)
refusals = {
    "'quince' is no class of this run; its 3 classes are": {"class_labels": ["quince"]},
    "trained on images of 16×24 pixels": {"class_labels": 1, "height": 24, "width": 16},
}
for sentence, words in refusals.items():
    try:
        sys.exit(f"drawn: {pipe(**words)}")
    except ValueError as error:
        assert sentence in str(error), error
pipe.to(dtype=torch.bfloat16)
assert pipe("plum", num_inference_steps=1).images[0].size == (24, 16)
np.savez(out, noise=noise.numpy(), **found)
"""


HYBRID = """model=hybrid_xs model.internal_block=1 model.attention_every=2 runtime=eager
batch_size=4 data=synthetic data.channels=4 data.height=8 data.width=12 data.num_classes=3"""


@pytest.mark.parametrize("kind", ["taef2", "AutoencoderKLFlux2", slow("AutoencoderKLQwenImage")])
def test_stock_diffusers_draws_the_same_images(kind, tmp_path, capsys):
    """A process without our packages opens the folder with its autoencoder, without a warning, and
    only with trust_remote_code."""
    vae = tmp_path / "vae"
    save_tiny_taef2(vae) if kind == "taef2" else save_tiny_autoencoder(kind, vae)
    training = assemble(compose([*HYBRID.split(), *TINY_MODEL]).cfg, CPU)
    spec = dataclasses.replace(
        training.loader.spec,
        class_names=["apple", "pear", "plum"],
        encoder={"_target_": "models.autoencoders.DiffusersAutoencoder", "path": str(vae)},
        mean=[0.1, -0.2, 0.3, 0.0],
        std=[1.5, 0.5, 1.0, 0.7],
    )
    file = tmp_path / "ema.safetensors"
    header = {"model": training.cfg.model, "spec": spec.as_dict(), "step": 1}
    save_file(fill_zero_layers(training.model).state_dict(), file, make_header(header, "ema"))
    folder = export_to(tmp_path / "out", weights=str(file))
    printed, _, code = capsys.readouterr().out.partition("\n\n")

    tiny = save_tiny_autoencoder("AutoencoderTiny", tmp_path / "tiny")
    plain = export_to(tmp_path / "plain", weights=import_shape("sit", tmp_path, tiny))

    # Hugging Face copies the folder's code to HF_HOME; PYTHONPATH would show our packages
    environment = os.environ | {"HF_HOME": str(tmp_path / "hub")}
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-c", STOCK, folder, plain, tmp_path / "drawn.npz"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    theirs = np.load(tmp_path / "drawn.npz")
    ours = load_run(file, device="cpu")
    settings = {"guidance": 1.5, "guidance_interval": [0.1, 0.9], "steps": 3, "shift": 2.0}
    settings |= {"internal_guidance": 1.5, "internal_interval": [0.3, 1.0]}
    for solver in ("heun", "sde"):
        images = ours.sample(["pear", 0, "plum"], solver=solver, seed=7, **settings)
        assert np.array_equal(theirs[solver], images)
    assert not np.array_equal(theirs["given"], theirs["noise"])
    assert printed.endswith(str(folder))
    assert f'from_pretrained("{folder}", trust_remote_code=True)' in code
    assert f"```python\n{code}```" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "includable", "called"),
    [
        ({"include_autoencoder": False}, True, "vae=<the autoencoder"),
        ({}, False, 'output_type="latent"'),
    ],
    ids=["asked", "of one's own"],
)
def test_the_autoencoder_may_stay_where_it_is(changes, includable, called, tmp_path, monkeypatch):
    """The folder names it, so that nobody takes its latents for pixels; also where it is no class
    of diffusers."""
    monkeypatch.setattr("scripts.export.folder.can_be_included", lambda _: includable)
    folder = export_to(tmp_path / "out", weights=import_shape("sit", tmp_path), **changes)
    assert read_object(folder / "model_index.json")["vae"] == [None, None]
    assert not (folder / "vae").exists()
    assert read_latents(folder)["autoencoder"] == "vae"
    assert called in (folder / "README.md").read_text()


def test_code_of_somebody_else_cannot_be_copied():
    node = compose(["model=dit_xs", "model.mixer._target_=myproj.Own"]).cfg.model
    with expect_refusal("is code of your own, which format=diffusers cannot copy"):
        refuse_own_code(node)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"run_dir": None}, "run_dir is not set"),
        ({"out": None}, "out is not set; say where"),
        ({"format": Format.weights}, "must end in .safetensors with format=weights"),
        ({"out": str(ROOT)}, "is there already"),
    ],
)
def test_a_mistake_is_a_sentence(changes, sentence, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    settings = {"run_dir": str(tmp_path), "out": str(tmp_path / "new")} | changes
    with expect_refusal(sentence):
        export(ExportConfig(**settings))
    assert not (tmp_path / "new").exists()
