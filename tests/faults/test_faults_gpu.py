"""Faults on a GPU: what a captured step, page-locked copies and real memory add."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.digits import DigitLatents
from training.checkpoint.load import find_damage, list_complete

pytestmark = pytest.mark.gpu
Run = Callable[..., dict]
LONG = [
    "runtime.device=cuda",
    "total_samples=320",
    "log_every=1",
    "save_every=3",
    "keep_checkpoints=99",
]
GRAPH = ["runtime=max", "runtime.compile=false"]


def test_a_save_beside_captured_steps_is_of_its_step(run: Run, tmp_path: Path):
    """The copies are queued between two replays, which write to the same addresses."""
    words = [*LONG, *GRAPH, "deterministic=true"]
    run(*words, "async_checkpoints=true", folder="one")
    run(*words, "async_checkpoints=false", folder="two")
    for one in list_complete(tmp_path / "one" / "checkpoints"):
        two = tmp_path / "two" / "checkpoints" / one.name
        assert find_damage(one) is None
        for file in ("model.safetensors", "ema.safetensors", "rank-0-of-1.safetensors"):
            left = load_file(one / file)
            right = load_file(two / file)
            assert all(torch.equal(left[name], right[name]) for name in left), (one.name, file)


@pytest.mark.parametrize("words", [[], GRAPH], ids=["eager", "captured"])
def test_bad_steps_are_skipped_on_the_device(
    words: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A NaN, and a spike: each skipped, also by a replayed step, which sees the data only."""
    original = DigitLatents.__next__

    def poisoned(self: DigitLatents):
        batch = original(self)
        at = int(batch.position[0]) // 8 + 1
        factor = {20: float("nan"), 30: 1e6}.get(at, 1.0)
        return batch._replace(latents=batch.latents * factor)

    monkeypatch.setattr(DigitLatents, "__next__", poisoned)
    run(*LONG, *words, "save_every=1", "guards.spike_sigmas=6", "guards.spike_window=8")
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    skipped = [line["step"] for line in lines if line["skipped"]]
    assert {20, 30} <= set(skipped)
    assert len(skipped) <= 4  # of 40
    for step in (20, 30):
        folders = (tmp_path / "run" / "checkpoints" / f"step-{n}" for n in (step - 1, step))
        before, after = (load_file(folder / "model.safetensors") for folder in folders)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_memory_that_runs_out_is_explained(run: Run, tmp_path: Path):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(
            ValueError,
            match=r"out of memory in the (forward|backward) pass at step 0: .* GiB were taken",
        ):
            run(*LONG, "batch_size=32768", "total_samples=65536", "model.dim=1024", "model.depth=8")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not (tmp_path / "run").exists()
