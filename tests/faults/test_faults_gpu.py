"""Faults on a GPU: what a captured step, page-locked copies and real memory add."""

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.outcomes import are_equal, read_lines
from training.checkpoint.load import find_damage, list_complete

pytestmark = pytest.mark.gpu
MANY_STEPS = [
    "runtime.device=cuda",
    "total_samples=320",
    "log_every=1",
    "save_every=3",
    "keep_checkpoints=99",
]
GRAPH = ["runtime=max", "runtime.compile=false"]


def read_tensors(run, step, name="model"):
    return load_file(run / "checkpoints" / f"step-{step}" / f"{name}.safetensors")


def test_a_save_beside_captured_steps_is_of_its_step(run, tmp_path):
    """The copies are queued between two replays, which write to the same addresses."""
    words = [*MANY_STEPS, *GRAPH, "deterministic=true"]
    run(*words, "async_checkpoints=true", folder="one")
    run(*words, "async_checkpoints=false", folder="two")
    for checkpoint in list_complete(tmp_path / "one" / "checkpoints"):
        assert find_damage(checkpoint) is None
        step = int(checkpoint.name.removeprefix("step-"))
        for name in ("model", "ema", "rank-0-of-1"):
            assert are_equal(*(read_tensors(tmp_path / run, step, name) for run in ("one", "two")))


@pytest.mark.parametrize("words", [[], GRAPH], ids=["eager", "captured"])
def test_bad_steps_are_skipped_on_the_device(words, run, run_dir, poison_latents):
    """A NaN, and a spike: each skipped, also by a replayed step, which sees the data only."""
    poison_latents(20, 20)
    poison_latents(30, 30, 1e6)
    run(*MANY_STEPS, *words, "save_every=1", "guards.spike_sigmas=6", "guards.spike_window=8")
    skipped = [line["step"] for line in read_lines(run_dir) if line["skipped"]]
    assert {20, 30} <= set(skipped)
    # The norms of a few of the 40 steps may look like spikes.
    assert len(skipped) <= 4
    for step in (20, 30):
        assert are_equal(*(read_tensors(run_dir, number) for number in (step - 1, step)))


def test_memory_that_runs_out_is_explained(run, run_dir):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(
            ValueError,
            match=r"out of memory in the (forward|backward) pass at step 0: .* GiB were taken",
        ):
            run(
                *MANY_STEPS,
                "batch_size=32768",
                "total_samples=65536",
                "model.dim=1024",
                "model.depth=8",
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not run_dir.exists()
