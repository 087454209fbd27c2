"""A run that stops anywhere and starts again by the same command ends with the same bits.

tests/faults/test_kills.py kills runs at any moment; here a copy of a finished run loses its newest
checkpoints, which is all that a kill leaves.
"""

import pytest

from common.config.compose import compose
from tests.harness.outcomes import copy_until, read_lines, read_outcome
from tests.harness.refusals import expect_refusal
from tests.harness.sets import save_random_set
from tests.harness.words import TINY_RUN, slow
from train import train
from training.checkpoint.load import find_checkpoints

WORDS = [
    *TINY_RUN,
    "deterministic=true",
    "runtime=eager",
    "total_samples=192",
    "save_every=5",
    "log_every=4",
    "eval_every=8",
    "keep_checkpoints=9",
    "model.drop_path=0.2",
    "accumulation_steps=2",
]
"""Twenty-four steps."""


def start_run(folder, *words):
    train(compose([*WORDS, f"run_dir={folder}", *words]))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume") / "uninterrupted"
    start_run(folder)
    return folder


@pytest.mark.parametrize("step", [10, *(slow(step) for step in (5, 15, 20))])
def test_resuming_from_any_checkpoint_ends_the_same(uninterrupted, tmp_path, step):
    folder = copy_until(uninterrupted, tmp_path / "resumed", step)
    start_run(folder)
    assert read_outcome(folder) == read_outcome(uninterrupted)


@pytest.mark.parametrize(
    "words",
    [
        slow(["data=synthetic", "data.height=8", "data.width=8"]),
        ["runtime=fast", "model=dit_xs"],
        # The checkpoint of step 5 holds a part of a log window, with the sums of extra terms.
        ["model=hybrid_xs", "objective.align_weight=1", "model.internal_block=1"],
        ["data=webdataset", "data.window=6", "data.num_workers=1"],
        # Device memory for a part of the set: it is read in chunks.
        ["data=resident", f"data.device_memory_gib={30 * 240 / 2**30}"],
    ],
)
def test_other_loaders_models_and_runtimes_resume_too(words, tmp_path):
    words = [*words, "eval_every=0", "total_samples=64"]
    if words[0] in ("data=webdataset", "data=resident"):
        words.append(f"data.path={save_random_set(tmp_path / 'set', 45, held_out=4)}")
    start_run(tmp_path / "whole", *words)
    resumed = copy_until(tmp_path / "whole", tmp_path / "resumed", 5)
    start_run(resumed, *words)
    assert read_outcome(resumed) == read_outcome(tmp_path / "whole")
    if words[0] == "data=webdataset":
        words = ["data=resident", words[-1], f"resume={tmp_path / 'whole'}"]
        with expect_refusal(r"The latents are the same, but their order, .* was"):
            start_run(tmp_path / "other", *words)


@pytest.mark.fault(
    "a model, data set or seed other than the checkpoints", "refused with the difference"
)
def test_another_model_or_data_set_is_refused(uninterrupted, tmp_path):
    copy = copy_until(uninterrupted, tmp_path / "copy", 24)
    for words, sentence in (
        (["model.depth=3"], "another model: depth was 2, is 3"),
        (["seed=1"], "another data: .*seed was 0, is 1"),
        (["objective.timestep_shift=2"], "another objective: timestep_shift was 1.0, is 2"),
        (["optim._target_=torch.optim.SGD", "~optim.betas"], "another optimizer: class was"),
        (["resume=never"], "resume=never"),
        # a path without a checkpoint, even where run_dir has some
        (["resume=/nope"], "resume=/nope is or has no usable checkpoint; name a run folder"),
        ([f"resume={copy / 'checkpoints' / 'step-5'}"], "holds a later checkpoint, step-24"),
    ):
        with expect_refusal(sentence):
            start_run(copy, *words)
    assert read_outcome(copy) == read_outcome(uninterrupted)


@pytest.mark.fault(
    "other settings on resume, such as accumulation_steps", "allowed, and said; the same stream"
)
def test_other_settings_are_allowed_and_said(uninterrupted, tmp_path, capsys):
    folder = copy_until(uninterrupted, tmp_path / "copy", 20)
    start_run(folder, "accumulation_steps=1", "log_every=2", "eval_every=12")
    assert "at step 20; since then accumulation_steps was 2, is 1\n" in capsys.readouterr().out
    expected = read_lines(uninterrupted)[-1]
    last = read_lines(folder)[-1]
    assert expected["step"] == last["step"] == 24
    assert last["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)


def test_a_chosen_checkpoint_is_resumed_in_a_new_folder(uninterrupted, tmp_path):
    """The same command then goes on with that folder."""
    words = [f"resume={uninterrupted / 'checkpoints' / 'step-20'}"]
    start_run(tmp_path, *words)
    assert read_outcome(tmp_path).state == read_outcome(uninterrupted).state
    lines = read_lines(tmp_path)
    start_run(tmp_path, *words)
    assert read_lines(tmp_path) == lines


def test_a_run_folder_is_resumed_at_its_newest_checkpoint(uninterrupted, tmp_path, capsys):
    last = uninterrupted / "checkpoints" / "step-24"
    start_run(tmp_path / "branch", f"resume={uninterrupted}")
    assert f"resumed from {last} at step 24" in capsys.readouterr().out
    for path in (uninterrupted, uninterrupted / "checkpoints", last):
        assert find_checkpoints(str(path))[-1] == last
