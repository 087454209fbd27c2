"""Published weights, imported, compute what the papers' equations compute, and can be sampled
from; tests/house/test_readme.py trains on them."""

import argparse

import pytest
import torch
from safetensors.torch import save_file

from sampling.load import load_run
from tests.harness.published_models import SHAPES, draw_weights, import_published, velocity
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_tiny_autoencoder
from tests.harness.words import CPU
from training.drawing import Conditions, SampleStream
from training.weights.pretrained import load_pretrained

SHAPE = SHAPES["sit"]
SIT = draw_weights(SHAPE)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_tiny_autoencoder("AutoencoderTiny", tmp_path_factory.mktemp("vae"))


@pytest.fixture
def publish(encoder, tmp_path):
    """`publish(content, shape, key=value, …)` imports a checkpoint; a SiT unless it is given."""

    def start(content=SIT, shape=SHAPE, **changes):
        return import_published(tmp_path, content, encoder, shape, **changes)

    return start


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_imported_weights_compute_the_papers_equations(shape, publish):
    weights = draw_weights(shape)
    model, spec = load_pretrained(publish(weights, shape), CPU)
    side = shape.rows * shape.patch
    assert (spec.channels, spec.height, spec.width) == (shape.channels, side, side)
    assert spec.num_classes == shape.classes
    draw = torch.Generator().manual_seed(1)
    times = torch.tensor([0.0, 1e-3, 0.2, 0.5, 0.77, 0.999, 1.0])
    x = torch.randn(len(times), shape.channels, side, side, generator=draw)
    y = torch.arange(len(times)) % (shape.classes + 1)  # the null label too
    # the output of REPA's network is ε - z at the time of the noise, which is ours
    expected = -velocity(weights, shape, x, 1.0 - times, y)
    if shape.repa:
        expected = velocity(weights, shape, x, times, y)
    assert expected.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(model(x, times, y), expected, atol=1e-5, rtol=1e-5)


def test_samples_are_those_of_the_published_model(publish):
    """They have the same noise, Euler steps from noise to image in the model's own time, and its
    normalisation."""
    shape = SHAPES["lightningdit"]
    weights = draw_weights(shape)
    run = load_run(publish(weights, shape), device="cpu")
    labels = [0, 3, 4]
    mean = torch.arange(3).view(-1, 1, 1) / 4

    def draw(forward, steps):
        sampling = run.change_sampling(solver="euler", steps=steps, guidance=1.0)
        turns = Conditions.of_classes(run.spec, labels, labels, CPU)
        return SampleStream(forward, run.spec, sampling, turns, 0, 3).draw_batch(0)[1]

    # a model without velocity returns the noise
    x = (draw(lambda x, t, y: torch.zeros_like(x), 1) - mean) / 2.0
    for i in range(5):
        x = x + velocity(weights, shape, x, torch.full((3,), i / 5), torch.tensor(labels)) / 5
    torch.testing.assert_close(draw(run.forward, 5), x * 2.0 + mean, atol=1e-4, rtol=1e-4)


def test_a_training_checkpoint_gives_its_averages(publish, tmp_path):
    """The weights have the prefixes of data parallelism and torch.compile, and the trainer's state
    beside them."""
    averages = {f"module._orig_mod.{k}": v for k, v in draw_weights(SHAPE, seed=1).items()}
    trained = {f"_orig_mod.module.{key}": value for key, value in SIT.items()}
    args = argparse.Namespace(model="SiT-XL/2")
    content = {"model": trained, "ema": averages, "opt": {}, "args": args, "steps": 7}
    ema, spec = load_pretrained(publish(content), CPU)
    assert torch.equal(ema.pos_embed, averages["module._orig_mod.pos_embed"])
    assert spec.mean == [0.0] * 3
    assert spec.std == [1 / 0.18215] * 3
    out = str(tmp_path / "raw.safetensors")
    model, _ = load_pretrained(publish(content, weights="model", out=out), CPU)
    assert torch.equal(model.pos_embed, SIT["pos_embed"])


