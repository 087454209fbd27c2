"""Runs on plain pixels: a set is the pictures' bytes, and a model that predicts clean pictures goes
through every command."""

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from common.config.compose import compose
from data.manifest import read_manifest
from data.spec import LatentSpec
from encoding.job import describe_result
from models.images import to_uint8
from precompute_latents import precompute
from sampling.load import load_run
from scripts.evaluate import EvaluateConfig, evaluate_run
from scripts.export.__main__ import ExportConfig, export
from scripts.export.folder import MODELLING, PIPELINE, TRANSFORMER
from scripts.import_latents import ImportConfig, import_latents
from scripts.verify_latents import VerifyConfig, verify
from tests.harness.adapters import EAGER_RUN
from tests.harness.batches import LOADERS, resident, take
from tests.harness.exported import load_code, open_part
from tests.harness.foreign import read_set
from tests.harness.outcomes import are_equal
from tests.harness.refusals import expect_refusal
from tests.harness.words import CPU, TINY_JOB
from train import train
from training.weights.pretrained import build_autoencoder, build_on_meta

SIZE = (16, 8)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of PNGs of two classes, noise on red or green that grows from row to row; and their
    pixels."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 20, (2, 10, *SIZE, 3), dtype=np.uint8)
    folder = tmp_path_factory.mktemp("pictures")
    for label, name in enumerate(("red", "green")):
        pixels[label, ..., label] += np.linspace(20, 230, SIZE[0]).astype(np.uint8)[:, None]
        (folder / name).mkdir()
        for i, picture in enumerate(pixels[label]):
            Image.fromarray(picture).save(folder / name / f"{i}.png")
    return folder, pixels.reshape(-1, *SIZE, 3)


@pytest.fixture(scope="module")
def encode(pictures, tmp_path_factory):
    def start(*words):
        out = tmp_path_factory.mktemp("latents") / "out"
        job = [word for word in TINY_JOB if "=[16,12]" not in word and word != "encoder=local"]
        words = [*job, "resolution=[16,8]", f"source={pictures[0]}", f"out={out}", *words]
        return precompute(compose(words, "precompute_latents")).parent

    return start


@pytest.fixture(scope="module")
def latents(encode):
    return encode("encoder=pixels", "flips=true")


def sort_pictures(pixels):
    """Pictures (n, H, W, 3) as rows, in an order of their own."""
    return sorted(np.asarray(pixels).reshape(len(pixels), -1).tolist())


def test_a_set_has_the_bytes_of_its_pictures(latents, pictures, tmp_path):
    _, expected = pictures
    tensors = read_set(latents)
    stored = tensors["latents"]
    assert stored.dtype == torch.uint8
    assert sort_pictures(stored.permute(0, 2, 3, 1)) == sort_pictures(expected)
    assert torch.equal(tensors["mirrored"], stored.flip(3))
    manifest = read_manifest(latents)
    cfg = VerifyConfig(path=str(latents), out=str(tmp_path / "x.png"), device="cpu")
    assert verify(cfg) == []
    assert "experiment=pixels_64 data.path=" in describe_result(manifest, latents)


@pytest.mark.parametrize("kind", sorted({*LOADERS} - {"int8"}))
def test_every_loader_keeps_bytes_and_gives_pictures(kind, latents):
    loader = LOADERS[kind](latents, batch_size=8)
    batch = take(loader, 2)
    images = build_autoencoder(loader.spec, CPU).decode(loader.spec.denormalise(batch.latents))
    stored = read_set(latents)
    both = torch.cat([stored[name][:16] for name in ("latents", "mirrored")])
    assert batch.latents.std().item() == pytest.approx(1.0, abs=0.1)
    assert {*map(tuple, sort_pictures(to_uint8(images)))} <= {
        *map(tuple, sort_pictures(both.permute(0, 2, 3, 1)))
    }


def test_what_is_no_pixel_has_no_place_in_8_bits(latents, encode, vae):
    with expect_refusal("has latents that are no pixels from 0 to 255, as dtype=uint8 needs"):
        encode("encoder=local", f"encoder.path={vae}", "dtype=uint8")
    with expect_refusal("data.storage=int8: this set has 8 bits already"):
        resident(latents, storage="int8")
    wide = read_set(encode("encoder=pixels", "dtype=float16", "flips=true", "runtime.compile=true"))
    assert all(torch.equal(wide[name], tensor) for name, tensor in read_set(latents).items())


