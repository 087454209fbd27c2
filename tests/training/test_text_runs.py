"""Runs on captions: techniques change nothing, restarts are exact, forecasts count the text."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from common.config.compose import compose
from data.manifest import read_manifest
from sampling.load import load_run
from scripts.plan.memory import forecast
from scripts.plan.question import make_question
from tests.harness.batches import select
from tests.harness.captions import DIGITS, save_bert, save_digits
from tests.harness.refusals import expect_refusal
from tests.harness.sets import measure_kept_bytes
from tests.harness.steps import compose_words, tiny_training
from tests.harness.words import CPU
from train import train
from training.checkpoint.load import list_complete
from training.drawing import check_guidance
from training.inputs import build_loader


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return save_digits(tmp_path_factory.mktemp("digits") / "set", count=64)


def text_words(digits, *more):
    return ["data=resident", f"data.path={digits}", "model.conditioning=text", *more]


@cache
def compute_losses(folder, values=()):
    """The losses of two steps on captions whose tokens are read."""
    words = text_words(folder, "model.text_tokens=true")
    training = tiny_training("hybrid", *words, on_unavailable="emulate", **dict(values))
    return torch.stack([training.take_step().loss for _ in range(2)])


@pytest.mark.parametrize(
    ("values", "tolerance"),
    [
        ({"gradient_checkpointing": True}, 1e-6),
        ({"gradient_checkpointing": True, "checkpoint_policy": "selective"}, 1e-6),
        ({"compile": True}, 1e-4),
        ({"compile": True, "compile_scope": "model"}, 1e-4),
        ({"attention": "math"}, 1e-4),
        ({"precision": "bf16"}, 0.05),
        ({"offload_activations": True}, 1e-6),
    ],
)
def test_techniques_compute_the_same(values, tolerance, digits, quick_compiler):
    """Of the two layers of the model the second one reads text."""
    fast = compute_losses(digits, tuple(values.items()))
    plain = compute_losses(digits)
    torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)


def test_half_of_the_captions_are_dropped_by_the_position_alone(digits):
    """The same samples in one batch or in two have the same losses."""
    training = tiny_training("dit", *text_words(digits), "objective.label_dropout=0.5")
    batch = next(training.loader)
    whole = training.step.compute_losses(batch).flow
    part = select(batch, torch.arange(5, 8))
    torch.testing.assert_close(training.step.compute_losses(part).flow, whole[5:])

    seen = []
    embed = training.model.text_embed
    embed.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[1]))
    for _ in range(40):
        training.step.compute_losses(next(training.loader))
    share = torch.cat(seen).float().mean()
    assert abs(share - 0.5) < 4 * 0.5 / (40 * 8) ** 0.5


def test_a_resumed_run_is_exact(digits, run):
    words = [*text_words(digits), "data=webdataset", "data.num_workers=0", "model=dit_s"]
    words += ["model.text_tokens=true", "total_samples=80", "save_every=3", "eval_every=3"]
    words += ["deterministic=true"]
    whole = run(*words, folder="whole")
    first = list_complete(Path(whole["run_dir"]) / "checkpoints")[0]
    resumed = run(*words, f"resume={first}", folder="resumed")
    assert (resumed["eval_loss"], resumed["loss"]) == (whole["eval_loss"], whole["loss"])
    with expect_refusal("conditioning"):
        run(*words, "model.conditioning=class_and_text", folder="whole")


def test_distances_and_grids_are_drawn_of_pairs_of_the_data(digits):
    """Label and caption of a sample of a model of both belong together, in the order of seed 0."""
    words = [*text_words(digits), "model.conditioning=class_and_text", "seed=3"]
    training = tiny_training("dit", *words)
    numbers = {}
    for source in ("train", "held_out"):
        conditions = training.choose_conditions(source, 40)
        labels, text = conditions(torch.arange(50))
        for label, number in zip(labels.tolist(), text.numbers.tolist(), strict=True):
            assert DIGITS[label] in conditions.names[number]
        assert conditions.source == source
        numbers[source] = text.numbers
    first = next(build_loader(training.cfg.data, 0, 40, CPU, text="pooled")).condition.numbers
    assert torch.equal(numbers["train"], torch.cat((first, first[:10])))
    assert not torch.equal(numbers["held_out"], numbers["train"])


def test_guidance_needs_classes_or_captions(digits):
    """A model of classes does not read the captions of its set."""
    spec = replace(tiny_training("dit", *text_words(digits)).loader.spec, num_classes=0)
    check_guidance(spec, "pooled", 2.0)
    with expect_refusal("no classes to guide to; set model.conditioning=text, for it has captions"):
        check_guidance(spec, "none", 2.0)


def test_an_adapter_trains_beside_captions(digits, run, tmp_path):
    """From the captions of a small set it subtracts the mean that its base subtracts."""
    base = run(*text_words(digits, "model=dit_s", "model.text_tokens=true"), "save_every=2")
    small = save_digits(tmp_path / "set", ["this is a {}"], count=16)
    short = ["total_samples=16", "batch_size=8", "eval_every=0", "sample_every=0", "save_every=2"]
    words = ["data=resident", f"data.path={small}", "model=pretrained", "adapter=lora"]
    folders = [f"init_from={base['run_dir']}", f"run_dir={tmp_path}/tuned"]
    assert train(compose([*words, *short, *folders]))["steps"] == 2
    means = [load_run(path).spec.text.mean for path in (base["run_dir"], tmp_path / "tuned")]
    assert means[0] == means[1] != read_manifest(small).text.mean


def test_a_model_of_another_text_encoder_is_refused(digits, run, tmp_path):
    pytest.importorskip("transformers")
    base = run(*text_words(digits, "model=dit_s"), "save_every=2")
    encoder = {"_target_": "models.text_encoders.HubTextEncoder", "path": str(save_bert(tmp_path))}
    other = save_digits(tmp_path / "set", ["a {}"], count=32, encoder=encoder)
    words = ["model.text_tokens=false", f"init_from={base['run_dir']}"]
    with expect_refusal("was trained on texts of another text_encoder than the data"):
        run(*text_words(other, "model=dit_s", *words), folder="other")


def test_forecasts_count_what_the_text_keeps(digits):
    words = ["model=dit_s", "model.dim=64", "model.head_dim=32", "model.depth=4", "batch_size=32"]
    words += ["runtime=eager", *text_words(digits, "model.text_tokens=true")]
    counted = forecast(make_question(compose_words(*words), 2.0**34, gpu=False)).kept
    training = tiny_training("dit", *text_words(digits, "model.text_tokens=true"), depth=4)
    measured = measure_kept_bytes(training, 32)
    assert counted == pytest.approx(measured, rel=0.05)
    plain = tiny_training("dit", "data=resident", f"data.path={digits}", depth=4)
    assert measured > 1.02 * measure_kept_bytes(plain, 32)
