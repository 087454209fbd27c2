"""Exported models: a file of code that needs none of ours, equal bits in diffusers and
torch.export, and uploads."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderTiny
from safetensors.torch import load_file, save_file

from common.files import ROOT
from models.autoencoders import DiffusersAutoencoder
from sampling.load import load_run
from scripts.export.__main__ import ExportConfig, Format, export
from scripts.export.folder import AUTOENCODER, AUTOENCODING, MODELLING, TRANSFORMER, refuse_own_code
from tests.encoding.test_import_weights import SHAPES, imported
from tests.harness.denoisers import fill_zero_layers
from tests.harness.published_models import random_weights
from tests.harness.sets import save_tiny_autoencoder, save_tiny_taef2
from tests.harness.words import CPU
from tests.models.test_adapters import save_base
from training.assemble import assemble
from training.checkpoint.files import make_header
from training.config.compose import compose
from training.weights.pretrained import load_pretrained

FAMILIES = ("mamba", "zigzag", "mamba1", "ssd_mlp", "conv", "dit")


def exported(**changes: Any) -> Path:
    return export(ExportConfig(**changes))


def inputs(batch: int) -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(batch)
    return (
        torch.randn(batch, 1, 8, 8, generator=draw),
        torch.rand(batch, generator=draw),
        torch.arange(batch) % 6,
    )


@pytest.fixture(scope="module", params=FAMILIES)
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(
        tmp_path_factory.mktemp("base") / f"{request.param}.safetensors", request.param
    )


def opened(folder: Path) -> Any:
    """The model of an exported folder, from its own file of code."""
    return opened_part(folder / "transformer", MODELLING, TRANSFORMER)


def opened_part(part: Path, file: str, kind: str) -> Any:
    config = json.loads((part / "config.json").read_text())
    sizes = {
        key: value for key, value in config.items() if not key.startswith("_") and key != "auto_map"
    }
    model = getattr(code_of(part / f"{file}.py"), kind)(**sizes)
    model.load_state_dict(load_file(part / "diffusion_pytorch_model.safetensors"))
    return model.eval()


def code_of(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"exported_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# of QK-norm in 16 bits: it is slower
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_the_file_of_code_needs_none_of_ours_and_gives_equal_bits(weights, tmp_path):
    folder = exported(weights=str(weights), out=str(tmp_path / "out"))
    files = [folder / "transformer" / f"{MODELLING}.py", folder / "pipeline.py"]
    for file in files:
        tree = ast.parse(file.read_text())
        plain = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
        packages = {alias.name.split(".")[0] for node in plain for alias in node.names}
        packages |= {
            str(node.module).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        assert packages - sys.stdlib_module_names <= {"torch", "diffusers", "numpy", "PIL"}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not [name for name in used if "fused" in name.lower() or "triton" in name.lower()]
    ruff = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "F,E9",
        *map(str, files),
    ]
    assert subprocess.run(ruff, capture_output=True, check=False).returncode == 0
    theirs, (ours, _) = opened(folder), load_pretrained(weights, CPU)
    with torch.no_grad():
        plain = ours(*inputs(3))
        assert torch.equal(theirs(*inputs(3)), plain)
        found = theirs.to(torch.bfloat16)(*inputs(3))
    assert found.dtype == torch.float32
    assert (found - plain).norm() < 0.03 * plain.norm()


@pytest.mark.parametrize("name", ["sit", "lightningdit with qk-norm"])
def test_imported_weights_go_out_again(name, tmp_path):
    shape = SHAPES[name]
    vae = save_tiny_autoencoder("AutoencoderTiny", tmp_path / "vae")
    weights = imported(tmp_path, random_weights(shape), vae, shape)
    folder = exported(weights=str(weights), out=str(tmp_path / "out"))
    theirs, (ours, _) = opened(folder), load_pretrained(weights, CPU)
    side = shape.rows * shape.patch
    x = torch.randn(2, shape.channels, side, side, generator=torch.Generator().manual_seed(0))
    arguments = (x, torch.tensor([0.3, 0.9]), torch.tensor([1, shape.classes]))
    with torch.no_grad():
        assert torch.equal(theirs(*arguments), ours(*arguments))
    assert (folder / "vae" / "config.json").is_file()


def test_stock_diffusers_decodes_wrong_colours_of_taef2_and_is_refused(tmp_path):
    vae = save_tiny_taef2(tmp_path / "taef2")
    plain = save_tiny_autoencoder("AutoencoderTiny", tmp_path / "plain")
    weights = str(imported(tmp_path, random_weights(SHAPES["sit"]), vae, SHAPES["sit"]))
    folder = exported(weights=weights, out=str(tmp_path / "out"))
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    theirs = opened_part(folder / "vae", AUTOENCODING, AUTOENCODER)
    with torch.no_grad():
        assert torch.equal(
            theirs.decode(latents).sample, DiffusersAutoencoder(str(vae)).decode(latents)
        )
    facts = json.loads((folder / "transformer" / "config.json").read_text())["latents"]
    check = code_of(folder / "pipeline.py").check_decoder
    for wrong in (None, AutoencoderTiny.from_pretrained(plain)):
        with pytest.raises(
            ValueError,
            match=r"need taef2 with its global branches. AutoencoderTiny .* wrong colours",
        ):
            check(wrong, facts)
    check(theirs, facts)
    exported(weights=weights, out=str(tmp_path / "named"), include_autoencoder=False)
    card = (tmp_path / "named" / "README.md").read_text()
    assert "vae=" not in card
    assert 'output_type="latent"' in card
    assert "gives wrong colours. `python -m scripts.sample`" in card


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch 2.11's own loader
@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("mamba", "ssd_mlp")),
        "zigzag",
        "conv",
        "dit",
    ],
)
def test_torch_export_gives_equal_bits_at_any_batch(family, tmp_path):
    weights = save_base(tmp_path / "base.safetensors", family)
    file = exported(
        weights=str(weights), out=str(tmp_path / "step.pt2"), format=Format.torch_export
    )
    program, (ours, spec) = torch.export.load(file).module(), load_pretrained(weights, CPU)
    with torch.no_grad():
        for batch in (1, 2, 5):
            assert torch.equal(program(*inputs(batch)), ours(*inputs(batch)))
    told = json.loads((tmp_path / "step.pt2.json").read_text())
    assert (told["no_class"], told["class_names"], told["latents"]["mean"]) == (
        5,
        spec.names,
        spec.mean,
    )


STOCK = """
import sys
try:
    import models
    sys.exit("our packages can be imported here")
