"""Published weights, imported, compute what the papers' equations compute, and can be sampled from
and trained on."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from accel.techniques.fused_kernels import FusedAddNorm
from sampling.load import SampleStream, deal_labels_in_turn, load_run
from scripts.import_weights import Kind, WeightsChoice, WeightsConfig, import_weights
from tests.harness.published_models import SHAPES, Weights, draw_weights, import_published, velocity
from tests.harness.sets import save_tiny_autoencoder
from tests.harness.words import CPU
from train import train
from training.config.compose import compose
from training.weights.pretrained import build_on_meta, load_pretrained, read_description


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_autoencoder("AutoencoderTiny", tmp_path_factory.mktemp("vae"))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_imported_weights_compute_the_papers_equations(shape, encoder, tmp_path):
    weights = draw_weights(shape)
    model, spec = load_pretrained(import_published(tmp_path, weights, encoder, shape), CPU)
    side = shape.rows * shape.patch
    assert (spec.channels, spec.height, spec.width, spec.num_classes) == (
        shape.channels,
        side,
        side,
        shape.classes,
    )
    draw = torch.Generator().manual_seed(1)
    times = torch.tensor([0.0, 1e-3, 0.2, 0.5, 0.77, 0.999, 1.0])
    x = torch.randn(len(times), shape.channels, side, side, generator=draw)
    y = torch.arange(len(times)) % (shape.classes + 1)  # the null label too
    expected = velocity(weights, shape, x, 1.0 - times, y)
    assert expected.std() > 0.1
    with torch.no_grad():
        torch.testing.assert_close(model(x, times, y), -expected, atol=1e-5, rtol=1e-5)


def test_samples_are_those_of_the_published_model(encoder, tmp_path):
    """The same noise, Euler steps from noise to image in its own time, and its own
    normalisation."""
    shape = SHAPES["lightningdit"]
    weights = draw_weights(shape)
    run = load_run(import_published(tmp_path, weights, encoder, shape), device="cpu")
    labels = [0, 3, 4]
    sampling = run.change_sampling(solver="euler", steps=5, guidance=1.0)
    stream = SampleStream(
        run.forward, run.spec, sampling, deal_labels_in_turn(labels, CPU), 0, 3, CPU
    )
    _, found = stream.draw_batch(0)
    noiseless = run.change_sampling(solver="euler", steps=1, guidance=1.0)
    zero = SampleStream(
        lambda x, t, y: torch.zeros_like(x), run.spec, noiseless, stream.labels, 0, 3, CPU
    )
    # the noise that both begin with
    x = (zero.draw_batch(0)[1] - torch.arange(3).view(-1, 1, 1) / 4) / 2.0
    for i in range(5):
        x = x + velocity(weights, shape, x, torch.full((3,), i / 5), torch.tensor(labels)) / 5
    torch.testing.assert_close(
        found, x * 2.0 + torch.arange(3).view(-1, 1, 1) / 4, atol=1e-4, rtol=1e-4
    )


def test_a_training_checkpoint_gives_its_averages(encoder, tmp_path):
    """With what its trainer put beside them, and the prefix of data parallelism."""
    shape = SHAPES["sit"]
    one = draw_weights(shape)
    other = {f"module.{k}": v for k, v in draw_weights(shape, seed=1).items()}
    content = {
        "model": one,
        "ema": other,
        "opt": {},
        "args": argparse.Namespace(model="SiT-XL/2"),
        "steps": 7,
    }
    ema, _ = load_pretrained(import_published(tmp_path, content, encoder, shape), CPU)
    (tmp_path / "ours.safetensors").unlink()
    model, spec = load_pretrained(
        import_published(tmp_path, content, encoder, shape, weights=WeightsChoice.model), CPU
    )
    assert torch.equal(ema.pos_embed, other["module.pos_embed"])
    assert torch.equal(model.pos_embed, one["pos_embed"])
    assert spec.mean == [0.0] * 3
    assert spec.std == [1 / 0.18215] * 3


class Evil:
    def __reduce__(self):
        return print, ("unpickled",)


def without(weights: Weights, *names: str) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name not in names}


SIT = draw_weights(SHAPES["sit"])


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
            "holds a lightningdit, by the names of its tensors; use kind=",
        ),
        (SIT | {"pos_embed": torch.zeros(1).expand(1, 9, 24)}, "pos_embed is no tensor of numbers"),
        (SIT | {f"copy.{i}": SIT["pos_embed"] for i in range(999)}, "its tensors share memory"),
        (without(SIT, "blocks.1.attn.proj.bias"), "has no blocks.1.attn.proj.bias, which SiT and"),
        (
            SIT | {"blocks.0.norm3.weight": torch.ones(3)},
            "has blocks.0.norm3.weight, which this version does not know",
        ),
        (
            SIT | {"final_layer.linear.bias": torch.ones(7)},
            r"final_layer.linear.bias has shape \(7,\), and the rest",
        ),
        (
            SIT | {"final_layer.linear.weight": torch.ones(13, 24)},
            "13 rows, and 3 channels in patches of 2 need 12",
        ),
        (SIT | {"pos_embed": torch.ones(1, 8, 24)}, "8 tokens, which are no square"),
        (
            SIT | {"blocks.0.adaLN_modulation.1.weight": torch.ones(96, 24)},
            "has 4 modulations; this version knows",
        ),
        ({"model": SIT}, "has no ema; use weights=model"),
        ([1, 2], "holds a list, not tensors by name"),
        ({"x": "y"}, "x is no tensor of numbers"),
        (SIT | {7: torch.ones(1)}, "7 is no tensor of numbers"),
        (SIT | {"pos_embed": SIT["pos_embed"].to_sparse()}, "pos_embed is no tensor of numbers"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(content, sentence, encoder, tmp_path, capfd):
    with pytest.raises(ValueError, match=sentence):
        import_published(tmp_path, content, encoder, SHAPES["sit"])
    assert [file.name for file in tmp_path.iterdir()] == ["published.pt"]
    assert "unpickled" not in capfd.readouterr().out


def test_sit_without_an_encoder_has_the_channels_of_stable_diffusion(tmp_path):
    source = tmp_path / "sit.pt"
    torch.save(SIT, source)
    config = WeightsConfig(
        source=str(source), kind=Kind.sit, out=str(tmp_path / "x.safetensors"), head_dim=12
    )
    with pytest.raises(
        ValueError, match=r"draws latents of 3 channels, and Stable Diffusion's VAE.*makes 4"
    ):
        import_weights(config)


def test_no_path_is_written_over_and_classes_have_names(encoder, tmp_path):
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\na\n")  # ImageNet has two classes named crane
    file = import_published(
        tmp_path, SIT, encoder, SHAPES["sit"], classes=str(tmp_path / "names.txt")
    )
    assert load_pretrained(file, CPU)[1].names == list("abcda")
    with pytest.raises(ValueError, match="is there already"):
        import_published(tmp_path, SIT, encoder, SHAPES["sit"])
    save_file(SIT, tmp_path / "DiT-XL-2.safetensors")
    with pytest.raises(ValueError, match="DiT predicts the noise"):
        import_published(
            tmp_path,
            SIT,
            encoder,
            SHAPES["sit"],
            source=str(tmp_path / "DiT-XL-2.safetensors"),
            out="x.safetensors",
        )


@pytest.mark.parametrize(
    "shape", [SHAPES["sit"], SHAPES["lightningdit"]], ids=["sit", "lightningdit"]
)
def test_an_imported_model_trains(shape, encoder, tmp_path):
    base = import_published(tmp_path, draw_weights(shape), encoder, shape)
    words = [
        "data=synthetic",
        f"data.channels={shape.channels}",
        "data.height=6",
        "data.width=6",
        "data.num_classes=5",
    ]
    words += [
        "model=pretrained",
        f"init_from={base}",
        "batch_size=8",
        "total_samples=32",
        "sample_every=0",
    ]
    words += [
        "runtime.gradient_checkpointing=true",
        "runtime.weights=bf16",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert train(compose(words))["loss"] > 0.0


def test_layer_norm_of_imported_weights_has_the_kernel(encoder, tmp_path):
    """The fused operator computes what its definition does, in every block, and in the last
    norm."""
    model, spec = load_pretrained(import_published(tmp_path, SIT, encoder, SHAPES["sit"]), CPU)
    x = torch.randn(2, spec.channels, 6, 6)
    t = torch.rand(2)
    y = torch.tensor([0, 3])
    plain = model(x, t, y)
    technique = FusedAddNorm(True, CPU)
    assert technique.asks_for_proof(model)
    technique.on_model(model)
    assert len(technique.switches) == model.depth
    for block in technique.switches:
        block.fused_add_norm = True
    torch.testing.assert_close(model(x, t, y), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "shape", [SHAPES["sit"], SHAPES["lightningdit"]], ids=["sit", "lightningdit"]
)
def test_flops_of_imported_models_agree_with_a_counter(shape, encoder, tmp_path):
    file = import_published(tmp_path, draw_weights(shape), encoder, shape)
    with torch.device("meta"):
        model = build_on_meta(
            read_description(file).model, read_description(file).spec
        ).requires_grad_(False)
        x = torch.empty(1, shape.channels, 6, 6)
        t = torch.empty(1)
        y = torch.zeros(1, dtype=torch.long)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x, t, y)
    assert counter.get_total_flops() == model.flops_per_sample()