def test_pictures_of_another_tool_are_imported(pictures, tmp_path):
    _, expected = pictures
    pixels = np.ascontiguousarray(expected.transpose(0, 3, 1, 2))
    save_file({"latents": torch.from_numpy(pixels)}, tmp_path / "a.safetensors")
    words = {"out": f"{tmp_path}/out", "classes": "none", "encoder": "pixels", "scale": 1.0}
    for wrong in (expected, pixels / 255.0):
        np.save(tmp_path / "a.npy", wrong)
        given = ImportConfig(source=f"{tmp_path}/a.npy", dtype="uint8", **words)
        with expect_refusal("takes pictures .* of 1 or 3 channels, whole numbers from 0 to 255"):
            import_latents(given)
    words["source"] = f"{tmp_path}/a.safetensors"
    with expect_refusal("holds uint8, .*8-bit pixels need encoder=pixels dtype=uint8"):
        import_latents(ImportConfig(**words))
    folder = import_latents(ImportConfig(dtype="uint8", **words)).parent
    stored = read_set(folder)["latents"]
    assert sort_pictures(stored.permute(0, 2, 3, 1)) == sort_pictures(expected)


@pytest.mark.parametrize(("side", "tokens"), [(64, 64), (128, 256), (256, 256)])
def test_presets_have_few_tokens_and_predict_clean_pictures(side, tokens, latents):
    cfg = compose([f"experiment=pixels_{side}", f"data.path={latents}"]).cfg
    model = build_on_meta(cfg.model, LatentSpec(3, side, side, 2, 1, [], [], []))
    assert (model.tokens, model.prediction) == (tokens, "clean")


CLEAN = """model=hybrid_xs runtime=eager model.prediction=clean model.patch_size=4
model.patch_rank=16 model.internal_block=1 objective.timestep_shift=auto optim.lr=1e-2
schedule.warmup_samples=0 sampling.steps=4 sampling.guidance=1 ema.half_life_samples=100
deterministic=true eval_every=20 save_every=20 total_samples=800"""


def test_clean_pictures_go_through_every_command(latents, pictures, run, run_dir, tmp_path):
    words = ["data=resident", f"data.path={latents}", *CLEAN.split()]
    run(*words, "sample_every=50")

    # A run that goes on from an earlier checkpoint ends with the same bits.
    whole = load_file(run_dir / "checkpoints/step-100/ema.safetensors")
    shutil.rmtree(run_dir / "checkpoints/step-100")
    run(*words)
    assert are_equal(load_file(run_dir / "checkpoints/step-100/ema.safetensors"), whole)

    trained = load_run(run_dir, device="cpu")
    for solver in ("heun", "ab2", "sde"):
        drawn = trained.sample(["red", "green"], solver=solver).astype(float)
        growth = drawn[:, -1].mean(1) - drawn[:, 0].mean(1)
        assert growth[:, :2].sum(1).min() > 100 > 10 * abs(growth[:, 2]).max()

    settings = {"count": 8, "device": "cpu", "reference": str(pictures[0])}
    (result,) = evaluate_run(EvaluateConfig(run_dir=str(run_dir), **settings))
    assert result["protocol"]["shift"] == 1.0

    # diffusers draws the same pictures, with both kinds of guidance.
    folder = export(ExportConfig(run_dir=str(run_dir), out=str(tmp_path / "out")))
    theirs = open_part(folder / "transformer", MODELLING, TRANSFORMER)
    pipeline = vars(load_code(folder / "pipeline.py"))[PIPELINE](theirs)
    how = {"internal_guidance": 1.5, "solver": "heun", "seed": 3}
    images = pipeline(["red", 1], guidance_scale=1.5, output_type="np", **how).images
    assert np.array_equal(images, trained.sample(["red", 1], guidance=1.5, **how))

    # An adapter knows what its base predicts.
    words = [*words[:2], *EAGER_RUN, "model=pretrained", f"init_from={run_dir}", "adapter=lora"]
    words += [f"run_dir={tmp_path / 'adapted'}", "total_samples=32"]
    train(compose([*words, "optim.lr=1e-5", "sampling.steps=4", "sampling.guidance=1"]))
    near = load_run(tmp_path / "adapted", device="cpu").sample(["red", 1], **how)
    assert np.abs(near - trained.sample(["red", 1], **how).astype(float)).max() < 10