def make_linear(name, rows):
    return {f"{name}.weight": torch.ones(rows, 24), f"{name}.bias": torch.ones(rows)}


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (SIT | {"args": Evil()}, "cannot be read .*nothing is unpickled"),
        (
            {"ema": SIT, "args": argparse.Namespace(model="DiT-XL/2")},
            "checkpoint of DiT-XL/2: DiT predicts the noise",
        ),
        (
            draw_weights(SHAPES["lightningdit"]),
            "holds a lightningdit, by its tensors and arguments; use kind=",
        ),
        (draw_weights(SHAPES["repa"]), "holds a repa, .* use kind=repa"),
        (SIT | {f"copy.{i}": SIT["pos_embed"] for i in range(999)}, "its tensors share memory"),
        (
            {name: SIT[name] for name in SIT if name != "blocks.1.attn.proj.bias"},
            "has no blocks.1.attn.proj.bias, which SiT and",
        ),
        (
            SIT | {"blocks.0.norm3.weight": torch.ones(3)},
            "has blocks.0.norm3.weight, which this version does not know",
        ),
        (
            SIT | {"final_layer.linear.bias": torch.ones(7)},
            r"final_layer.linear.bias has shape \(7,\), and the rest",
        ),
        (SIT | {"pos_embed": torch.ones(1, 8, 24)}, "8 tokens, which are no square"),
        (
            SIT | make_linear("final_layer.linear", 13),
            "13 rows, and 3 channels in patches of 2 need 12",
        ),
        (
            SIT | make_linear("blocks.0.adaLN_modulation.1", 96),
            "has 4 modulations; this version knows",
        ),
        ({"model": SIT}, "has no ema; use weights=model"),
        ([1, 2], "its content is no tensor of numbers"),
        (SIT | {7: torch.ones(1)}, "7 is no tensor of numbers"),
        (SIT | {"pos_embed": SIT["pos_embed"].to_sparse()}, "pos_embed is no tensor of numbers"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(content, sentence, publish, tmp_path, capfd):
    with expect_refusal(sentence):
        publish(content)
    assert [file.name for file in tmp_path.iterdir()] == ["published.pt"]
    assert "unpickled" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("kind", "args", "sentence"),
    [
        ("sit", {"enc_type": "dinov2-vit-b"}, "holds a repa, .* use kind=repa"),
        ("repa", {"prediction": "velocity"}, "holds a sit"),
        ("repa", {"path_type": "cosine"}, "prediction cosine v"),
        (
            "repa",
            {"prediction": "v", "projection_layer_type": "conv"},
            "holds an iREPA, .* statistics=<its sdvae",
        ),
    ],
)
def test_the_arguments_of_the_training_tell_what_a_checkpoint_is(kind, args, sentence, publish):
    for content in (args, argparse.Namespace(**args)):
        with expect_refusal(sentence):
            publish({"ema": SIT, "args": content}, kind=kind)


def test_irepa_is_normalised_by_its_file(publish, tmp_path):
    file = tmp_path / "sdvae-ft-mse-f8d4-latents-stats.pt"
    torch.save({"latents_bias": torch.ones(3), "latents_scale": torch.ones(1, 3) / 2}, file)
    _, spec = load_pretrained(publish(kind="repa", statistics=str(file)), CPU)
    assert (spec.mean, spec.std) == ([1.0] * 3, [2.0] * 3)


def test_sit_without_an_encoder_has_the_channels_of_stable_diffusion(publish):
    with expect_refusal("draws latents of 3 channels, and encoder=sd.* makes 4"):
        publish(encoder=None)


def test_no_path_is_written_over_and_classes_have_names(publish, tmp_path):
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\na\n")  # ImageNet has two classes named crane
    _, spec = load_pretrained(publish(classes=str(tmp_path / "names.txt")), CPU)
    assert spec.names == list("abcda")
    with expect_refusal("is there already"):
        publish()
    source = tmp_path / "DiT-XL-2.safetensors"
    save_file(SIT, source)
    with expect_refusal("DiT predicts the noise"):
        publish(source=str(source), out="x.safetensors")