except ModuleNotFoundError:
    pass
import numpy as np
import torch
from diffusers import AutoModel, DiffusionPipeline
folder, out = sys.argv[1:]
for kind, part in ((DiffusionPipeline, {}), (AutoModel, {"subfolder": "transformer"})):
    try:
        kind.from_pretrained(folder, **part)
    except Exception:
        continue
    sys.exit("opened without trust_remote_code")
AutoModel.from_pretrained(folder, **part, trust_remote_code=True)
pipe = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
how = {"guidance_scale": 1.5, "guidance_interval": (0.1, 0.9), "num_inference_steps": 3}
how |= {"shift": 2.0, "seed": 7, "output_type": "np"}
found = {s: pipe(["pear", 0, "plum"], solver=s, **how).images for s in ("heun", "sde")}
noise = pipe(["pear"], output_type="latent", num_inference_steps=1).images
how = {"output_type": "latent", "num_inference_steps": 2}
found["given"] = pipe(["pear"], latents=noise, **how).images.numpy()
assert pipe(1).images[0].size == (16, 16)
try:
    pipe(["quince"])
except ValueError as error:
    assert "'quince' is no class; there are apple, pear, plum" in str(error), error
pipe.to(dtype=torch.bfloat16)
assert pipe("plum", num_inference_steps=1).images[0].size == (16, 16)
np.savez(out, noise=noise.numpy(), **found)
"""


def test_stock_diffusers_draws_the_same_images(tmp_path):
    """With the autoencoder, in a process that has none of our packages, and only with
    trust_remote_code."""
    vae = save_tiny_taef2(tmp_path / "vae")
    words = [
        "data=synthetic",
        "data.channels=4",
        "data.height=8",
        "data.width=8",
        "data.num_classes=3",
        "batch_size=4",
    ]
    training = assemble(compose(["model=dit_xs", "runtime=eager", *words]).cfg, CPU)
    encoder = {"_target_": "models.autoencoders.DiffusersAutoencoder", "path": str(vae)}
    spec = dataclasses.replace(
        training.loader.spec, class_names=["apple", "pear", "plum"], encoder=encoder
    )
    spec = dataclasses.replace(spec, mean=[0.1, -0.2, 0.3, 0.0], std=[1.5, 0.5, 1.0, 0.7])
    file = tmp_path / "ema.safetensors"
    told = {"model": training.cfg.model, "spec": spec.as_dict(), "step": 1}
    save_file(fill_zero_layers(training.model).state_dict(), file, make_header(told, "ema"))
    folder = exported(weights=str(file), out=str(tmp_path / "out"))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "HF_HOME": str(tmp_path / "hub")
    }
    command = [sys.executable, "-c", STOCK, str(folder), str(tmp_path / "found.npz")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    theirs = np.load(tmp_path / "found.npz")
    ours = load_run(file, device="cpu")
    how = {"guidance": 1.5, "guidance_interval": [0.1, 0.9], "steps": 3, "shift": 2.0, "seed": 7}
    for solver in ("heun", "sde"):
        assert np.array_equal(
            theirs[solver], ours.sample(["pear", 0, "plum"], solver=solver, **how)
        )
    assert not np.array_equal(theirs["given"], theirs["noise"])
    card = (folder / "README.md").read_text()
    assert "library_name: diffusers" in card
    assert f'from_pretrained("{folder}", trust_remote_code=True)' in card


@pytest.mark.parametrize(
    "changes", [{"include_autoencoder": False}, {"adopted": True}], ids=["asked", "of one's own"]
)
def test_the_autoencoder_may_stay_where_it_is(changes, tmp_path, monkeypatch):
    """Named, so that nobody takes its latents for pixels; also where it is no class of
    diffusers."""
    vae = save_tiny_autoencoder("AutoencoderTiny", tmp_path / "vae")
    weights = imported(tmp_path, random_weights(SHAPES["sit"]), vae, SHAPES["sit"])
    if changes.pop("adopted", False):
        monkeypatch.setattr("scripts.export.folder.can_be_included", lambda trained: False)
    folder = exported(weights=str(weights), out=str(tmp_path / "out"), **changes)
    assert json.loads((folder / "model_index.json").read_text())["vae"] == [None, None]
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "model_index.json",
        "pipeline.py",
        "transformer",
    ]
    assert (
        json.loads((folder / "transformer" / "config.json").read_text())["latents"]["autoencoder"]
        == "vae"
    )
    called = "vae=<the autoencoder" if changes else 'output_type="latent"'
    assert called in (folder / "README.md").read_text()


class FakeHub:
    calls: list[tuple[str, dict[str, Any]]] = []  # noqa: RUF012 - of all instances

    def create_repo(self, repository: str, **how: Any) -> None:
        self.calls.append((repository, how))

    def upload_folder(self, **how: Any) -> None:
        self.calls.append(("upload", how))


def test_push_uploads_the_folder_and_writes_no_token(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    monkeypatch.setenv("HF_TOKEN", "hf_thisisasecretvalue")
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    base = str(save_base(tmp_path / "base.safetensors"))
    exported(weights=base, out=str(tmp_path / "dry"), push="me/mine", dry_run=True)
    printed = capsys.readouterr().out
    assert "would upload to https://huggingface.co/me/mine" in printed
    assert "  transformer/config.json" in printed
    assert not FakeHub.calls
    folder = exported(weights=base, out=str(tmp_path / "dry"), push="me/mine")
    assert FakeHub.calls == [
        ("me/mine", {"exist_ok": True}),
        ("upload", {"repo_id": "me/mine", "folder_path": folder}),
    ]
    written = [
        file
        for file in tmp_path.rglob("*")
        if file.is_file() and b"thisisasecret" in file.read_bytes()
    ]
    assert not written
    monkeypatch.setattr(FakeHub, "upload_folder", None)
    with pytest.raises(ValueError, match=r"push=me/mine failed \(TypeError\); .* is complete"):
        exported(weights=base, out=str(tmp_path / "broken"), push="me/mine")
    assert "thisisasecret" not in capsys.readouterr().out


def test_code_of_somebody_else_cannot_be_copied(tmp_path):
    node = compose(["model=dit_xs"]).cfg.model
    for changed in (
        {"_target_": "myproj.Own"},
        {"mixer": node["mixer"] | {"_target_": "myproj.mixer.Shift"}},
    ):
        with pytest.raises(
            ValueError, match="is code of your own, which format=diffusers cannot copy"
        ):
            refuse_own_code(node | changed)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"run_dir": None}, "run_dir is not set; say what to export"),
        ({"out": None}, "out is not set; say where"),
        ({"format": Format.torch_export}, "must end in .pt2 with format=torch_export"),
        ({"push": "mine"}, "push=mine must be <owner>/<name>"),
        ({"dry_run": True}, "dry_run=true is for push="),
        ({"out": str(ROOT)}, "is there already"),
    ],
)
def test_a_mistake_is_a_sentence(changes, sentence, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=sentence):
        exported(**{"run_dir": str(tmp_path), "out": str(tmp_path / "new")} | changes)
    assert not (tmp_path / "new").exists()
