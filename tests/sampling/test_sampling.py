"""Solvers, numbered samples, labels and the runtime of a run."""

import dataclasses
import math
import shutil

import numpy as np
import pytest
import torch

from common.files import read_object
from data.resident import ChunkedSet
from data.spec import LatentSpec
from models.requested_conditions import find_class_numbers, pair_conditions
from models.sampler import sample
from sampling import load as sampling
from tests.harness.draws import draw_samples, make_job
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_random_set
from tests.harness.words import CPU
from training.checkpoint.load import list_complete
from training.drawing import list_samples, open_data
from training.inputs import build_loader
from training.weights.adapter_file import load_model

MEAN = 0.7
STD = 0.4


def follow_gaussian(x, t):
    """The exact velocity of data z ~ N(MEAN, STD²): v = E[ε - z | x]. Its paths end at MEAN + STD ·
    x(1)."""
    variance = (1 - t) ** 2 * STD**2 + t**2
    centred = (x - (1 - t) * MEAN) / variance
    return t * centred - (MEAN + (1 - t) * STD**2 * centred)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(
    ("solver", "order", "bound"), [("euler", 1, 0.03), ("heun", 2, 3e-3), ("ab2", 2, 3e-3)]
)
def test_solvers_converge_with_their_order(solver, order, bound, shift):
    """Errors are distances from the known end of the path; a shift makes steps unequal."""
    noise = torch.full((1, 1, 1, 1), 1.3)
    exact = MEAN + STD * 1.3
    coarse, fine = (
        abs(sample(follow_gaussian, noise, steps, solver, shift).item() - exact)
        for steps in (40, 80)
    )
    assert order - 0.15 < math.log2(coarse / fine) < order + 0.6
    assert fine < bound


def test_ab2_weighs_steps_by_their_lengths():
    """It follows a velocity that is linear in time, but for the first step, which is Euler's."""
    end = sample(lambda x, t: torch.full_like(x, t), torch.zeros(1, 1, 1, 1), 4, "ab2", shift=3.0)
    assert end.item() == pytest.approx(-0.5 - (1.0 - 0.9) ** 2 / 2)


def test_the_sde_draws_the_distribution_of_the_data():
    """It does not follow the paths of the ODE: one starting point spreads."""
    draw = torch.Generator().manual_seed(0)
    steps = []

    def draw_noise(*step):
        steps.extend(step)
        return torch.randn(40_000, 1, 1, 1, generator=draw)

    noise = draw_noise()
    ends = sample(follow_gaussian, noise, 200, "sde", fresh=draw_noise)
    assert steps == [*range(199)]  # the last step adds none
    # four standard errors, and the error of 200 steps
    assert ends.mean().item() == pytest.approx(MEAN, abs=0.013)
    assert ends.std().item() == pytest.approx(STD, rel=0.03)
    assert abs(torch.corrcoef(torch.stack((noise.flatten(), ends.flatten())))[0, 1]) < 0.7
    with expect_refusal("solver=sde needs noise"):
        sample(follow_gaussian, noise, 2, "sde")


@pytest.mark.parametrize("solver", ["ab2", "sde"])
def test_a_sample_depends_on_seed_and_number_alone(trained, solver):
    """Equal batch sizes give equal bits, others differ by rounding."""
    six, four = (
        make_job(trained, f"batch_size={size}", f"solver={solver}", "seed=5").stream
        for size in (6, 4)
    )
    labels, latents = map(torch.cat, zip(*map(six.draw_batch, range(2)), strict=True))
    other_labels, others = map(torch.cat, zip(*map(four.draw_batch, range(3)), strict=True))
    assert labels.tolist() == other_labels.tolist() == [*range(10), 0, 1]
    torch.testing.assert_close(latents, others, rtol=1e-5, atol=1e-5)
    assert torch.equal(six.draw_batch(1)[1], latents[6:])
    assert not torch.allclose(latents[0], latents[10], atol=0.1)  # one label, other noise


@pytest.mark.usefixtures("quick_compiler")
def test_runtime_and_settings_are_those_of_the_run(trained):
    job = make_job(trained, "batch_size=4")
    assert job.stream.sampling.steps == 3
    ledger = job.ledger.as_dict()
    assert ledger["precision"]["requested"] == "fp32"
    assert "no GPU has proved" in ledger["cuda_graph"]["evidence"]
    assert job.describe_protocol()["weights"]["kind"] == "ema"
    compiled = make_job(trained, "batch_size=4", "runtime.compile=true", "steps=2")
    assert compiled.ledger.as_dict()["compile"]["active"] is True
    eager = make_job(trained, "steps=2").stream.draw_batch(0)[1][:4]
    torch.testing.assert_close(compiled.stream.draw_batch(0)[1], eager)


def test_labels_are_dealt_or_as_in_the_data(trained):
    dealt = make_job(trained, "labels=[3,7,7]", "batch_size=4", "count=8").stream
    assert dealt.draw_batch(1)[0].tolist() == [7, 7, 3, 7]
    one = make_job(trained, "labels=7", "batch_size=4", "count=4").stream
    assert one.draw_batch(0)[0].tolist() == [7] * 4
    data = make_job(trained, "labels=data", "batch_size=100").stream
    labels = data.draw_batch(3)[0]
    data.draw_batch(0)
    assert torch.equal(labels, data.draw_batch(3)[0])
    assert set(labels.tolist()) == set(range(10))


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("labels=[11]", "labels: 11 is no class of this run; its 10 classes are"),
        ("labels=[]", r"labels=\[\] names no class"),
        ("runtime.prcision=fp32", "prcision: there is no such key; did you mean precision"),
    ],
)
def test_a_mistake_is_a_sentence(word, sentence, trained):
    with expect_refusal(sentence):
        make_job(trained, word)


NAMED = LatentSpec(1, 2, 2, 6, 9, ["apple", "7", "pear", "pear", "5", "plum"], [0.0], [1.0])


def test_classes_go_by_number_and_by_name():
    assert find_class_numbers([3, "apple", "7", np.int64(1)], NAMED.names, 6) == [3, 0, 1, 1]
    assert find_class_numbers(["A\u0308pfel", "Äpfel"], ["A\u0308pfel"], 1) == [0, 0]
    nameless = dataclasses.replace(NAMED, class_names=[])
    assert find_class_numbers(["2", 0], nameless.names, 4) == [2, 0]


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (5, r"5 is the number of class 'plum' and the name of class 4; .*: 'plum' or '5'\.$"),
        ("aple", r"'aple' is no class of this run; did you mean apple\?"),
        ("quince", "its 6 classes are, from 0 on, apple, 7, pear, pear, 5, plum."),
        (7, "7 is no class"),
        (True, "True is no class"),
        ("pear", r"'pear' is the name of 2 classes, \[2, 3\]; give their numbers"),
        ("x" * 5000, "x{70}"),
    ],
)
def test_a_label_that_is_no_class_is_a_short_sentence(label, sentence):
    with expect_refusal(f"^labels: .*{sentence}") as caught:
        find_class_numbers([label], NAMED.names, 6)
    assert len(str(caught.value)) < 300


def test_labels_may_be_arrays_and_prompts_must_be_texts():
    for labels in ([1, 2], np.array([1, 2]), torch.tensor([1, 2])):
        assert pair_conditions("class", labels, None) == ([1, 2], [])
    for label in (1, np.int64(1), torch.tensor(1)):
        assert pair_conditions("class", label, []) == ([1], [])
    assert pair_conditions("class_and_text", "one", "a red apple") == (["one"], ["a red apple"])
    assert pair_conditions("text", [], ["one \udcff"]) == ([0], ["one ?"])
    for prompts in (3, [3], [None]):
        with expect_refusal("must be texts"):
            pair_conditions("text", [], prompts)


def test_names_are_drawn_and_recorded(trained, tmp_path):
    """The digits' names look like numbers: in quotes they are names."""
    assert make_job(trained, "labels=['7',3]").describe_protocol()["labels"] == [7, 3]
    npz = draw_samples(trained, tmp_path / "named", labels=["7", 3, 5], count=2)
    assert np.load(npz)["labels"].tolist() == [7, 3]
    assert read_object(tmp_path / "named.json")["classes"] == {"3": "3", "7": "7"}


@pytest.mark.fault(
    "sampling from a run that removes its checkpoint meanwhile", "the next one is loaded"
)
@pytest.mark.parametrize("after", [False, True], ids=["before it is read", "after"])
def test_a_run_that_saves_while_it_is_read(after, trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "live")
    newest = list_complete(tmp_path / "live" / "checkpoints")[-1]
    opened = []

    def load_while_saving(file, *arguments):
        opened.append(file.parent.name)
        model = load_model(file, *arguments) if after else None
        if newest.exists():
            newest.rename(newest.with_name("step-99"))
        return model or load_model(file, *arguments)

    monkeypatch.setattr(sampling, "load_model", load_while_saving)
    assert make_job(tmp_path / "live").describe_protocol()["weights"]["step"] == 8
    assert opened == (["step-8"] if after else ["step-8", "step-99"])


def test_labels_of_a_set_in_chunks(tmp_path):
    """The position of the loader of a set in chunks is more than a number of samples."""
    save_random_set(tmp_path, 40, held_out=4)
    node = {"_target_": "data.resident.ResidentLatents", "path": str(tmp_path)}
    node["device_memory_gib"] = 5e-6
    assert isinstance(build_loader(node, 0, 4, CPU).samples, ChunkedSet)
    loader = build_loader(node, 0, 20, CPU)
    samples = list_samples(open_data(node, loader.spec, 0), "data", 20)
    assert torch.equal(samples[0], next(loader).condition.labels)
    with expect_refusal("its weights were trained on another; restore them"):
        open_data(node, dataclasses.replace(loader.spec, fingerprint="another"), 0)
